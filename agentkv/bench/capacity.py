"""Tokens a second at 128K by the largest batch that memory has room for: a method that seals against full attention."""

# mypy: disable-error-code="no-untyped-call"
# (torch's memory statistics)

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from agentkv import methods
from agentkv.bench.batches import largest_batch, standing_bytes
from agentkv.bench.decode_step import Step, StepTimes, time_step
from agentkv.bench.device_times import synchronize
from agentkv.bench.expert_loads import expert_loads, idle_bytes, spread
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.injected import PAGE, inject, peak_bytes
from agentkv.bench.shapes import draw_model, random_prompts
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sizing import MemoryPlan, plan_memory
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import EngineFault
from agentkv.types import Sampling


@dataclass(frozen=True, slots=True)
class Setting:
    """length: tokens of a prompt; answer: of what follows it; chunk: of a step of a real prompt."""

    model: str
    method: str
    length: int
    answer: int
    chunk: int
    max_rows: int


WHOLE = Setting("qwen3-30b-a3b-fp8", "snapkv:capacity=8192", 131_072, 512, 8192, 256)
TINY = Setting("tiny-experts-fp8", "snapkv:capacity=48,window=16", 300, 24, 64, 16)


def capacity_rows() -> Iterator[Row]:
    """The model with experts, in block FP8."""
    name = f"decode at 128K, {WHOLE.model}, snapkv 8,192 at its largest batch against dense"
    yield Row(name, "x dense tokens/s", 10.0, _measure)


def _measure(rig: Rig) -> Measured:
    """us: of a step of the method's largest batch. Both arenas are what start-up sizing plans beside the weights and a step of
    `chunk` tokens; all prompts but one are drawn, that one is read by the model, sealed, and its memory compared with the
    accounts. Expert weights that no row asks for are not counted among the bytes."""
    setting = TINY if rig.tiny else WHOLE
    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
    loaded = draw_model(setting.model, rig.device, dtype)
    method, dense = methods.parse(setting.method), methods.get("dense")
    plan = _plan(loaded, setting, method, rig.tiny)
    real = _really_read(loaded, setting, method, plan)
    rig.free()
    mine = _largest(rig, loaded, setting, method, plan)
    other = _largest(rig, loaded, setting, dense, plan)
    allowed = other["bytes_us"] / other["rows"] * mine["rows"] / mine["bytes_us"]
    more = mine | {"dense": other, "bytes_allow": allowed, "really_read": real, "plan": _bytes_of(plan)}
    return Measured(mine["us"], mine["tokens_per_s"] / other["tokens_per_s"], rig.copy, "TB/s", more=more)


def _config(setting: Setting, memory: int = 0) -> EngineConfig:
    window = setting.length + setting.answer + 1
    return EngineConfig(memory, window, page_size=PAGE, max_rows=setting.max_rows, step_tokens=setting.chunk)


def _plan(loaded: LoadedModel, setting: Setting, method: SparseMethod, tiny: bool) -> MemoryPlan:
    """As at start-up; tiny: an arena of a few windows."""
    plan = plan_memory(loaded, _config(setting), method)
    return replace(plan, arena=plan.window * 4) if tiny else plan


def _bytes_of(plan: MemoryPlan) -> dict[str, int]:
    return {"usable": plan.usable, "weights": plan.weights, "step": plan.step, "arena": plan.arena}


def _really_read(loaded: LoadedModel, setting: Setting, method: SparseMethod, plan: MemoryPlan) -> dict[str, Any]:
    """One prompt through the model, chunk by chunk, in an engine of the planned size: its time, what it holds when it is sealed
    against what the accounts set aside, and the device's peak against the plan."""
    config = _config(setting, plan.arena)
    if loaded.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loaded.device)
    llm = LLM(config, ModelRunner(loaded, config, method), reuse="chain")
    (prompt,) = random_prompts(1, setting.length, loaded.config.vocab_size, seed=0)
    sampling = Sampling(temperature=0.0, max_tokens=setting.answer)
    synchronize(loaded.device)
    began = time.perf_counter()
    sequence = llm.add(Request(prompt, sampling))
    while not sequence.num_generated or sequence.seal_at:
        llm.step()
        if sequence.fault is not None:
            raise EngineFault(f"the prompt could not be read: {sequence.fault}")
    synchronize(loaded.device)
    seconds = time.perf_counter() - began
    llm.check()
    held, accounted = llm.stats().bytes["active"], standing_bytes(loaded, config, method, setting.length, setting.length + 1)
    planned = plan.weights + plan.arena + plan.step
    peak = torch.cuda.max_memory_allocated(loaded.device) if loaded.device.type == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_s": setting.length / seconds,
        "held_bytes": held,
        "accounted_bytes": accounted,
        "held_over_accounted": held / accounted,
        "peak_bytes": peak,
        "planned_bytes": planned,
        "peak_over_planned": None if peak is None else peak / planned,
    }


def _largest(rig: Rig, loaded: LoadedModel, setting: Setting, method: SparseMethod, plan: MemoryPlan) -> dict[str, Any]:
    """A step of as many rows as the arena has room for."""
    rows = min(
        setting.max_rows,
        largest_batch(loaded, method, plan.arena, setting.length, setting.answer, setting.chunk),
    )
    began = time.perf_counter()
    new = setting.answer - rows - 1  # the first rows decode while the last prompts are read
    injected = inject(loaded, method, [setting.length] * rows, new_tokens=new, memory=plan.arena)
    seconds = time.perf_counter() - began
    loads = expert_loads(loaded, Step(injected).eager)
    found: StepTimes = time_step(injected, rig)
    found.bytes = found.bytes._replace(weights=found.bytes.weights - idle_bytes(loaded, loads))
    stats = injected.llm.stats()
    if stats.tally.preemptions or stats.rows != rows:
        raise EngineFault(f"{stats.tally.preemptions} preemptions, {stats.rows} of {rows} rows decode")
    told = found.told(rig) | {
        "rows": rows,
        "held_bytes": stats.bytes["active"],
        "peak_of_one": peak_bytes(loaded, _config(setting), (method,), 0, setting.length, setting.length + setting.answer),
        "preemptions": stats.tally.preemptions,
        "experts": spread(loads),
        "drawn_in_seconds": seconds,
        "median_us": median(found.us),
    }
    del injected
    rig.free()
    return told
