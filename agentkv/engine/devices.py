"""What this machine can run on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from agentkv.errors import BadRequest
from agentkv.kernels.native import find_compiler, native


def best_device() -> str:
    """The device that 'auto' means: the first GPU, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def device_names() -> list[str]:
    """Devices that this torch can use, the best first, with their names."""
    gpus = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    return [*gpus, "cpu"]


def cpu_kernels() -> str:
    """Whether the CPU's compiled kernels are used, and why not; builds them where that was not done yet."""
    return native().note


def cpu_compiler() -> str | None:
    """The C++ compiler that builds them, None where there is none."""
    return find_compiler()


def cpu_bfloat16() -> str:
    """How the CPU multiplies bfloat16: by instructions of its own, or by way of float32."""
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 has it
    native_ = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if able.get(name)]
    return f"native ({native_[0]})" if native_ else "by way of float32"


def usable_memory(device: torch.device) -> int:
    """Bytes that this process can have on a device, its own included. The same at every start: of a GPU, all but what others
    hold, in whole GiB; of a CPU, the machine's memory or the control group's limit, whatever is free now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        return total - -(-others >> 30) * 2**30
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in os.sysconf_names else 4 << 30
    return min(total, _group_limit())


def _group_limit() -> int:
    """Bytes that the control group allows, without bound where it says nothing."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return 1 << 62


def free_host_memory() -> int:
    """Bytes of the machine's own memory that can be allocated now."""
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    return pages * os.sysconf("SC_PAGE_SIZE") or 4 << 30


def usable_device(name: str) -> str:
    """The device of that name, 'auto' resolved; one that this torch cannot use is a BadRequest."""
    if name == "auto":
        return best_device()
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or [""])[0]
        hint = f"Usable here: auto, {', '.join(each.split()[0] for each in device_names())}"
        raise BadRequest(f"device={name!r} cannot be used: {why}", hint=hint, param="device") from None
    return name


def gpu_name(device: torch.device) -> str | None:
    """What torch calls the GPU; None for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def gpu_facts() -> list[dict[str, Any]]:
    """Of each GPU that this torch can use: name, compute capability, bytes in all and free, whether it has bfloat16."""
    facts = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = torch.cuda.get_device_properties(index)
        facts.append(
            {
                "device": f"cuda:{index}",
                "name": found.name,
                "capability": f"{found.major}.{found.minor}",
                "bytes": total,
                "free_bytes": free,
                "bfloat16": found.major >= 8,
            }
        )
    return facts
