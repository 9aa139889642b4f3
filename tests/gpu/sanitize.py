"""Skewed batches of every method on a GPU, lengths that change from step to step and turn to turn: what `make sanitize` runs
under NVIDIA's compute-sanitizer.

`python tests/gpu/sanitize.py [METHOD[+METHOD...] ...]`, methods with a plus between them in one batch; no names: each method
alone, then two batches of six methods. The checker sees the edges of a tensor only where each is an allocation of the driver's
own: PYTORCH_NO_CUDA_MEMORY_CACHING=1. Graphs cannot be captured then, so they are off; without it steps are replayed with other
lengths, and it sees the edges of large blocks.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import torch
from six_shapes import PROMPTS, SHAPES, drawn, engine, method_of, play
from test_every_method import MIXED

from agentkv import methods

SHAPE, SWITCH = "qwen3-128-4", "PYTORCH_NO_CUDA_MEMORY_CACHING"


def main(names: list[str]) -> None:
    SHAPES["two layers"] = replace(SHAPES[SHAPE], num_layers=2)  # a checker makes every launch many times slower
    batches = [tuple(name.split("+")) for name in names] or [*((name,) for name in methods.NAMES), *MIXED]
    for batch in batches:
        began = time.monotonic()
        loaded = drawn("two layers", "cuda", torch.bfloat16)
        served = [method for name in batch if (method := method_of(name, loaded)) is not None]
        forms = tuple(range(len(batch))) if len(batch) > 1 else (0,) * len(PROMPTS)
        said = play(engine(loaded, served, graphs=SWITCH not in os.environ), forms, scale=0.5)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(said).all())
        print(f"{' '.join(batch)}: {len(said)} draws, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
