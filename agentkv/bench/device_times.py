"""How long work takes on a device, alone or replayed from a graph."""

# mypy: disable-error-code="no-untyped-call"
# (torch's streams and events)

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Work = Callable[[], Any]
WARM_UPS = 3


def graph_of(work: Work, device: torch.device) -> Work:
    """The work as one replay of a CUDA graph; on a CPU the work itself. It has run once when this returns."""
    if device.type != "cuda":
        work()
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiled and warm
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def times(work: Work, device: torch.device, repeats: int) -> list[float]:
    """Microseconds of each run on the device, after a few that do not count.

    Runs are queued one behind the other, so that launching the next is hidden behind the one before, as in a busy engine.
    """
    if device.type != "cuda":
        return [host_time(work, device) for _ in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + WARM_UPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    taken = [began.elapsed_time(ended) * 1e3 for began, ended in pairwise(marks)]
    return taken[WARM_UPS:]


def host_time(work: Work, device: torch.device) -> float:
    """Microseconds of one run by the clock, until the device has done it."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - began) * 1e6


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
