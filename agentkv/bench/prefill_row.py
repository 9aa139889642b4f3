"""A prompt's chunk over paged history, by every route, beside FlashInfer, and cuDNN on contiguous keys and values."""

# mypy: disable-error-code="no-untyped-call"
# (torch's operations)

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from agentkv.bench.device_times import host_time, times
from agentkv.bench.gpu_rows import Measured, Rig, Row, small
from agentkv.bench.paged_shapes import Shape, draw
from agentkv.bench.prefill_peer import BACKENDS, flashinfer_prefill

NEW = 2048
SHAPE = Shape("2,048 new over 32K, 32/8", (32_768 + NEW,), 32, 8, 0.0)


class Way(NamedTuple):
    """A route of `paged_prefill` and, of the kernel over pages, its tiles."""

    route: Any
    tiles: tuple[int, int, int, int, int | None] | None = None

    @property
    def name(self) -> str:
        """For the JSON."""
        return str(self.route) if self.tiles is None else f"{self.route} {'x'.join(map(str, self.tiles))}"


WAYS = (
    Way("cudnn"),
    Way("flash"),
    Way("cudnn", (64, 64, 4, 3, None)),
    Way("pages", (128, 64, 8, 2, 128)),
    Way("pages", (128, 128, 8, 3, None)),
    Way("pages", (64, 64, 4, 3, None)),
)


def prefill_rows() -> Iterator[Row]:
    """Chunked prefill attention."""
    yield Row(f"chunked prefill attention, {SHAPE.name}", "TFLOP/s", 500.0, _measure)


def attention_flops(num_tokens: int, history: int, num_heads: int, head_dim: int) -> float:
    """Products of queries with keys and of weights with values, what a mask hides not counted."""
    return 4.0 * num_heads * head_dim * (num_tokens * history + num_tokens * (num_tokens + 1) / 2)


def _measure(rig: Rig) -> Measured:
    """The way that is taken by itself is the row's; every way is in `ways`: median microseconds, TFLOP/s, milliseconds of the
    first call (compiling, planning), or the error."""
    from agentkv.kernels.paged_prefill import Tiles, paged_prefill

    shape, new = (small(SHAPE), 5) if rig.tiny else (SHAPE, NEW)
    (length,) = shape.lens
    drawn = draw(shape, 1, rig.device)
    pages, entries = drawn.layers[0], drawn.tables[0][0]
    generator = torch.Generator(rig.device).manual_seed(1)
    q = torch.randn(new, shape.num_heads, shape.head_dim, device=rig.device, generator=generator).to(pages.dtype)
    flops = attention_flops(new, length - new, shape.num_heads, shape.head_dim)

    def run(way: Way) -> Callable[[], Any]:
        tiles = Tiles(*way.tiles) if way.tiles else None
        return lambda: paged_prefill(q, pages, entries, length, shape.head_dim**-0.5, route=way.route, tiles=tiles)

    ways: dict[str, Any] = {}
    on_gpu = rig.device.type == "cuda"
    for way in (Way(None), *WAYS) if on_gpu else (Way("pages", (16, 32, 4, 2, None)),):
        try:
            first = host_time(run(way), rig.device) / 1e3
            us = times(run(way), rig.device, rig.repeats)
        except RuntimeError as error:  # a route that this torch, or this GPU, has not
            ways[way.name] = {"error": str(error)[:300]}
            continue
        ways[way.name] = {"us": us, "median_us": median(us), "tflop_per_s": flops / median(us) / 1e6, "first_ms": first}
    taken = ways.get("None") or next(iter(ways.values()))
    if "us" not in taken:
        raise RuntimeError(f"no way ran: {ways}")
    more = {"ways": ways, "contiguous": _contiguous(rig) if on_gpu else {"why_not": "no GPU"}}
    peer = flashinfer_prefill(shape, new, rig.device, rig.repeats) if rig.peers else {"why_not": "not asked for"}
    better = min((median(peer[f"{name}_us"]) for name in BACKENDS if f"{name}_us" in peer), default=None)
    gain = better / median(taken["us"]) if better else None
    return Measured(taken["us"], taken["tflop_per_s"], rig.matmul, "TFLOP/s", peer, gain, more)


def _contiguous(rig: Rig) -> dict[str, Any]:
    """cuDNN's causal attention of 32K tokens, nothing paged."""
    length, heads, kv_heads, dim = 32_768, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    q = torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device=rig.device)
    k, v = torch.randn(2, 1, kv_heads, length, dim, dtype=torch.bfloat16, device=rig.device).unbind(0)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    try:
        us = times(
            lambda: attend(q, k, v, None, False, 0.0, True, False, scale=dim**-0.5), rig.device, max(3, rig.repeats // 4)
        )
    except RuntimeError as error:
        return {"why_not": str(error)[:300]}
    rate = attention_flops(length, 0, heads, dim) / median(us) / 1e6
    return {"name": "cuDNN, contiguous, causal, 32K", "us": us, "tflop_per_s": rate}
