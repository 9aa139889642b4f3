"""Tokens a second at 128K by the largest batch that memory has room for: a method that seals against full attention."""

# mypy: disable-error-code="no-untyped-call"
# (torch's memory statistics)

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from agentkv import methods
from agentkv.bench.batches import largest_batch, standing_bytes
from agentkv.bench.decode_step import Step, time_step
from agentkv.bench.device_times import synchronize
from agentkv.bench.expert_loads import expert_loads, idle_bytes, spread
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.injected import PAGE, Injected, read_prompts, shuffle_units
from agentkv.bench.shapes import draw_model, random_prompts
from agentkv.engine.core import EngineConfig, Request, Sequence
from agentkv.engine.drawn_runner import DrawnRunner
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sizing import MemoryPlan, plan_memory
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import EngineFault
from agentkv.types import Sampling


@dataclass(frozen=True, slots=True)
class Setting:
    """length: tokens of a prompt; answer: of what may follow it; chunk: of a step's prompts. drawn: tokens of the prompts that
    are drawn where a seal keeps fewer anyway: what stays of them is the same."""

    model: str
    method: str
    length: int
    drawn: int
    answer: int
    chunk: int
    max_rows: int


WHOLE = Setting("qwen3-30b-a3b-fp8", "snapkv:capacity=8192", 131_072, 8448, 512, 8448, 128)
TINY = Setting("tiny-experts-fp8", "snapkv:capacity=48,window=16", 300, 100, 64, 64, 16)

ALLOWED = 0.02
"""By so much of it memory may differ from its accounts."""


def capacity_rows() -> Iterator[Row]:
    """The model with experts, in block FP8."""
    name = f"decode at 128K, {WHOLE.model}, snapkv 8,192 at its largest batch against dense"
    yield Row(name, "x dense tokens/s", 10.0, _measure)


def _measure(rig: Rig) -> Measured:
    """us: of a step of the method's largest batch. The arena is what start-up sizing plans beside the weights and a step of
    `chunk` tokens. Prompts are drawn, but for the method's last one: while all others decode, the model reads it chunk by chunk
    and it is sealed; what it then holds is compared with the accounts, and the device's peak with the plan. Expert weights that
    no row asks for are not counted among the bytes of a step."""
    setting = TINY if rig.tiny else WHOLE
    loaded = draw_model(setting.model, rig.device, torch.bfloat16 if rig.device.type == "cuda" else torch.float32)
    method, dense = methods.parse(setting.method), methods.get("dense")
    plan = plan_memory(loaded, _config(setting), method)
    if rig.tiny:
        plan = replace(plan, arena=plan.window * 4)
    mine = _largest(rig, loaded, setting, method, plan)
    other = _largest(rig, loaded, setting, dense, plan)
    allowed = other["bytes_us"] / other["rows"] * mine["rows"] / mine["bytes_us"]
    planned = {name: getattr(plan, name) for name in ("usable", "weights", "step", "graphs", "arena")}
    more = mine | {"dense": other, "bytes_allow": allowed, "plan": planned}
    short = unaccounted(mine["really_read"])
    return Measured(mine["us"], mine["tokens_per_s"] / other["tokens_per_s"], rig.copy, "TB/s", more=more, short=short)


def unaccounted(read: dict[str, Any]) -> str | None:
    """What the accounts or the plan do not say within `ALLOWED`, None where they do: what the prompt that was read holds, and
    that steps and graphs took no more of the device than was planned for them."""
    held, beside = read["held_over_accounted"], read["beside_over_planned"]
    if abs(held - 1) > ALLOWED:
        return f"a sealed prompt holds {held:.3f} of what was set aside for it"
    if beside is not None and beside - 1 > ALLOWED:
        return f"beside weights and KV the device held {beside:.3f} of the plan"
    return None


def _config(setting: Setting, memory: int = 0, max_rows: int | None = None) -> EngineConfig:
    window, rows = setting.length + setting.answer + 1, max_rows or setting.max_rows
    return EngineConfig(memory, window, page_size=PAGE, max_rows=rows, step_tokens=setting.chunk)


