"""What methods add to the reading of a prompt, seal and page state included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from agentkv import methods
from agentkv.bench.decode_step import MODEL, kernel_times, row_model
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.reading import Reading, Taken
from agentkv.bench.shapes import random_prompts

CHUNK, LENGTH = 2048, 32_768


class Case(NamedTuple):
    """A method as people write it, and for the tiny model; the most of dense's time that it may add, None: it is reported."""

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
    """The median over rounds of what the method's time on the device exceeds dense's of the same round by, in dense's time."""

    def measure(rig: Rig) -> Measured:
        if "added" not in rig.kept:
            rig.kept["added"] = _rounds(rig)
        taken, kernels = rig.kept["added"]
        dense, mine = taken["dense"], taken[case.name]
        pairs = list(zip(mine, dense, strict=True))
        shares = [one.device_us / other.device_us - 1 for one, other in pairs]
        more = _told(mine) | {
            "method": case.tiny if rig.tiny else case.method,
            "added": shares,
            "added_by_clock": [one.us / other.us - 1 for one, other in pairs],
            "chunk": CHUNK,
            "kernels": kernels[case.name],
            "dense": _told(dense) | {"kernels": kernels["dense"]},
        }
        return Measured([each.device_us for each in mine], median(shares), rig.matmul, "TFLOP/s", more=more)

    return measure


def _rounds(rig: Rig) -> tuple[dict[str, list[Taken]], dict[str, dict[str, Any]]]:
    """(by method what each round's prompt took, by method its kernels): dense and the methods take turns, after a round that
    does not count. Once a run, so that all are told by the same dense."""
    length, chunk, rounds = (160, 64, 2) if rig.tiny else (LENGTH, CHUNK, max(3, rig.repeats // 5))
    loaded = row_model(rig)
    texts = {"dense": "dense"} | {case.name: case.tiny if rig.tiny else case.method for case in CASES}
    engines = {name: Reading(loaded, methods.parse(text), length, chunk) for name, text in texts.items()}
    prompts = random_prompts(rounds + 1, length, loaded.config.vocab_size, seed=0)
    read = [{name: engine.read(prompt) for name, engine in engines.items()} for prompt in prompts][1:]
    kernels = {name: kernel_times(partial(engine.read, prompts[0]), rig.device) for name, engine in engines.items()}
    return {name: [each[name] for each in read] for name in engines}, kernels


def _told(taken: list[Taken]) -> dict[str, Any]:
    return {"us": [each.device_us for each in taken], "by_clock_us": [each.us for each in taken]}
