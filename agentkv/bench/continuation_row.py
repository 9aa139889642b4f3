"""A chain goes on: its new tokens are read behind what is held, against the whole history read anew; few, out of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from agentkv import methods
from agentkv.bench.decode_step import MODEL, kernel_times, row_model
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.reading import Reading, Taken
from agentkv.bench.shapes import random_prompts

CHUNK, HELD, NEW, TURNS = 2048, 65_536, 1024, 5
SHORT, SHORT_HELD, SHORT_TURNS = (64, 256), 32_768, 7


def continuation_rows() -> Iterator[Row]:
    """1,024 tokens behind 64K, and fewer behind 32K, dense."""
    yield Row(f"chain continuation, {MODEL}, 1K new at 64K", "of cold prefill", 1 / 28, _measure, at_most=True)
    for new in SHORT:
        yield Row(f"short extend, {MODEL}, {new} new at 32K", "of eager", None, _extend(new), at_most=True)


def _measure(rig: Rig) -> Measured:
    """us: of each turn's prompt through the engine, by the clock; the value is the median over turns of its share of a cold
    prefill of the same length. Turns are rolled back, so each stands at the same 64K; a first
    one does not count."""
    held, new, chunk, turns = (160, 16, 64, 2) if rig.tiny else (HELD, NEW, CHUNK, TURNS)
    loaded = row_model(rig)
    engine = Reading(loaded, methods.get("dense"), held + new, chunk, share=2)
    prompts = random_prompts(turns + 2, held + new, loaded.config.vocab_size, seed=0)
    engine.read(prompts[-1])  # compiled and planned
    first = engine.read(prompts[0][:held], chain="chain")
    again, cold = [], []
    for number in range(turns + 1):
        again.append(engine.read(prompts[0][: held + 1] + prompts[number + 1][held + 1 :], chain="chain"))
        engine.llm.rollback("chain", held + 1)  # the last token that is left has no KV
        if number < 2:
            cold.append(engine.read(prompts[number + 1]))
    if any(turn.prefilled != new for turn in again):
        raise RuntimeError(f"{[turn.prefilled for turn in again]} tokens were forwarded of {new} new ones")
    us = [turn.us for turn in again[1:]]
    cold_us = [each.us for each in cold]
    more = {
        "cold_us": cold_us,
        "held_alone_us": first.us,
        "device_us": [turn.device_us for turn in again[1:]],
        "cold_device_us": [each.device_us for each in cold],
        "prefilled": [turn.prefilled for turn in again],
        "times_faster": median(cold_us) / median(us),
    }
    return Measured(us, median(us) / median(cold_us), rig.matmul, "TFLOP/s", more=more)


def _extend(new: int) -> Callable[[Rig], Measured]:
    """us: of each turn's prompt through the engine out of a graph, by the clock; the value is the median over that of an engine
    without graphs. Turns are rolled back. `kernels`: of a replay alone."""

    def measure(rig: Rig) -> Measured:
        held, more, chunk, turns = (160, 16, 64, 2) if rig.tiny else (SHORT_HELD, new, CHUNK, SHORT_TURNS)
        loaded = row_model(rig)
        engine = Reading(loaded, methods.get("dense"), held + more, chunk, share=2)
        first, second = random_prompts(2, held + more, loaded.config.vocab_size, seed=0)
        engine.read(first[:held], chain="chain")

        def read(count: int) -> list[Taken]:
            found = []
            for _ in range(count):
                found.append(engine.read(first[: held + 1] + second[held + 1 :], chain="chain"))
                engine.llm.rollback("chain", held + 1)
            return found

        replayed = read(turns + 3)[3:]  # compiled, captured, replayed once
        graphs, engine.runner.graphs = engine.runner.graphs, None
        eager = read(turns + 1)[1:]
        us, eager_us = ([turn.us for turn in each] for each in (replayed, eager))
        told = {
            "eager_us": eager_us,
            "device_us": [turn.device_us for turn in replayed],
            "eager_device_us": [turn.device_us for turn in eager],
            "same_token": replayed[0].ids[-1] == eager[0].ids[-1],
            "replays": graphs.stats().replays if graphs else 0,
            "graph_bytes": graphs.stats().bytes if graphs else 0,
            "kernels": kernel_times(graphs.again, rig.device) if graphs else {},
        }
        return Measured(us, median(us) / median(eager_us), rig.matmul, "TFLOP/s", more=told)

    return measure
