"""Paged keys and values to measure attention with: rows of given lengths, pages in random order, contents drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.engine.cache.layout import Granularity, UnitLayout
from agentkv.engine.core import GRANULE

PAGE, DIM = 16, 128


class Shape(NamedTuple):
    """Decode attention of rows of these lengths. share: of the copy rate, what is to be reached, 0 where nothing is wanted;
    gain: over the peer."""

    name: str
    lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    share: float
    gain: float | None = None
    head_dim: int = DIM

    @property
    def kv_bytes(self) -> int:
        """Bytes of bfloat16 keys and values that one layer reads."""
        return sum(self.lens) * self.num_kv_heads * 2 * self.head_dim * 2


SHAPES = (
    Shape("8x32K 32/8", (32_768,) * 8, 32, 8, 0.88, 1.3),
    Shape("8x32K 32/4", (32_768,) * 8, 32, 4, 0.85, 1.3),
    Shape("2x128K 32/4", (131_072,) * 2, 32, 4, 0.82, 1.3),
    Shape("1x32K 32/8", (32_768,), 32, 8, 0.72),
    Shape("1x128K 32/4", (131_072,), 32, 4, 0.78),
    Shape("32x8K 32/4", (8192,) * 32, 32, 4, 0.82),
    Shape("1x128K + 31x2K 32/4", (131_072, *(2048,) * 31), 32, 4, 0.75),
)


SHORT = (Shape("8x2K 32/8", (2048,) * 8, 32, 8, 0.0), Shape("64x1K 32/8", (1024,) * 64, 32, 8, 0.0))
"""Rows as short as where a library's kernel may be the faster one."""


@dataclass(frozen=True)
class Drawn:
    """Several layers' KV of one shape. layers: by layer `[num_granules, num_kv_heads, 2, page_size, head_dim]`. tables: by
    layer int32 `[num_rows, max_pages]`, with head pages `[num_rows, num_kv_heads, max_pages]`. lens: int32 `[num_rows]`, with
    head pages `[num_rows, num_kv_heads]`. q: `[num_rows, num_heads, head_dim]`. All bfloat16; float32 on a CPU."""

    shape: Shape
    q: Tensor
    lens: Tensor
    layers: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]


def draw(shape: Shape, num_layers: int, device: torch.device, granularity: Granularity = "stripe") -> Drawn:
    """Random contents in units of the engine's own layouts: one table for all layers, a table a layer, or one a layer and
    head, over the same bytes."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, dim = shape.num_kv_heads, shape.head_dim
    layout = UnitLayout(granularity, num_layers, heads, dim, dtype.itemsize, PAGE)
    counts = [-(-length // PAGE) for length in shape.lens]
    spread = 1 if granularity == "stripe" else num_layers if granularity == "layer" else num_layers * heads
    num_units, step = sum(counts) * spread, layout.unit_bytes // GRANULE
    arena = torch.empty(num_units * layout.unit_bytes // dtype.itemsize, dtype=dtype, device=device).normal_(
        generator=generator
    )
    order = (torch.randperm(num_units, device=device, generator=generator) * step).to(torch.int32)
    tables = torch.zeros(spread, len(counts), max(counts), dtype=torch.int32, device=device)
    for index, part in enumerate(torch.split(order, sum(counts))):
        for row, entries in enumerate(torch.split(part, counts)):
            tables[index, row, : len(entries)] = entries
    views = [arena.as_strided(*layout.strides(layer, num_units * step)) for layer in range(num_layers)]
    lens = torch.tensor(shape.lens, dtype=torch.int32, device=device)
    if granularity == "head":
        by_head = tables.view(num_layers, heads, len(counts), -1).transpose(1, 2).contiguous()
        views = [view.expand(-1, heads, -1, -1, -1) for view in views]
        lens, by_layer = lens.unsqueeze(1).repeat(1, heads), tuple(by_head)
    else:
        by_layer = tuple(tables) if granularity == "layer" else (tables[0],) * num_layers
    q = torch.randn(len(counts), shape.num_heads, dim, device=device, generator=generator).to(dtype)
    return Drawn(shape, q, lens, tuple(views), by_layer)
