"""What methods add to the reading of a prompt, seal and page state included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from agentkv import methods
from agentkv.bench.decode_step import MODEL, kernel_times, row_model
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.reading import Reading, Taken
from agentkv.bench.shapes import random_prompts

CHUNK, LENGTH = 2048, 32_768
CASES: tuple[tuple[str, str, str, float | None], ...] = (
    ("quest", "quest:budget=4096", "quest:budget=32", 0.01),
    ("snapkv", "snapkv", "snapkv:capacity=64,window=16", 0.01),
    ("h2o windowed", "h2o:window=32", "h2o:window=8,stride=64", 0.03),
    ("h2o faithful", "h2o", "h2o", None),
)
"""(name, method, for the tiny model, most of dense's time that it may add; None is reported)."""


def added_rows() -> Iterator[Row]:
    """One sequence of 32K, in chunks."""
    for name, text, tiny, target in CASES:
        row = f"added to a prefill, {MODEL}, 1x32K, {name}"
        yield Row(row, "of dense's time", target, _measure(text, tiny), at_most=True)


def _measure(text: str, tiny: str) -> Callable[[Rig], Measured]:
    """Dense and the method take turns, one pair that does not count before; the value is the median over pairs of what the
    method's time on the device exceeds dense's by, in dense's time."""

    def measure(rig: Rig) -> Measured:
        length, chunk, pairs = (160, 64, 2) if rig.tiny else (LENGTH, CHUNK, max(2, rig.repeats // 4))
        loaded = row_model(rig)
        engines = [Reading(loaded, methods.parse(each), length, chunk) for each in ("dense", tiny if rig.tiny else text)]
        prompts = random_prompts(pairs + 1, length, loaded.config.vocab_size, seed=0)
        taken = [[engine.read(prompt) for engine in engines] for prompt in prompts][1:]
        shares = [mine.device_us / dense.device_us - 1 for dense, mine in taken]
        by_clock = [mine.us / dense.us - 1 for dense, mine in taken]
        value = median(shares)
        kernels = [kernel_times(partial(engine.read, prompts[0]), rig.device) for engine in engines]
        dense, mine = (_told([pair[side] for pair in taken]) | {"kernels": kernels[side]} for side in (0, 1))
        more = mine | {"method": text, "added": shares, "added_by_clock": by_clock, "dense": dense, "chunk": chunk}
        return Measured([pair[1].device_us for pair in taken], value, rig.matmul, "TFLOP/s", more=more)

    return measure


def _told(taken: list[Taken]) -> dict[str, Any]:
    return {"us": [each.device_us for each in taken], "by_clock_us": [each.us for each in taken]}
