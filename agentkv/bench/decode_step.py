"""One decode step of a whole model with drawn weights over drawn KV: eager as the engine runs it, and out of a graph."""

# mypy: disable-error-code="no-untyped-call"
# (torch's profiler)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentkv import methods
from agentkv.bench.device_times import Work, graph_of, host_time, synchronize, times
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.injected import Injected, inject
from agentkv.bench.shapes import draw_model
from agentkv.bench.step_bytes import StepBytes, step_bytes
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod

MODEL = "qwen3-4b"


def step_rows() -> Iterator[Row]:
    """Dense decode of 8 and of 1 row at 32K."""
    yield Row(f"dense decode step, {MODEL}, 8x32K", "x the bytes' time", 1.25, _measure(8, 32_768), at_most=True)
    yield Row(f"dense decode step, {MODEL}, 1x32K", "x the bytes' time", 1.5, _measure(1, 32_768), at_most=True)


class Step:
    """A decode step of rows that are there already."""

    def __init__(self, injected: Injected) -> None:
        self.runner, self.batch = injected.runner, injected.batch

    def run(self) -> list[int | None]:
        """As the engine runs it: the step's integers go to the device, its tokens come back."""
        return self.runner.execute(self.batch)

    def eager(self) -> list[int | None]:
        """The same without a graph."""
        graphs, self.runner.graphs = self.runner.graphs, None
        try:
            return self.run()
        finally:
            self.runner.graphs = graphs

    def replay(self) -> Work | None:
        """The device's part of a replayed step, queued again by each call; None where the engine captures no such step."""
        graphs = self.runner.graphs
        if graphs is None:
            return None
        before = graphs.stats().replays
        for _ in range(2):
            self.run()
        return graphs.again if graphs.stats().replays > before else None

    def device_work(self, *, warm: bool = False) -> tuple[Work, Callable[[], list[int]]]:
        """(the step's device side alone, what it drew): everything between the copy to the device and the copy back. The second
        run is the one to capture: it has a prepared step of its own, so that work lists are made inside. warm: it has the
        first run's, so lists that a step makes on the host are there, and work lists do not count."""
        runner, drawn = self.runner, list[Tensor]()

        @torch.inference_mode()
        def work() -> None:
            step = prepared[min(len(used), len(prepared) - 1)]
            for batch in step.batches:
                batch.scratch.clear()
            hidden = runner.forward(step)
            drawn[:] = [runner.loaded.model.logits(hidden[step.ends]).argmax(dim=-1)]
            used.append(step)  # its tensors are read by every replay

        used: list[Any] = []
        with torch.inference_mode():
            prepared = [runner.prepare(self.batch) for _ in range(1 if warm else 2)]
        return work, lambda: drawn[0].tolist()


@dataclass
class StepTimes:
    """us: of each repeat, by `how`: "graph" (the engine's own), "graph of a warm step" or "eager". bytes: what the step must
    read. kernels: see `kernel_times`."""

    us: list[float]
    how: str
    bytes: StepBytes
    num_rows: int
    eager_us: list[float]
    same_tokens: bool | None
    why_no_graph: str | None
    kernels: dict[str, Any]

    def told(self, rig: Rig) -> dict[str, Any]:
        """For the JSON, beside the bytes' time at the copy rate of the run."""
        bound = self.bytes.total / rig.copy / 1e6
        return {
            "us": self.us,
            "median_us": median(self.us),
            "how": self.how,
            "bytes": self.bytes._asdict(),
            "bytes_us": bound,
            "x_bytes": median(self.us) / bound,
            "tokens_per_s": self.num_rows / median(self.us) * 1e6,
            "eager_us": self.eager_us,
            "eager_median_us": median(self.eager_us),
            "same_tokens_as_eager": self.same_tokens,
            "kernels": self.kernels,
        } | ({} if self.why_no_graph is None else {"why_no_graph": self.why_no_graph})


def time_step(injected: Injected, rig: Rig, *, profile: bool = True) -> StepTimes:
    """The step of these rows, out of a graph where it can be captured. profile: by kernel where the time goes, too."""
    step = Step(injected)
    for _ in range(2):
        tokens = step.eager()
    eager = [host_time(step.eager, rig.device) for _ in range(max(3, rig.repeats // 4))]
    us, how, replay, same, why = eager, "eager", step.eager, None, None
    captured = step.replay()
    if captured is not None:
        same, replay, how = step.run() == tokens, captured, "graph"
        us = times(replay, rig.device, rig.repeats)
    for warm in (False, True) if captured is None else ():
        try:
            work, drawn = step.device_work(warm=warm)
            replay = graph_of(work, rig.device)
            replay()
            same = drawn() == tokens
            us, how = times(replay, rig.device, rig.repeats), "graph of a warm step" if warm else "graph"
            break
        except RuntimeError as error:  # an operation that waits for the device, or copies from its host, cannot be captured
            replay, why = step.eager, (why or "") + str(error)[:300] + ". "
    kernels = kernel_times(replay, rig.device) if profile else {}
    return StepTimes(us, how, step_bytes(injected), len(step.batch.rows), eager, same, why, kernels)


def row_step(
    rig: Rig,
    method: SparseMethod | Sequence[SparseMethod],
    lengths: Sequence[int],
    forms: Sequence[int] = (),
    *,
    profile: bool = True,
) -> StepTimes:
    """The decode step of such rows of the row's model; what it took of the device is given back. See `time_step`."""
    injected = inject(row_model(rig), method, lengths, forms=forms)
    try:
        return time_step(injected, rig, profile=profile)
    finally:
        del injected
        rig.free()


def row_model(rig: Rig) -> LoadedModel:
    """The model of whole-model rows, drawn."""
    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
    return draw_model("tiny" if rig.tiny else MODEL, rig.device, dtype)


def _measure(num_rows: int, length: int) -> Callable[[Rig], Measured]:
    def measure(rig: Rig) -> Measured:
        name, held = ("tiny", 48) if rig.tiny else (MODEL, length)
        found = row_step(rig, methods.get("dense"), [held] * num_rows)
        told = found.told(rig)
        peer = rig.whole_peer(name, num_rows, held)
        gain = median(peer["decode_us"]) / median(found.us) if "decode_us" in peer else None
        return Measured(found.us, told["x_bytes"], rig.copy, "TB/s", peer, gain, told)

    return measure


def kernel_times(work: Work, device: torch.device) -> dict[str, Any]:
    """Where a step's time goes: by kernel its microseconds and launches, the longest first, and the sum of all; {} where there
    is nothing that counts them. A kernel that takes its place early is counted from then on, so the sum may exceed the step."""
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return {}
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            synchronize(device)
    except RuntimeError:
        return {}
    times_of = [(each.key, each.self_device_time_total, each.count) for each in seen.key_averages()]
    rows = [row for row in times_of if row[1] > 0]  # the host's calls are there, too
    rows.sort(key=lambda row: -row[1])
    longest = [{"kernel": name[:120], "us": us, "launches": count} for name, us, count in rows[:24]]
    return {"us": sum(us for _, us, _ in rows), "launches": sum(count for *_, count in rows), "longest": longest}