def _largest(rig: Rig, loaded: LoadedModel, setting: Setting, method: SparseMethod, plan: MemoryPlan) -> dict[str, Any]:
    """A step of as many rows as the arena has room for; EngineFault where one of them does not decode."""
    most = largest_batch(loaded, method, plan.arena, setting.length, setting.answer, setting.chunk)
    rows = min(setting.max_rows, most)
    began = time.perf_counter()
    injected, read = _begun(loaded, setting, method, plan, rows)
    more = {"room_for": most, "rows": rows, "begun_in_seconds": time.perf_counter() - began} | read
    loads = expert_loads(loaded, Step(injected).eager)
    found = time_step(injected, rig)
    found.bytes = found.bytes._replace(weights=found.bytes.weights - idle_bytes(loaded, loads))
    stats = injected.llm.stats()
    if stats.tally.preemptions or stats.rows != rows:
        raise EngineFault(f"{stats.tally.preemptions} preemptions; {stats.rows} of {rows} rows decode")
    more |= {"preemptions": stats.tally.preemptions, "held_bytes": stats.bytes["active"], "experts": spread(loads)}
    del injected
    rig.free()
    return found.told(rig) | more


def _begun(
    loaded: LoadedModel, setting: Setting, method: SparseMethod, plan: MemoryPlan, rows: int
) -> tuple[Injected, dict[str, Any]]:
    """(rows that decode, pages in random order; what is told of the prompt that was really read, if the method seals)."""
    config = _config(setting, plan.arena, rows)
    runner = DrawnRunner(loaded, config, method)
    runner.ahead = False  # a step that was launched ahead cannot be executed again
    llm, told = LLM(config, runner, reuse="chain"), dict[str, Any]()
    runner.drawn = "all"  # what is decoded on the way, too
    sampling = Sampling(temperature=0.0, max_tokens=setting.answer)
    *drawn, last = random_prompts(rows, setting.length, runner.vocab_size, seed=0)
    seals = runner.forms[0].bound is not None
    sequences = list[Sequence]()
    for prompt in drawn:
        sequences.append(llm.add(Request(prompt[: setting.drawn] if seals else prompt, sampling)))
        read_prompts(llm, sequences)
    reading, runner.drawn = _Reading(loaded), "nothing" if seals else "all"
    sequences.append(llm.add(Request(last, sampling)))
    read_prompts(llm, sequences)
    injected = Injected(llm, runner, sequences)
    if seals:
        accounted = standing_bytes(loaded, config, method, setting.length, setting.length + 1)
        told["really_read"] = reading.told(injected, accounted, plan)
    runner.drawn = "nothing"
    shuffle_units(llm, runner)
    llm.step()
    llm.check()
    return injected, told


class _Reading:
    """A prompt that the model itself reads, from now on."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        synchronize(loaded.device)
        if loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loaded.device)
        self._began = time.perf_counter()

    def told(self, injected: Injected, accounted: int, plan: MemoryPlan) -> dict[str, Any]:
        """For the JSON: its time, others decoding beside it; bytes that it holds, sealed, over what the accounts set aside; the
        device's peak over the plan."""
        device = self._loaded.device
        synchronize(device)
        seconds, sequence = time.perf_counter() - self._began, injected.sequences[-1]
        assert sequence.state is not None
        groups = injected.runner.groups
        held = sum(len(each.units) * groups[each.pool.group].stripe_bytes for each in sequence.state.holdings)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        planned = plan.weights + plan.arena + plan.step + plan.graphs
        return {
            "seconds": seconds,
            "tokens_per_s": sequence.num_prompt_tokens / seconds,
            "held_bytes": held,
            "accounted_bytes": accounted,
            "held_over_accounted": held / accounted,
            "peak_bytes": peak,
            "planned_bytes": planned,
            "peak_over_planned": None if peak is None else peak / planned,
            "beside_over_planned": None if peak is None else (peak - plan.weights - plan.arena) / (plan.step + plan.graphs),
        }
