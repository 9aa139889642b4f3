"""Under what conditions a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from agentkv.engine.devices import cpu_kernels
from agentkv.engine.loader import LoadedModel

LIBRARIES = ("agentkv", "torch", "transformers", "triton", "vllm", "flashinfer-python")


def load() -> float:
    """Processes that ran or waited to, on average over the last minute; 0 where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def machine(device: torch.device) -> dict[str, Any]:
    """Device, date, versions, commit, command, threads and what else keeps the machine busy."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "agentkv"), *sys.argv[1:]]),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{_cpu_name()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_", "KMP_"))},
        "cpu_kernels": "not used" if on_gpu else cpu_kernels().partition(":")[0],
        "load": load(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def conditions(loaded: LoadedModel, model: str) -> dict[str, Any]:
    """The machine's, and the model's."""
    return {
        **machine(loaded.device),
        "model": model,
        "parameters": sum(each.numel() for each in loaded.model.parameters()),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "method": "dense",
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the source tree, with + where files differ; None outside of one."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
