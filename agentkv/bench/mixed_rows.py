"""Decode steps of 64 sequences as an engine makes them for its callers: what the host adds, and what several methods cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from agentkv import methods
from agentkv.bench.decode_step import MODEL, StepTimes, row_model, row_step
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.injected import drawn_engine, shuffle_units
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.worker import EngineWorker

ROWS, LENGTH, WARM, STEPS = 64, 8192, 6, 24
EIGHT = ("dense", "quest", "omnikv", "streamingllm", "snapkv", "adakv", "kivi", "fp8_kv")
TINY = (
    "dense", "quest:budget=32,dense_layers=1", "omnikv:budget=40,observers=(0,)", "streamingllm:recent=60",
    "snapkv:capacity=64,window=16", "adakv:capacity=64,window=16", "kivi:group=16,residual=32", "fp8_kv",
)  # fmt: skip


def mixed_rows() -> Iterator[Row]:
    """Both at 8K a sequence."""
    what = f"decode step, {MODEL}, {ROWS}x{LENGTH // 1024}K"
    yield Row(f"{what}, unhidden host time", "of the device's time", 0.05, _host, at_most=True)
    yield Row(f"{what}, eight methods against dense", "x dense", 1.3, _mixed, at_most=True)


def served_steps(rig: Rig, served: Sequence[SparseMethod], lengths: Sequence[int], forms: Sequence[int]) -> list[float]:
    """Microseconds of each decode step of all rows, by the clock of a caller who gets their tokens from the engine's thread."""
    llm, runner, requests = drawn_engine(row_model(rig), served, lengths, forms=forms, new_tokens=2 * (WARM + STEPS))
    worker = EngineWorker(llm)
    try:
        tickets = [worker.submit(request) for request in requests]
        for ticket in tickets:
            ticket.outputs.get()  # its prompt has been read
        worker.call(lambda: shuffle_units(llm, runner))
        last, marks = tickets[-1], list[float]()
        while not last.outputs.empty():
            last.outputs.get()
        while len(marks) < WARM + STEPS and last.outputs.get() is not None:
            marks.append(time.perf_counter())
        faults = [str(ticket.seq.fault) for ticket in tickets if ticket.seq.fault is not None]
    finally:
        worker.close()
    if faults or len(marks) < WARM + STEPS:
        raise RuntimeError(f"{len(marks)} steps of {WARM + STEPS}: {faults[:1]}")
    return [(after - before) * 1e6 for before, after in pairwise(marks[WARM - 1 :])]


def _rows(rig: Rig) -> list[int]:
    return [96] * 16 if rig.tiny else [LENGTH] * ROWS


def _dense(rig: Rig) -> tuple[list[float], StepTimes]:
    """(served, on the device alone), once a run."""
    if "64 dense" not in rig.kept:
        lengths, dense = _rows(rig), methods.get("dense")
        served = served_steps(rig, [dense], lengths, [0] * len(lengths))
        rig.free()
        rig.kept["64 dense"] = served, row_step(rig, dense, lengths)
    found: tuple[list[float], StepTimes] = rig.kept["64 dense"]
    return found


def _host(rig: Rig) -> Measured:
    """What the mean of served steps exceeds the device's own time by, in that."""
    served, device = _dense(rig)
    told = device.told(rig)
    more: dict[str, Any] = {"served_mean_us": fmean(served), "device": told, "bytes_us": told["bytes_us"]}
    return Measured(served, fmean(served) / median(device.us) - 1, rig.copy, "TB/s", more=more)


def _mixed(rig: Rig) -> Measured:
    """The mean of served steps in which each of eight methods has its share of the rows, over that of dense."""
    dense, device = _dense(rig)
    lengths, each = _rows(rig), [methods.parse(text) for text in (TINY if rig.tiny else EIGHT)]
    forms = [index % len(each) for index in range(len(lengths))]
    served = served_steps(rig, each, lengths, forms)
    rig.free()
    alone = row_step(rig, each, lengths, forms)
    more = {
        "methods": [method.fingerprint for method in each],
        "served_mean_us": fmean(served),
        "dense_served_us": dense,
        "on_the_device": median(alone.us) / median(device.us),
        "device": alone.told(rig),
        "dense_device_us": device.us,
    }
    return Measured(served, fmean(served) / fmean(dense), rig.copy, "TB/s", more=more)
