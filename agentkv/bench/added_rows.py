"""What methods add to the reading of a prompt, seal and page state included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

from agentkv import methods
from agentkv.bench.decode_step import MODEL, kernel_times, row_model
from agentkv.bench.device_times import synchronize
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.reading import Reading
from agentkv.bench.shapes import random_prompts

CHUNK, LENGTH = 2048, 32_768


class Case(NamedTuple):
    """A method as people write it, and for the tiny model; the most of dense's time that it may add, None: it is reported, and
    read once."""

    name: str
    method: str
    tiny: str
    most: float | None


CASES = (
    Case("quest", "quest:budget=4096", "quest:budget=32", 0.01),
    Case("snapkv", "snapkv", "snapkv:capacity=64,window=16", 0.01),
    Case("h2o windowed", "h2o:window=32", "h2o:window=8,stride=64", 0.03),
    Case("h2o faithful", "h2o", "h2o", None),
)


def added_rows() -> Iterator[Row]:
    """One sequence of 32K, in chunks."""
    for case in CASES:
        yield Row(
            f"added to a prefill, {MODEL}, 1x32K, {case.name}", "of dense's time", case.most, _measure(case), at_most=True
        )


def _measure(case: Case) -> Callable[[Rig], Measured]:
    """A GPU's clock drifts by more than what is asked for, within seconds. So the method and dense read the same prompt side by
    side, a chunk each in turn, and what a prompt takes is the sum, over its chunks, of each one's median over all prompts."""

    def measure(rig: Rig) -> Measured:
        length, chunk = (160, 64) if rig.tiny else (LENGTH, CHUNK)
        loaded, method = row_model(rig), case.tiny if rig.tiny else case.method
        pair = [Reading(loaded, methods.parse(text), length, chunk) for text in ("dense", method)]
        count = 1 if case.most is None else max(2, rig.repeats // 2)
        first, *prompts = random_prompts(1 + count, length, loaded.config.vocab_size, seed=0)
        kernels = [kernel_times(partial(reading.read, first), rig.device) for reading in pair]
        side_by_side(pair, first)
        taken = [side_by_side(pair, prompt, first=number % 2) for number, prompt in enumerate(prompts)]
        dense, mine = ([steps[which] for steps in taken] for which in (0, 1))
        dense_us, mine_us = ([sum(steps) for steps in each] for each in (dense, mine))
        typical, dense_typical = (sum(median(step) for step in zip(*each, strict=True)) for each in (mine, dense))
        more = {
            "method": method,
            "chunk": chunk,
            "typical_us": typical,
            "steps_us": mine,
            "added_by_prompt": [ours / theirs - 1 for ours, theirs in zip(mine_us, dense_us, strict=True)],
            "kernels": kernels[1],
            "dense": {"us": dense_us, "typical_us": dense_typical, "steps_us": dense, "kernels": kernels[0]},
        }
        return Measured(mine_us, typical / dense_typical - 1, rig.matmul, "TFLOP/s", more=more)

    return measure


def side_by_side(pair: list[Reading], prompt: list[int], *, first: int = 0) -> list[list[float]]:
    """Of each engine the microseconds of each of its steps; the engines take turns, `first` before the other."""
    sequences = [reading.add(prompt) for reading in pair]
    taken: list[list[Callable[[], float]]] = [[] for _ in pair]
    while any(reading.llm.has_work for reading in pair):
        for which in (first, 1 - first):
            if pair[which].llm.has_work:
                taken[which].append(pair[which].step())
    for reading, sequence in zip(pair, sequences, strict=True):
        reading.end(sequence)
    synchronize(pair[0].device)
    return [[us() for us in steps] for steps in taken]
