"""The threads of the CPU's work: how many the process may have, and when each is bound to a core of its own.

Threads that stay where they are keep their caches, but they cannot leave a core that somebody else is using. So the engine's
threads are bound only where cores were set aside for the process (its affinity, by taskset, a cpuset or a batch system, is
less than the machine), or where AGENTKV_PIN=1 says that they are its own; AGENTKV_PIN=0 never. No other thread is touched.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

from agentkv.kernels.pin_threads import pin_threads

SWITCH = "AGENTKV_PIN"
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def torch_threads() -> int:
    """Threads that torch uses for one operation of the calling thread."""
    return torch.get_num_threads()


def allowed_cores() -> tuple[int, ...]:
    """Cores that this thread may run on; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def core_quota() -> float | None:
    """Cores' worth of time that the control group allows, None without a limit."""
    with suppress(OSError, ValueError):
        share, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(share) / int(period)
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        share_us = int((folder / "cpu.cfs_quota_us").read_text())
        return share_us / int((folder / "cpu.cfs_period_us").read_text()) if share_us > 0 else None
    return None


def thread_environment() -> dict[str, str]:
    """Variables that are set and that OpenMP reads."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", *_BINDING)
    return {name: os.environ[name] for name in names if name in os.environ}


def pin_plan(threads: int) -> tuple[tuple[int, ...], str]:
    """The cores that so many threads of an engine would be bound to, none for not at all; and why."""
    cores, quota, told = allowed_cores(), core_quota(), os.environ.get(SWITCH)
    if told == "0":
        return (), f"off: {SWITCH}=0"
    if not hasattr(os, "sched_setaffinity"):
        return (), "off: this system does not bind threads"
    if bound := [name for name in _BINDING if name in os.environ]:
        return (), f"off: {bound[0]} is set"
    if threads > len(cores) or (quota is not None and quota < threads):
        return (), f"off: {threads} threads are more than the cores that the process may use"
    if told != "1" and len(cores) == os.cpu_count():
        return (), f"off: no cores are set aside for this process (taskset or a cpuset; or {SWITCH}=1 if it is alone)"
    return cores[:threads], f"on: {threads} threads, one to each of the cores {', '.join(map(str, cores[:threads]))}"


class EngineThreads:
    """What an engine's thread does first. threads: as many for its work, None for torch's number.

    A second engine of the process is not bound: it would wait for the first one's cores.
    """

    _cores = threading.Lock()
    """Held by the engine whose threads are bound."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._bound = False

    def begin(self) -> None:
        """Called on the engine's thread; what OpenMP starts for it belongs to it and ends with it."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        cores, _ = pin_plan(torch.get_num_threads())
        if cores and self._cores.acquire(blocking=False):
            self._bound = pin_threads(cores)
            if not self._bound:
                self._cores.release()

    def end(self) -> None:
        """Called when the thread is about to end."""
        if self._bound:
            self._cores.release()
