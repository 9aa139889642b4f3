"""`agentkv doctor`: what this machine has, what will be used, what a model would take, what will not work and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from agentkv.runtime_backends import backends
from agentkv.runtime_findings import Findings

NEEDED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "llguidance",
    "sqlalchemy",
    "fastapi",
    "uvicorn",
    "httpx",
)
OPTIONAL = {
    "triton": "GPU decode kernels; without it torch does their work, slower",
    "psycopg": "sessions in PostgreSQL: pip install 'agentkv[postgres]'",
    "matplotlib": "plots of agentkv bench: pip install 'agentkv[bench]'",
    "flashinfer-python": "another decode attention, and a peer of agentkv bench gpu: pip install 'agentkv[cuda]'",
}
"""Package -> what it is for, or what its absence costs."""


def examine(model: str = "micro", **options: Any) -> dict[str, Any]:
    """A report on the machine and on `Runtime(model, **options)`, which is not opened and of which no weight is read.

    options: device, dtype, memory, window, page_size, warm_memory, methods, attention. `problems` will not work, `advice` could
    be better; each is a list of part, text and hint. Sizes are bytes.
    """
    from agentkv.runtime_plan import plan_model

    found = Findings()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": _libraries(found),
        "cpu": _cpu(found),
        "gpus": _gpus(found),
        "store": _store(found),
        "model": plan_model(model, found, **options),
    }
    return report | {"advice": found.advice, "problems": found.problems}


def _libraries(found: Findings) -> dict[str, dict[str, str | None]]:
    rows: dict[str, dict[str, str | None]] = {}
    for name in (*NEEDED, *OPTIONAL):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        rows[name] = {"version": version, "for": OPTIONAL.get(name)}
        if version is None and name in NEEDED:
            found.problem("libraries", f"{name} is missing", "Install agentkv again: pip install --force-reinstall agentkv")
    return rows


def _cpu(found: Findings) -> dict[str, Any]:
    from agentkv.engine.devices import cpu_bfloat16, cpu_compiler, cpu_kernels, free_host_memory
    from agentkv.engine.threads import allowed_cores, core_quota, pin_plan, thread_environment, torch_threads

    facts: dict[str, Any] = {
        "cores": os.cpu_count(),
        "allowed_cores": len(allowed_cores()),
        "quota": core_quota(),
        "threads": torch_threads(),
        "pinning": pin_plan(torch_threads())[1],
        "environment": thread_environment(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "free_bytes": free_host_memory(),
        "compiler": cpu_compiler(),
        "kernels": cpu_kernels(),
        "bfloat16": cpu_bfloat16(),
    }
    if facts["kernels"].startswith("off"):
        hint = "Put a C++ compiler (g++ or clang++) on the PATH" if facts["compiler"] is None else ""
        found.advise("cpu", f"compiled kernels are {facts['kernels']}; torch does their work, slower", hint)
    _advise_threads(facts, found)
    return facts


def _advise_threads(facts: dict[str, Any], found: Findings) -> None:
    """More threads than cores, or threads that spin while others need the cores, make every step many times slower."""
    most = min(facts["allowed_cores"], int(max(1, facts["quota"] or facts["allowed_cores"])))
    if facts["threads"] > most:
        text = f"torch would use {facts['threads']} threads, the process has {most} cores"
        found.advise("threads", text, f"Set OMP_NUM_THREADS={most}")
    policy = facts["environment"].get("OMP_WAIT_POLICY", "")
    if policy.lower() == "active":
        text = "OMP_WAIT_POLICY=active: threads spin while they wait, which slows every step where cores are shared"
        found.advise("threads", text, "Set OMP_WAIT_POLICY=passive")


def _gpus(found: Findings) -> list[dict[str, Any]]:
    from agentkv.engine.devices import gpu_facts

    facts = [{**gpu, "attention": backends(gpu["name"])} for gpu in gpu_facts()]
    if not facts and shutil.which("nvidia-smi"):
        found.problem("gpu", "nvidia-smi is here, but this torch sees no GPU", "Install a CUDA build of torch")
    for gpu in facts:
        if not gpu["bfloat16"]:
            found.advise("gpu", f"{gpu['device']} ({gpu['name']}) has no bfloat16, which 'auto' takes", "Use dtype='float16'")
    if facts and importlib.util.find_spec("triton") is None:
        found.advise("gpu", "triton is missing; torch does the work of the GPU kernels, slower", "pip install triton")
    return facts


def _store(found: Findings) -> dict[str, Any]:
    from agentkv.runtime import default_db, open_store

    facts: dict[str, Any] = {}
    with found.looking_at("store"):
        path = default_db()
        facts["path"] = str(path)
        with open_store(path) as store:
            facts["sessions"] = len(store.list())
        facts["bytes"] = Path(path).stat().st_size
    return facts
