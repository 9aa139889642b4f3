"""What lies where in a unit: stripes, layer pages and head pages of K and V.

One order for all of them: [layer][kv head][K, V][token][dim], then, where there are any, the scales in the same order
without [dim]. A **stripe** is a page of all layers, a **layer page** the part of one layer, a **head page** that of one layer
and head, so the smaller units are runs of bytes of the larger (scales aside). Whatever the unit, a table entry is the int32
granule where it starts, and a kernel reads at

    base + entry.to(int64) * 256 + constant(layer, head)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentkv.engine.cache.arena import UnitClass
from agentkv.engine.core import GRANULE, KVGroup

Granularity = Literal["stripe", "layer", "head"]

MOST_GRANULES = 2**31
"""What an int32 entry can point at: an arena of 549 GB."""


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit of one granularity. A payload element has `itemsize` bytes; scale_bytes: bytes of scale of each K or V vector of
    a token and head, 0 for none.

    Methods that keep every token of every layer use stripes, those that keep other tokens by layer use layer pages, those
    that keep other counts by head use head pages.
    """

    granularity: Granularity
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    page_size: int
    scale_bytes: int = 0

    @classmethod
    def of(cls, group: KVGroup, granularity: Granularity, *, scale_bytes: int = 0) -> UnitLayout:
        """The units of a KV group's shape; layers are counted in the group."""
        shape = (group.num_layers, group.num_kv_heads, group.head_dim, group.itemsize, group.page_size)
        return cls(granularity, *shape, scale_bytes=scale_bytes)

    @property
    def table_shape(self) -> tuple[int, ...]:
        """Entries of one page of a row: (), `[num_layers]` or `[num_layers, num_kv_heads]`."""
        return {"stripe": (), "layer": (self.num_layers,), "head": (self.num_layers, self.num_kv_heads)}[self.granularity]

    @property
    def plane_bytes(self) -> int:
        """Bytes of K (or of V) of one head: [token][dim]."""
        return self.page_size * self.head_dim * self.itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of K and V in one unit; the scales follow."""
        return self._heads * 2 * self.plane_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit with its scales, rounded up to whole granules."""
        raw = self.payload_bytes + self._heads * 2 * self.page_size * self.scale_bytes
        return -(-raw // GRANULE) * GRANULE

    @property
    def unit_class(self) -> UnitClass:
        """Its class in the arena."""
        return UnitClass(self.granularity, self.unit_bytes)

    def constant(self, layer: int, head: int) -> int:
        """Bytes from a unit's start to the K plane of a layer and head. Raises IndexError outside the shape."""
        return self._index(layer, head) * 2 * self.plane_bytes

    def scale_constant(self, layer: int, head: int) -> int:
        """Bytes from a unit's start to the scales of those K vectors: [K, V][token]. Raises IndexError outside the shape."""
        return self.payload_bytes + self._index(layer, head) * 2 * self.page_size * self.scale_bytes

    def address(self, entry: int, layer: int, head: int, kv: int, token: int, dim: int) -> int:
        """Byte of an element in the arena, for a page with this entry. kv: 0 for K, 1 for V."""
        inside = ((kv * self.page_size + token) * self.head_dim + dim) * self.itemsize
        return entry * GRANULE + self.constant(layer, head) + inside

    def scale_address(self, entry: int, layer: int, head: int, kv: int, token: int) -> int:
        """Byte of a vector's scale in the arena."""
        return entry * GRANULE + self.scale_constant(layer, head) + (kv * self.page_size + token) * self.scale_bytes

    def strides(self, layer: int, num_granules: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """(shape, strides, offset), in payload elements, of a view of the whole arena: row g is the part of the unit at granule
        g that belongs to the layer, `[rows, num_kv_heads, 2, page_size, head_dim]` (one head in head pages). Rows overlap."""
        plane = self.page_size * self.head_dim
        heads = 1 if self.granularity == "head" else self.num_kv_heads
        offset = self.constant(layer, 0) // self.itemsize
        rows = num_granules - self.unit_bytes // GRANULE + 1
        shape = (rows, heads, 2, self.page_size, self.head_dim)
        return shape, (GRANULE // self.itemsize, 2 * plane, plane, self.head_dim, 1), offset

    @property
    def _heads(self) -> int:
        """Pairs of layer and head in one unit."""
        return {"stripe": self.num_layers * self.num_kv_heads, "layer": self.num_kv_heads, "head": 1}[self.granularity]

    def _index(self, layer: int, head: int) -> int:
        if not (0 <= layer < self.num_layers and 0 <= head < self.num_kv_heads):
            raise IndexError(f"layer {layer}, head {head} of {self.num_layers} x {self.num_kv_heads}")
        return {"stripe": layer * self.num_kv_heads + head, "layer": head, "head": 0}[self.granularity]
