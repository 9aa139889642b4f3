"""What threads the CPU's work runs on: how many the process may have, and what its environment says of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

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
