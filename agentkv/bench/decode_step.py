"""One decode step of a whole model with drawn weights over drawn KV: eager as the engine runs it, and out of a graph."""

# mypy: disable-error-code="no-untyped-call"
# (torch's profiler)

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentkv import methods
from agentkv.bench.device_times import Work, graph_of, host_time, synchronize, times
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.shapes import draw_model
from agentkv.engine.core import GRANULE, Batch, EngineConfig, RowWork
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.work import TableUpdate
from agentkv.types import Sampling

MODEL = "qwen3-4b"
PAGE = 16


def step_rows() -> Iterator[Row]:
    """Dense decode of 8 and of 1 row at 32K."""
    yield Row(f"dense decode step, {MODEL}, 8x32K", "x the bytes' time", 1.25, _measure(8, 32_768), at_most=True)
    yield Row(f"dense decode step, {MODEL}, 1x32K", "x the bytes' time", 1.5, _measure(1, 32_768), at_most=True)


def drawn_runner(loaded: LoadedModel, num_rows: int, length: int) -> ModelRunner:
    """The engine's device side with room for `length` tokens in each row, pages in random order, contents drawn."""
    pages = -(-length // PAGE)
    (group,) = loaded.groups(PAGE)
    config = EngineConfig(num_rows * pages * group.stripe_bytes, length + PAGE, page_size=PAGE, max_rows=num_rows)
    runner = ModelRunner(loaded, config, methods.get("dense"))
    generator = torch.Generator(loaded.device).manual_seed(0)
    runner.pages.arena.view(loaded.dtype).normal_(generator=generator)
    order = torch.randperm(num_rows * pages, generator=generator, device=loaded.device) * (group.stripe_bytes // GRANULE)
    units = [each.tolist() for each in torch.split(order, pages)]
    runner.pages.update_tables([TableUpdate(row, 0, mine, 0) for row, mine in enumerate(units)])
    return runner


class Step:
    """A decode step of `num_rows` rows, each of which holds `length` tokens with the new one."""

    def __init__(self, loaded: LoadedModel, num_rows: int, length: int) -> None:
        self.runner = drawn_runner(loaded, num_rows, length)
        works = [RowWork(row, [row + 1], length - 1, length - 1, True, Sampling(), 0, 1) for row in range(num_rows)]
        self.batch = Batch(works)
        self.bytes = loaded.weight_bytes + num_rows * length * self.runner.groups[0].token_bytes

    def eager(self) -> list[int | None]:
        """As the engine runs it: the step's integers go to the device, its tokens come back."""
        return self.runner.execute(self.batch)

    def device_work(self) -> tuple[Work, Callable[[], list[int]]]:
        """(the step's device side alone, what it drew): everything between the copy to the device and the copy back, the work
        list of the attention included. A step that was prepared for it is run once, so that what it caches is made inside."""
        runner, drawn = self.runner, list[Tensor]()

        @torch.inference_mode()
        def work() -> None:
            step = prepared.pop() if prepared else runner.prepare(self.batch)
            hidden = runner.forward(step)
            drawn[:] = [runner.loaded.model.logits(hidden[step.ends]).argmax(dim=-1)]
            used.append(step)  # its tensors are read by every replay

        used: list[Any] = []
        with torch.inference_mode():
            prepared = [runner.prepare(self.batch) for _ in range(2)]  # for the run before a capture, and for the capture
        return work, lambda: drawn[0].tolist()


def _measure(num_rows: int, length: int) -> Callable[[Rig], Measured]:
    def measure(rig: Rig) -> Measured:
        name, held = ("tiny", 48) if rig.tiny else (MODEL, length)
        found = _ours(rig, name, num_rows, held)
        rig.free()
        found.peer = rig.whole_peer(name, num_rows, held)
        found.gain = median(found.peer["decode_us"]) / median(found.us) if "decode_us" in found.peer else None
        return found

    return measure


def _ours(rig: Rig, name: str, num_rows: int, length: int) -> Measured:
    """Out of a graph, or eager and why there is none; by kernel where the time goes."""
    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
    step = Step(draw_model(name, rig.device, dtype), num_rows, length)
    bound_us = step.bytes / rig.copy / 1e6
    for _ in range(2):
        tokens = step.eager()
    eager = [host_time(step.eager, rig.device) for _ in range(max(3, rig.repeats // 2))]
    more: dict[str, Any] = {"bytes": step.bytes, "bytes_us": bound_us, "eager_us": eager, "eager_median_us": median(eager)}
    us, how, replay = eager, "eager", step.eager
    try:
        work, drawn = step.device_work()
        replay = graph_of(work, rig.device)
        replay()
        more["same_tokens_as_eager"] = drawn() == tokens
        us, how = times(replay, rig.device, rig.repeats), "graph"
    except RuntimeError as error:  # an operation that waits for the device, or copies from its host, cannot be captured
        more["why_no_graph"] = str(error)[:500]
    more |= {"how": how, "tokens_per_s": num_rows / median(us) * 1e6, "kernels": _kernels(replay, rig.device)}
    return Measured(us, median(us) / bound_us, rig.copy, "TB/s", more=more)


def _kernels(work: Work, device: torch.device) -> dict[str, Any]:
    """Where a step's time goes: by kernel its microseconds and launches, the longest first, and the sum of all; {} where there
    is nothing that counts them."""
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return {}
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            synchronize(device)
    except RuntimeError:
        return {}
    rows = [(each.key, each.self_device_time_total, each.count) for each in seen.key_averages()]
    rows.sort(key=lambda row: -row[1])
    longest = [{"kernel": name[:120], "us": us, "launches": count} for name, us, count in rows[:24]]
    return {"us": sum(us for _, us, _ in rows), "launches": sum(count for *_, count in rows), "longest": longest}
