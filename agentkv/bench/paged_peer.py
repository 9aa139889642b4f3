"""FlashInfer beside our decode attention, where it is installed."""

# mypy: disable-error-code="no-untyped-call"
# (torch's streams and events)

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from agentkv.bench.device_times import graph_of, times
from agentkv.bench.paged_shapes import PAGE, Shape


def flashinfer_decode(shape: Shape, num_layers: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Microseconds of one layer with and without tensor cores, each repeat; planned before, replayed from a graph of
    `num_layers` layers with pages of their own in random order. Where it cannot run: why_not."""
    if device.type != "cuda":
        return {"why_not": "no GPU"}
    if importlib.util.find_spec("flashinfer") is None:
        return {"why_not": "flashinfer is not installed"}
    counts = [-(-length // PAGE) for length in shape.lens]
    generator = torch.Generator(device).manual_seed(0)
    pages = (sum(counts), 2, shape.num_kv_heads, PAGE, shape.head_dim)
    layers = [torch.empty(pages, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in range(num_layers)]
    q = torch.randn(len(counts), shape.num_heads, shape.head_dim, device=device, generator=generator).bfloat16()
    order = torch.randperm(sum(counts), device=device, generator=generator).to(torch.int32)
    found: dict[str, Any] = {"name": "flashinfer"}
    for key, tensor_cores in (("cuda_cores_us", False), ("tensor_cores_us", True)):
        try:
            found[key] = _mode(shape, layers, q, order, tensor_cores, repeats)
        except (RuntimeError, ValueError, OSError) as error:  # a build that fails, a shape that it has no kernel for
            found[key.replace("_us", "_why_not")] = str(error).splitlines()[:1]
    return found


def _mode(shape: Shape, layers: list[Tensor], q: Tensor, order: Tensor, tensor_cores: bool, repeats: int) -> list[float]:
    import flashinfer

    device = q.device
    counts = torch.tensor([0, *(-(-length // PAGE) for length in shape.lens)], dtype=torch.int32)
    ends = torch.tensor([(length - 1) % PAGE + 1 for length in shape.lens], dtype=torch.int32, device=device)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
    wrapper.plan(
        counts.cumsum(0).to(torch.int32).to(device), order, ends, shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    work = graph_of(lambda: [wrapper.run(q, layer) for layer in layers], device)
    return [each / len(layers) for each in times(work, device, repeats)]
