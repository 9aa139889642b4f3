"""`agentkv doctor`: what this machine has, what will be used, what will not work and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

from agentkv.errors import AgentkvError

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "flashinfer-python", "sqlalchemy", "fastapi")


def examine(model: str = "micro") -> dict[str, Any]:
    """A report: python, libraries, devices, memory plan of `model`, store, and `problems` in words."""
    problems: list[str] = []
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": _versions(),
        "devices": _devices(problems),
        "threads": os.cpu_count(),
        "compiler": shutil.which("g++") or shutil.which("c++"),
        "cpu": _cpu(problems),
        "model": _model_plan(model, problems),
        "store": _store(problems),
    }
    report["problems"] = problems
    return report


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _devices(problems: list[str]) -> list[str]:
    from agentkv.runtime_engine import devices

    found = devices()
    if shutil.which("nvidia-smi") and not any(name.startswith("cuda") for name in found):
        problems.append("nvidia-smi is here, but this torch sees no GPU: install a CUDA build of torch")
    return found


def _cpu(problems: list[str]) -> dict[str, str]:
    from agentkv.runtime_engine import cpu_notes

    notes = cpu_notes()
    if notes["kernels"].startswith("off"):
        problems.append(f"compiled CPU kernels are {notes['kernels']}; the CPU does their work in torch, slower")
    return notes


def _model_plan(model: str, problems: list[str]) -> dict[str, Any]:
    from agentkv.runtime_engine import memory_plan

    try:
        return memory_plan(model)
    except AgentkvError as error:
        problems.append(f"model {model}: {error}")
        return {"name": model}


def _store(problems: list[str]) -> dict[str, Any]:
    from agentkv.runtime import default_db, open_store

    try:
        with open_store(default_db()) as store:
            return {"path": str(default_db()), "sessions": len(store.list())}
    except AgentkvError as error:
        problems.append(str(error))
        return {"path": str(default_db())}
