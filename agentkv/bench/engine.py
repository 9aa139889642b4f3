"""`agentkv bench engine`: prefill, decode and end-to-end rates of one model against a peer, in one run.

Repeats of the two sides take turns, so that what else the machine does hits both; a ratio is that of a pair of repeats, and
the figure is the median of the ratios.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agentkv.bench.conditions import conditions, load
from agentkv.bench.peers import Ours, Run, Side
from agentkv.bench.servers import open_peer
from agentkv.bench.shapes import SHAPES, random_prompts, write_model
from agentkv.engine.core import EngineConfig
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.errors import BadRequest
from agentkv.runtime_engine import model_path

RATES = ("prefill", "decode", "end_to_end", "prefill_cpu", "decode_cpu")
"""See `Run.rates`; the last two where the peer runs in this process or was started here."""


@dataclass(frozen=True, slots=True)
class Work:
    """So many sequences of random prompts. peer_sequences: how many a peer that takes them one after another is given."""

    name: str
    sequences: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    peer_sequences: int | None = None


def run_engine(
    *,
    model: str = "qwen3-90m",
    peer: str = "transformers",
    prompt: int = 512,
    batch: int = 8,
    batch_prompt: int = 2048,
    new: int = 128,
    repeats: int = 3,
    peer_sequences: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Two workloads, `repeats` times each: one prompt of `prompt` tokens, and `batch` prompts of `batch_prompt` tokens; `new`
    greedy tokens after each.

    model: a name in SHAPES (random weights), a bundled model, a directory or a .gguf file. peer: see `open_peer`.
    peer_sequences: where the peer takes prompts one after another, so many of the batch's are measured (rates do not depend on
    how many); None is all. threads: of both sides; None is torch's own number.

    Returns the conditions and, by workload, every run's rates (tokens a second), their medians, the ratios to the peer and
    their medians. BadRequest for a count below 1 or a peer that cannot be had.
    """
    counts = {"prompt": prompt, "batch": batch, "batch_prompt": batch_prompt, "new": new - 1, "repeats": repeats}
    for name, value in counts.items():
        if value < 1:
            raise BadRequest(f"{name} is too small", param=name)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(model, Path(folder) / model) if model in SHAPES else model_path(model)
            loaded = load_model(path, device=device, dtype=dtype)
            most = max(prompt, batch_prompt) + new
            ours = Ours(loaded, _config(loaded, batch, most))
            with open_peer(peer, loaded, batch, most) as other, torch.inference_mode():
                works = [
                    Work("single", 1, prompt, new, repeats),
                    Work("batch", batch, batch_prompt, new, repeats, peer_sequences),
                ]
                results = {work.name: _measure(work, ours, other, loaded.config.vocab_size, tell) for work in works}
                told = conditions(loaded, model)
                return {**told, "peer": other.name, "peer_together": other.together, "repeats": repeats, "workloads": results}
    finally:
        torch.set_num_threads(before)


def _config(loaded: LoadedModel, rows: int, most: int) -> EngineConfig:
    """Room for all rows at once, in the sizes that a runtime chooses on this device."""
    page_size, step_tokens = (128, 1024) if loaded.device.type == "cpu" else (16, 8192)
    if most > loaded.window:
        raise BadRequest(f"{most} tokens are past the model's window of {loaded.window}", param="batch_prompt")
    stripes = sum(group.stripe_bytes for group in loaded.groups(page_size))
    memory = stripes * (-(-most // page_size) + 1) * (rows + 2)  # groups share slabs, and a few stay half empty
    return EngineConfig(
        memory=memory, window=most, page_size=page_size, max_rows=max(rows, 1), step_tokens=max(step_tokens, rows)
    )


def _measure(work: Work, ours: Side, other: Side, vocab_size: int, tell: Callable[[str], None] | None) -> dict[str, Any]:
    """One workload on both sides in turn, after a short run of each that is not counted."""
    sides = (ours, other)
    for side in sides:
        side.run(random_prompts(1, min(16, work.prompt_tokens), vocab_size, 0), 2)
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    same = asked = 0
    for repeat in range(work.repeats):
        prompts = random_prompts(work.sequences, work.prompt_tokens, vocab_size, repeat + 1)
        answers: dict[str, list[list[int]]] = {}
        for side in sides if repeat % 2 == 0 else reversed(sides):
            taken = prompts if side.together else prompts[: work.peer_sequences]
            told, answers[side.name] = _timed(side, taken, work.new_tokens)
            runs[side.name].append(told)
            if tell is not None:
                rates = ", ".join(f"{kind} {told[kind]:.1f}" for kind in told if kind in RATES)
                busy = f"{told['cores_got']:.2f} cores, load {told['load'][1]}"
                tell(f"{work.name} {repeat + 1}/{work.repeats} {side.name}: {rates} tok/s, {busy}")
        pairs = list(zip(answers[ours.name], answers[other.name], strict=False))  # the peer may have done fewer
        same, asked = same + sum(mine == theirs for mine, theirs in pairs), asked + len(pairs)
    kinds = [kind for kind in RATES if kind in runs[other.name][0]]
    ratios = {kind: [a[kind] / b[kind] for a, b in zip(runs[ours.name], runs[other.name], strict=True)] for kind in kinds}
    return {
        "sequences": work.sequences,
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": work.new_tokens,
        "runs": runs,
        "medians": {name: {kind: median(run[kind] for run in told) for kind in kinds} for name, told in runs.items()},
        "ratios": ratios,
        "ratio": {kind: median(values) for kind, values in ratios.items()},
        "equal_answers": f"{same} of {asked}" if other.gives_ids else "not known",
    }


def _timed(side: Side, prompts: Sequence[list[int]], new: int) -> tuple[dict[str, Any], list[list[int]]]:
    """A run's rates and times, with the load and the processor time that it got; and its tokens."""
    begun, clock, cpu = load(), time.perf_counter(), time.process_time()
    run: Run = side.run(prompts, new)
    cores = (time.process_time() - cpu) / (time.perf_counter() - clock)
    seconds = {"prefill_s": run.prefill_s, "decode_s": run.decode_s, "seconds": run.seconds}
    counts = {"sequences": len(prompts), "decoded": run.decoded}
    return {**run.rates(), **seconds, **counts, "cores_got": round(cores, 2), "load": [begun, load()]}, run.tokens
