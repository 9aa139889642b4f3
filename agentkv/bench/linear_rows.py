"""Linear maps of a decode step: a kernel that reads each weight once, against the library's product."""

# mypy: disable-error-code="no-untyped-call"
# (torch's operations)

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.bench.device_times import graph_of, times
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.shapes import SHAPES

MAPS = ("qkv", "o", "gate_up", "down")
TILES = ((16, 256, 4, 5), (16, 128, 4, 6), (16, 512, 4, 3), (32, 256, 4, 4), (32, 128, 4, 5), (64, 128, 4, 4))
"""Outputs, inputs, warps, stages that are tried for each map."""
COPIES = 6
"""Layers of one replay, so that none finds its weights in the cache."""


def linear_rows() -> Iterator[Row]:
    """The four maps of a layer, and logits, for one token and for eight."""
    for num_tokens in (1, 8):
        name = f"linear maps of a layer, qwen3-4b, {num_tokens} token{'s' if num_tokens > 1 else ''}"
        yield Row(name, "of copy", 0.8, _measure(num_tokens))


def map_shapes(name: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each map of a shape."""
    c: dict[str, Any] = SHAPES[name]
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    sizes = ((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)
    return dict(zip(MAPS, sizes, strict=True))


def _measure(num_tokens: int) -> Callable[[Rig], Measured]:
    """us: the four maps together, each by its faster side; `maps` has both sides of each, and every tile that was tried."""

    def measure(rig: Rig) -> Measured:
        maps: dict[str, Any] = {}
        total, num_bytes = [0.0] * rig.repeats, 0
        for key, shape in map_shapes("tiny" if rig.tiny else "qwen3-4b").items():
            found = maps[key] = _one(shape, num_tokens, rig)
            us = min((found["library_us"], found["ours_us"]), key=median)
            total = [sum(pair) for pair in zip(total, us, strict=True)]
            num_bytes += shape[0] * shape[1] * 2
        speed = num_bytes / median(total) / 1e6
        library = sum(median(found["library_us"]) for found in maps.values())
        peer = {"name": "torch's linear", "median_us": library}
        more = {"maps": maps, "bytes": num_bytes, "tb_per_s": speed}
        return Measured(total, speed / rig.copy, rig.copy, "TB/s", peer, library / median(total), more)

    return measure


def _one(shape: tuple[int, int], num_tokens: int, rig: Rig) -> dict[str, Any]:
    """Every repeat of the library and of the best tile, microseconds of one map; medians by tile."""
    from agentkv.kernels.linear_triton import Tiles, linear_few

    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
    copies = 1 if rig.tiny else COPIES
    weights = [torch.randn(shape, dtype=dtype, device=rig.device) for _ in range(copies)]
    x = torch.randn(num_tokens, shape[1], dtype=dtype, device=rig.device)

    def taken(product: Callable[[Tensor], Tensor]) -> list[float]:
        replay = graph_of(lambda: [product(weight) for weight in weights], rig.device)
        return [each / copies for each in times(replay, rig.device, rig.repeats)]

    library = taken(lambda weight: functional.linear(x, weight))
    ways = {}
    for tiles in TILES[: 1 if rig.tiny else None]:
        ways[tiles] = taken(lambda weight, tiles=tiles: linear_few(x, weight, tiles=Tiles(*tiles)))  # type: ignore[misc]
    best = min(ways, key=lambda tiles: median(ways[tiles]))
    by_tile = {"x".join(map(str, tiles)): median(us) for tiles, us in ways.items()}
    return {"shape": shape, "library_us": library, "ours_us": ways[best], "best": best, "by_tile_us": by_tile}
