"""A chain goes on: its new tokens are read behind what is held, against the whole history read anew."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from agentkv import methods
from agentkv.bench.decode_step import MODEL, row_model
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.reading import Reading
from agentkv.bench.shapes import random_prompts

CHUNK, HELD, NEW, TURNS = 2048, 65_536, 1024, 5


def continuation_rows() -> Iterator[Row]:
    """1,024 tokens behind 64K, dense."""
    yield Row(f"chain continuation, {MODEL}, 1K new at 64K", "of cold prefill", 1 / 28, _measure, at_most=True)


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
