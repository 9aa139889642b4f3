"""Steps as graphs: captured when they are first used, replayed with other numbers in the same places."""

# mypy: disable-error-code="no-untyped-call"
# (torch's streams and graphs)

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from agentkv.engine.limits import DEFAULT, Buckets
from agentkv.kernels.send import send, staged

log = logging.getLogger(__name__)

MOST_GRAPHS = 128
"""Kept at a time; the one that was not used for longest goes first."""

Outputs = tuple[Tensor, ...]
K = TypeVar("K", bound=Hashable)


class DeviceGraph(Protocol):
    """Operations on a device that can be run again as one, on the tensors that they were captured with."""

    def replay(self) -> None:
        """Queue them; what they write is there when the stream has come so far."""
        ...


class Device(Protocol):
    """What captures, and for which device."""

    device: torch.device

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """The operations of `work`. Whatever cannot be captured raises."""
        ...

    def held_bytes(self) -> int:
        """Memory of the device that is held now."""
        ...


class CudaDevice:
    """Graphs of a GPU. They share one pool of memory, since one step runs at a time, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """See `Device`. Nothing runs: the work has been run before, so that kernels are compiled and caches are there."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        return graph

    def held_bytes(self) -> int:
        """See `Device`."""
        return torch.cuda.memory_reserved(self.device)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed; why it did is known already."""
        try:
            graph.capture_end()
        except RuntimeError:
            log.debug("a capture that failed could not be ended in order", exc_info=True)


@dataclass(frozen=True, slots=True)
class _Captured:
    """inputs: where the step's numbers lie, int64. outputs: where its results lie after a replay."""

    inputs: Tensor
    graph: DeviceGraph
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class GraphStats:
    """captured: since the start; kept: now. replays, eager: steps that a graph ran, and steps that could have been one and were
    not. seconds, bytes: what captures took. failed: by key why it cannot be captured."""

    captured: int
    kept: int
    replays: int
    eager: int
    seconds: float
    bytes: int
    failed: dict[str, str]


class Graphs(Generic[K]):
    """Steps by key: what launches, sizes and addresses follow from. buckets: how keys are rounded. most: graphs that are
    kept."""

    def __init__(self, device: Device, buckets: Buckets = DEFAULT, most: int = MOST_GRAPHS) -> None:
        self.buckets = buckets
        self._device, self._most = device, most
        self._kept: dict[K, _Captured] = {}
        self._failed: dict[K, str] = {}
        self._met: dict[K, None] = {}
        self._captured = self._replays = self._eager = self._bytes = 0
        self._seconds = 0.0
        self._buffers: list[Tensor] = []

    def run(self, key: K, numbers: Sequence[int], work: Callable[[Tensor], Outputs], *, rare: bool = False) -> Outputs:
        """What `work` gives for these numbers, int64 on the device; valid until the next run.

        The first run of a key is the work itself; it is captured behind it, a rare one behind its second. A capture that fails
        is told of once, and its key is run as it is.
        """
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found  # the newest is last
            found.inputs.copy_(staged(numbers, self._device.device), non_blocking=True)
            found.graph.replay()
            self._replays += 1
            return found.outputs
        inputs = send(numbers, self._device.device)
        outputs = work(inputs)
        self._eager += 1
        if rare and key not in self._met:
            self._met[key] = None
            if len(self._met) > self._most:
                del self._met[next(iter(self._met))]
        elif key not in self._failed:
            self._met.pop(key, None)
            self._capture(key, inputs, work, outputs)
        return outputs

    def again(self) -> None:
        """Queue the newest graph once more, on the numbers that it has: to measure it. Every replay writes the same, but for
        state that steps rewrite, which goes on."""
        self._kept[next(reversed(self._kept))].graph.replay()

    def stats(self) -> GraphStats:
        """Counts since the start."""
        failed = {str(key): why for key, why in self._failed.items()}
        return GraphStats(self._captured, len(self._kept), self._replays, self._eager, self._seconds, self._bytes, failed)

    @property
    def keys(self) -> tuple[K, ...]:
        """Of the graphs that are kept, the newest last."""
        return tuple(self._kept)

    def _capture(self, key: K, inputs: Tensor, work: Callable[[Tensor], Outputs], outputs: Outputs) -> None:
        """outputs: what the work gave, for their shapes."""
        began, before = perf_counter(), self._device.held_bytes()
        into = self._room(outputs)

        def once() -> None:
            for place, made in zip(into, work(inputs), strict=True):
                place.copy_(made)

        try:
            graph = self._device.capture(once)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step itself has run
            self._failed[key] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            log.warning("steps of %s run without a graph: %s", key, self._failed[key])
            return
        while len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = _Captured(inputs, graph, into)
        self._captured += 1
        self._seconds += perf_counter() - began
        self._bytes += max(0, self._device.held_bytes() - before)

    def _room(self, outputs: Outputs) -> Outputs:
        """Places for results like these. All graphs share them: what each kept for itself would be much."""
        if not self._buffers or len(self._buffers[0]) < len(outputs[0]):
            self._buffers = [torch.empty_like(each) for each in outputs]
        return tuple(buffer[: len(each)] for buffer, each in zip(self._buffers, outputs, strict=True))
