"""Decode steps of methods against the dense step of the same rows, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

from agentkv import methods
from agentkv.bench.decode_step import MODEL, StepTimes, row_step
from agentkv.bench.gpu_rows import Measured, Rig, Row


class Case(NamedTuple):
    """A method as people write it, and for the tiny model; rows x tokens; how many times the dense speed is wanted, and how
    much of the gain that the bytes allow (None: that is not asked)."""

    name: str
    method: str
    tiny: str
    num_rows: int
    length: int
    target: float
    share: float | None = None


CASES = (
    Case("quest, budget 4,096", "quest:budget=4096", "quest:budget=32,dense_layers=1", 4, 131_072, 3.0, 0.7),
    Case(
        "omnikv, budget 4,096", "omnikv:budget=4096,observers=(2,9,20)", "omnikv:budget=40,observers=(0,)", 4, 131_072, 3.0, 0.7
    ),
    Case("kivi, 4 bits", "kivi", "kivi:group=16,residual=32", 8, 32_768, 1.6),
    Case("fp8_kv", "fp8_kv", "fp8_kv", 8, 32_768, 1.4),
)
"""observers: the places that omnikv takes by itself in 36 layers."""


def against_rows() -> Iterator[Row]:
    """Speed over dense, and its share of what the bytes allow."""
    for case in CASES:
        name = f"decode step, {MODEL}, {case.num_rows}x{case.length // 1024}K, {case.name}"
        yield Row(f"{name}, against dense", "x dense", case.target, _speed(case))
        if case.share is not None:
            yield Row(f"{name}, of the gain that the bytes allow", "of the gain", case.share, _share(case))


def compared(rig: Rig, case: Case) -> tuple[StepTimes, StepTimes]:
    """(the method's step, the dense one): each is measured once a run."""
    num_rows, length = (2, 200) if rig.tiny else (case.num_rows, case.length)

    def step(text: str) -> StepTimes:
        key = f"step {text} {num_rows}x{length}"
        if key not in rig.kept:
            rig.kept[key] = row_step(rig, methods.parse(text), [length] * num_rows)
        found: StepTimes = rig.kept[key]
        return found

    return step(case.tiny if rig.tiny else case.method), step("dense")


def full_layers(text: str, num_layers: int, tokens: int) -> list[int]:
    """Layers that read everything of so many tokens."""
    method = methods.parse(text)
    return [layer for layer in range(num_layers) if method.most_read(layer, tokens, tokens) >= tokens]


def _speed(case: Case) -> Callable[[Rig], Measured]:
    def measure(rig: Rig) -> Measured:
        mine, dense = compared(rig, case)
        return Measured(mine.us, median(dense.us) / median(mine.us), rig.copy, "TB/s", more=_told(rig, case, mine, dense))

    return measure


def _share(case: Case) -> Callable[[Rig], Measured]:
    """Of the gain: the speed over dense, over the dense step's bytes over the method's."""

    def measure(rig: Rig) -> Measured:
        mine, dense = compared(rig, case)
        more = _told(rig, case, mine, dense)
        more.pop("kernels")  # they are in the row before
        more["dense"].pop("kernels")
        speed = median(dense.us) / median(mine.us)
        return Measured(mine.us, speed / more["bytes_allow"], rig.copy, "TB/s", more=more)

    return measure


def _told(rig: Rig, case: Case, mine: StepTimes, dense: StepTimes) -> dict[str, Any]:
    text = case.tiny if rig.tiny else case.method
    more = mine.told(rig) | {"method": text, "dense": dense.told(rig)}
    more["bytes_allow"] = dense.bytes.total / mine.bytes.total
    more["full_layers"] = full_layers(text, 2 if rig.tiny else 36, 200 if rig.tiny else case.length)
    return more
