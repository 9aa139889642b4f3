"""`agentkv bench engine`: prefill, decode and end-to-end rates of one model against a peer, in one run.

Repeats of the two sides take turns, so that what else the machine does hits both; a ratio is that of a pair of repeats, and
the figure is the median of the ratios.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agentkv.bench.conditions import conditions, load
from agentkv.bench.peers import Ours, Run, Side, open_peer
from agentkv.bench.shapes import SHAPES, random_prompts, write_model
from agentkv.engine.core import EngineConfig
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.errors import BadRequest
from agentkv.runtime_engine import model_path

RATES = ("prefill", "decode", "end_to_end")


def run_engine(
    *,
    model: str = "qwen3-90m",
    peer: str = "transformers",
    prompt: int = 512,
    batch: int = 8,
    batch_prompt: int = 2048,
    new: int = 128,
    repeats: int = 3,
    threads: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Two workloads, `repeats` times each: one prompt of `prompt` tokens, and `batch` prompts of `batch_prompt` tokens; `new`
    greedy tokens after each.

    model: a name in SHAPES (random weights), a bundled model, a directory or a .gguf file. peer: see `open_peer`. threads: of
    both sides; None is torch's own number. Returns the conditions and, by workload, every run's rates (tokens a second), their
    medians, the ratios to the peer and their medians. BadRequest for a count below 1 or a peer that cannot be had.
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
            with open_peer(peer, loaded, most) as other, torch.inference_mode():
                works = {"single": (1, prompt), "batch": (batch, batch_prompt)}
                results = {
                    name: _measure([ours, other], loaded, count, length, new, repeats, tell or (lambda line: None), name)
                    for name, (count, length) in works.items()
                }
                told = conditions(loaded, model)
                return {**told, "peer": other.name, "peer_together": other.together, "repeats": repeats, "workloads": results}
    finally:
        torch.set_num_threads(before)


def _config(loaded: LoadedModel, rows: int, most: int) -> EngineConfig:
    """Room for all rows at once, in the sizes that a runtime chooses on this device."""
    page_size, step_tokens = (128, 1024) if loaded.device.type == "cpu" else (16, 8192)
    if most > loaded.window:
        raise BadRequest(f"{most} tokens are past the model's window of {loaded.window}", param="batch_prompt")
    memory = loaded.layout(page_size).stripe_bytes * (-(-most // page_size) + 1) * (rows + 1)
    return EngineConfig(
        memory=memory, window=most, page_size=page_size, max_rows=max(rows, 1), step_tokens=max(step_tokens, rows)
    )


def _measure(
    sides: Sequence[Side],
    loaded: LoadedModel,
    count: int,
    length: int,
    new: int,
    repeats: int,
    tell: Callable[[str], None],
    name: str,
) -> dict[str, Any]:
    """One workload on both sides in turn, after a short run of each that is not counted."""
    vocab_size = loaded.config.vocab_size
    for side in sides:
        side.run(random_prompts(1, 16, vocab_size, 0), 2)
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    same = 0
    for repeat in range(repeats):
        prompts = random_prompts(count, length, vocab_size, repeat + 1)
        answers: list[Run] = []
        for side in sides if repeat % 2 == 0 else reversed(sides):
            begun, run = load(), None
            clock, cpu = time.perf_counter(), time.process_time()
            run = side.run(prompts, new)
            cores = (time.process_time() - cpu) / (time.perf_counter() - clock)
            answers.append(run)
            seconds = {"prefill_s": run.prefill_s, "decode_s": run.decode_s, "seconds": run.seconds}
            runs[side.name].append(
                {**run.rates(), **seconds, "decoded": run.decoded, "cores_got": cores, "load": [begun, load()]}
            )
            rates = ", ".join(f"{kind} {rate:.1f}" for kind, rate in run.rates().items())
            tell(f"{name} {repeat + 1}/{repeats} {side.name}: {rates} tok/s, {cores:.2f} cores, load {load():.1f}")
        same += sum(mine == theirs for mine, theirs in zip(answers[0].tokens, answers[1].tokens, strict=True))
    ours, theirs = (runs[side.name] for side in sides)
    ratios = {kind: [a[kind] / b[kind] for a, b in zip(ours, theirs, strict=True)] for kind in RATES}
    return {
        "sequences": count,
        "prompt_tokens": length,
        "new_tokens": new,
        "runs": runs,
        "medians": {side: {kind: median(run[kind] for run in told) for kind in RATES} for side, told in runs.items()},
        "ratios": ratios,
        "ratio": {kind: median(values) for kind, values in ratios.items()},
        "equal_answers": f"{same} of {count * repeats}",
    }
