"""FlashInfer beside our decode attention, where it is installed."""

# mypy: disable-error-code="no-untyped-call"
# (torch's streams and events)

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentkv.bench.device_times import Work, graph_of, times
from agentkv.bench.paged_shapes import PAGE, Drawn, Shape, draw
from agentkv.engine.attention_flashinfer import FlashInferDecode, Heads
from agentkv.errors import AgentkvError

Run = Callable[[Tensor, Tensor], Tensor]
"""Of q and a layer's pages."""
MODES = {
    "cuda_cores_us": "no tensor cores",
    "tensor_cores_us": "tensor cores, the kernel that it chooses (on Hopper one that does not split rows)",
    "tensor_cores_fa2_us": "tensor cores, fa2",
    "xqa_us": "xqa",
    "xqa_in_place_us": "xqa, over pages of an engine, as its `attention='flashinfer'` has it",
}
"""Key of the times -> which of its kernels."""
WRAPPER = ("cuda_cores_us", "tensor_cores_us")
"""The two modes of its decode wrapper, `use_tensor_cores` False and True; other kernels have to be asked for by name."""


def better(peer: dict[str, Any], modes: Iterable[str] = WRAPPER) -> float | None:
    """The median of the fastest of these modes that ran, microseconds."""
    return min((median(peer[key]) for key in modes if key in peer), default=None)


def flashinfer_decode(shape: Shape, num_layers: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Microseconds of one layer in each mode, each repeat; planned before, replayed from a graph of `num_layers` layers with
    pages of their own in random order. Where it cannot run: why_not."""
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
    for key in MODES:
        try:
            if key == "xqa_in_place_us":
                work = _in_place(draw(shape, num_layers, device))
            else:
                run = _xqa(shape, q, order) if key == "xqa_us" else _planned(shape, q, order, key)
                work = partial(_all, run, q, layers)
            found[key] = [each / num_layers for each in times(graph_of(work, device), device, repeats)]
        except (AgentkvError, RuntimeError, ValueError, OSError) as error:  # a build that fails, a shape without a kernel
            found[key.replace("_us", "_why_not")] = str(error).splitlines()[:1]
    return found


def _all(run: Run, q: Tensor, layers: list[Tensor]) -> list[Tensor]:
    return [run(q, layer) for layer in layers]


def _planned(shape: Shape, q: Tensor, order: Tensor, key: str) -> Run:
    import flashinfer

    device = q.device
    counts = torch.tensor([0, *(-(-length // PAGE) for length in shape.lens)], dtype=torch.int32)
    ends = torch.tensor([(length - 1) % PAGE + 1 for length in shape.lens], dtype=torch.int32, device=device)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    how = {"use_tensor_cores": key != "cuda_cores_us", "backend": "fa2" if "fa2" in key else "auto"}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", **how)
    wrapper.plan(
        counts.cumsum(0).to(torch.int32).to(device), order, ends, shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    run: Run = wrapper.run
    return run


def _xqa(shape: Shape, q: Tensor, order: Tensor) -> Run:
    """NVIDIA's kernel for few queries, with a table of pages like ours."""
    import flashinfer.decode

    counts = [-(-length // PAGE) for length in shape.lens]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=q.device)
    for row, entries in enumerate(torch.split(order, counts)):
        table[row, : len(entries)] = entries
    lens = torch.tensor(shape.lens, dtype=torch.int32, device=q.device).view(torch.uint32)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=q.device)
    how = {"bmm1_scale": shape.head_dim**-0.5, "bmm2_scale": 1.0, "kv_layout": "HND", "backend": "xqa"}

    def run(q: Tensor, layer: Tensor) -> Tensor:
        attend = flashinfer.decode.trtllm_batch_decode_with_kv_cache
        out: Tensor = attend(q, layer, workspace, table, lens, max(shape.lens), **how)
        return out

    return run


def _in_place(drawn: Drawn) -> Work:
    """The same kernel over units of an engine, in which a page's layers lie side by side."""
    shape, q = drawn.shape, drawn.q
    attend = FlashInferDecode(Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE, q.dtype, q.device))

    def run() -> list[Tensor]:
        layers = zip(drawn.layers, drawn.tables, strict=True)
        return [attend(q, pages, table, drawn.lens, shape.head_dim**-0.5) for pages, table in layers]

    return run
