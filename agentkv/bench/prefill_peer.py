"""FlashInfer beside our chunked prefill, where it is installed."""

# mypy: disable-error-code="no-untyped-call"
# (torch's events)

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentkv.bench.device_times import host_time, times
from agentkv.bench.paged_shapes import PAGE, Shape

BACKENDS = ("fa2", "fa3")
"""Its kernels for Ampere and for Hopper."""


def flashinfer_prefill(shape: Shape, new: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Microseconds of attention of the last `new` tokens of one row over pages in random order, by backend, every repeat,
    planned before; `build_s`, what building and planning it took the first time. Where it cannot run: why_not."""
    if device.type != "cuda":
        return {"why_not": "no GPU"}
    if importlib.util.find_spec("flashinfer") is None:
        return {"why_not": "flashinfer is not installed"}
    (length,) = shape.lens
    count = -(-length // PAGE)
    generator = torch.Generator(device).manual_seed(0)
    pages = torch.empty(count, 2, shape.num_kv_heads, PAGE, shape.head_dim, dtype=torch.bfloat16, device=device)
    pages.normal_(generator=generator)
    q = torch.randn(new, shape.num_heads, shape.head_dim, device=device, generator=generator).bfloat16()
    order = torch.randperm(count, device=device, generator=generator).to(torch.int32)
    found: dict[str, Any] = {"name": "flashinfer"}
    for backend in BACKENDS:
        try:
            found |= _backend(backend, shape, q, pages, order, repeats)
        except (RuntimeError, ValueError, OSError) as error:  # a build that fails, a shape that it has no kernel for
            found[f"{backend}_why_not"] = str(error).splitlines()[:1]
    return found


def _backend(backend: str, shape: Shape, q: Tensor, pages: Tensor, order: Tensor, repeats: int) -> dict[str, Any]:
    import flashinfer

    device, (length,) = q.device, shape.lens
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=device), "HND", backend=backend
    )

    def plan() -> Tensor:
        wrapper.plan(
            ints([0, len(q)]), ints([0, len(order)]), order,
            ints([(length - 1) % PAGE + 1]), shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE,
            causal=True, q_data_type=q.dtype, kv_data_type=pages.dtype,
        )  # fmt: skip
        out: Tensor = wrapper.run(q, pages)
        return out

    built = host_time(plan, device) / 1e6
    return {f"{backend}_us": times(lambda: wrapper.run(q, pages), device, repeats), f"{backend}_build_s": built}
