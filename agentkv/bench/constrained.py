"""`agentkv bench constrained`: what holding answers to a JSON schema costs a decode step, beside free ones."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from agentkv import methods
from agentkv.bench.shapes import write_model
from agentkv.constraint import Form
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.grammar import Grammar, GrammarCompiler
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.errors import BadRequest
from agentkv.types import Sampling

END = 0
SYLLABLES = (
    *("an", "ba", "ce", "do", "er", "fi", "ga", "ho", "in", "ja", "ke", "li", "mo", "na", "or", "pe", "qu", "ra", "se"),
    *("ti", "un", "ve", "wi", "xa", "yo", "zu", "th", "st", "ing", "ment", "able", "tion"),
)
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^[a-z/_.]{4,60}$"},
            "kind": {"enum": ["file", "folder", "link"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
            "text": {"type": "string"},
        },
        "required": ["path", "kind", "size", "text"],
        "additionalProperties": False,
    },
}
"""Never complete in a measurement, so that every step draws in every row."""


class MadeUpWords:
    """A vocabulary of that many tokens: an end of text, every byte, and words of syllables, half of them with a blank."""

    def __init__(self, size: int) -> None:
        chance = random.Random(0)
        words: set[bytes] = set()
        while len(words) < size - 257:
            word = "".join(chance.choice(SYLLABLES) for _ in range(chance.randint(2, 4)))
            words.add((chance.choice(("", " ")) + chance.choice((word, word.capitalize()))).encode())
        self._words = [None, *(bytes([byte]) for byte in range(256)), *sorted(words)]

    @property
    def eos_ids(self) -> Collection[int]:
        """The end of text."""
        return (END,)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The word; None for the end of text."""
        return self._words[token_id]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Bytes as tokens; measurements need no better."""
        return [1 + byte for byte in text.encode()]


def run_constrained(
    *,
    batches: Collection[int] = (1, 8),
    steps: int = 24,
    rounds: int = 8,
    prompt: int = 64,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Decode steps of the 90M shape on the CPU, greedy, constrained and free rounds in turn.

    Returns, by batch size, the median milliseconds of a step of both kinds and `overhead`: how much longer the constrained
    one takes, as a share (0.05 is 5 %). cpu_overhead: the same of processor time, the masks' threads included, which other
    processes on the machine disturb less. compile_ms: time of the schema's first use, off the step path.
    """
    if min(batches, default=0) < 1 or steps < 2 or rounds < 1:
        raise BadRequest(f"batches={list(batches)}, steps={steps}, rounds={rounds}: at least 1, 2 and 1", param="batches")
    with TemporaryDirectory() as folder:
        loaded = load_model(write_model("qwen3-90m", Path(folder)), device="cpu", dtype="float32")
    vocabulary = MadeUpWords(loaded.config.vocab_size)
    compiler = GrammarCompiler(vocabulary, loaded.config.vocab_size)
    grammar = Grammar("start: @form\n", (("form", Form(kind="json", text=json.dumps(SCHEMA))),))
    began = time.perf_counter()
    compiler.compile(grammar)
    compiled = time.perf_counter() - began
    config = EngineConfig(memory=512 << 20, window=4096, page_size=128, max_rows=32, step_tokens=1024)
    llm = LLM(config, ModelRunner(loaded, config, methods.get("dense")))
    rows = []
    for batch in batches:
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(2 * rounds):
            held = bool((number + number // 2) % 2)  # free, held, held, free, ...: a drift meets both
            masks = [compiler.compile(grammar) if held else None for _ in range(batch)]
            requests = [
                Request([1 + (7 * row + place) % 256 for place in range(prompt)], Sampling(max_tokens=steps), mask=mask)
                for row, mask in enumerate(masks)
            ]
            times[held] += _step_times(llm, requests)
        free, free_cpu = (statistics.median(each) for each in zip(*times[False], strict=True))
        constrained, cpu = (statistics.median(each) for each in zip(*times[True], strict=True))
        row = {"batch": batch, "free_ms": free * 1e3, "constrained_ms": constrained * 1e3, "overhead": constrained / free - 1}
        row["cpu_overhead"] = cpu / free_cpu - 1
        rows.append(row)
        if tell is not None:
            wall, processor = f"{row['overhead']:+.1%}", f"{row['cpu_overhead']:+.1%}"
            tell(f"batch {batch:3}: {free * 1e3:8.2f} ms free, {constrained * 1e3:8.2f} ms held, {wall}, cpu {processor}")
    parameters = sum(each.numel() for each in loaded.model.parameters())
    conditions = {"parameters": parameters, "threads": torch.get_num_threads(), "vocabulary": loaded.config.vocab_size}
    return {"rows": rows, "compile_ms": compiled * 1e3, **conditions}


def _step_times(llm: LLM, requests: list[Request]) -> list[tuple[float, float]]:
    """Seconds, and seconds of processor time, of each step that only decodes."""
    seqs = [llm.add(request) for request in requests]
    times = []
    while llm.has_work:
        decoding = all(seq.num_generated for seq in seqs)
        began, began_cpu = time.perf_counter(), time.process_time()
        llm.step()
        if decoding:
            times.append((time.perf_counter() - began, time.process_time() - began_cpu))
    for seq in seqs:
        if seq.fault is not None:
            raise seq.fault
        llm.abort(seq)
    return times
