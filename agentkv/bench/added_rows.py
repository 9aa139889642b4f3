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
DENSE = "dense"


class Rounds(NamedTuple):
    """taken: by method what each of its prompts took. beside: in the same order, what dense took right before and right after
    it. kernels: by method, see `kernel_times`."""

    taken: dict[str, list[Taken]]
    beside: dict[str, list[tuple[Taken, Taken]]]
    kernels: dict[str, dict[str, Any]]


def added_rows() -> Iterator[Row]:
    """One sequence of 32K, in chunks."""
    for case in CASES:
        yield Row(
            f"added to a prefill, {MODEL}, 1x32K, {case.name}", "of dense's time", case.most, _measure(case), at_most=True
        )


def _measure(case: Case) -> Callable[[Rig], Measured]:
    """The median over prompts of what the method's time on the device exceeds the mean of its two neighbours by, in theirs:
    a GPU's clock drifts by more than what is asked for."""

    def measure(rig: Rig) -> Measured:
        if "added" not in rig.kept:
            rig.kept["added"] = _rounds(rig)
        rounds: Rounds = rig.kept["added"]
        mine, pairs = rounds.taken[case.name], rounds.beside[case.name]
        shares = [each.device_us * 2 / sum(one.device_us for one in pair) - 1 for each, pair in zip(mine, pairs, strict=True)]
        more = _told(mine) | {
            "method": case.tiny if rig.tiny else case.method,
            "added": shares,
            "added_by_clock": [each.us * 2 / sum(one.us for one in pair) - 1 for each, pair in zip(mine, pairs, strict=True)],
            "chunk": CHUNK,
            "kernels": rounds.kernels[case.name],
            "dense": _told(rounds.taken[DENSE]) | {"kernels": rounds.kernels[DENSE]},
        }
        return Measured([each.device_us for each in mine], median(shares), rig.matmul, "TFLOP/s", more=more)

    return measure


def _rounds(rig: Rig) -> Rounds:
    """Every method reads a prompt between two that dense reads, after one of which the kernels are told alone. Once a run."""
    length, chunk, rounds = (160, 64, 2) if rig.tiny else (LENGTH, CHUNK, max(5, rig.repeats // 4))
    loaded = row_model(rig)
    texts = {DENSE: "dense"} | {case.name: case.tiny if rig.tiny else case.method for case in CASES}
    engines = {name: Reading(loaded, methods.parse(text), length, chunk) for name, text in texts.items()}
    first, *prompts = random_prompts(rounds + 1, length, loaded.config.vocab_size, seed=0)
    kernels = {name: kernel_times(partial(engine.read, first), rig.device) for name, engine in engines.items()}
    found = Rounds({name: [] for name in engines}, {case.name: [] for case in CASES}, kernels)
    found.taken[DENSE].append(engines[DENSE].read(first))
    for number, prompt in enumerate(prompts):
        for case in CASES:
            if case.most is not None or number == 0:
                found.taken[case.name].append(engines[case.name].read(prompt))
                found.taken[DENSE].append(engines[DENSE].read(prompt))
                before, after = found.taken[DENSE][-2:]
                found.beside[case.name].append((before, after))
    return found


def _told(taken: list[Taken]) -> dict[str, Any]:
    return {"us": [each.device_us for each in taken], "by_clock_us": [each.us for each in taken]}
