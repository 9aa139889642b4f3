"""Sealed parts of K and V in the arena, and what the rows of a step hold of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from agentkv.engine.core import GRANULE
from agentkv.engine.forms import Served
from agentkv.engine.pages import KVPages
from agentkv.engine.tables import HeadTable
from agentkv.engine.view import PagedKV, Part
from agentkv.errors import EngineFault


class SealedUnits:
    """Views of the arena in which one method's sealed parts of K and V lie.

    positions: int32 `[num_granules, num_layers, num_kv_heads, page_size]`, in head pages `[num_granules, page_size]`; lens:
    int32 `[num_granules, num_layers, num_kv_heads]`. Row g is the unit that starts at granule g.
    """

    def __init__(self, pages: KVPages, served: Served) -> None:
        if served.layout is None:
            raise EngineFault(f"{served.method.fingerprint} seals into states of its own, not into K and V")
        self.layout = layout = served.layout
        self.by_head = layout.granularity == "head"
        layers = 1 if self.by_head else layout.num_layers
        elements = pages.elements(pages.dtype)
        self._kv = [elements.as_strided(*layout.strides(layer, pages.all_granules)) for layer in range(layers)]
        rows = pages.all_granules - pages.groups[served.payload].stripe_bytes // GRANULE + 1
        dims = (layout.page_size,) if self.by_head else (layout.num_layers, layout.num_kv_heads, layout.page_size)
        inner = (1,) if self.by_head else (layout.num_kv_heads * layout.page_size, layout.page_size, 1)
        words = pages.elements(torch.int32)
        self.positions = words.as_strided((rows, *dims), (GRANULE // 4, *inner), layout.payload_bytes // 4)
        self.lens = pages.state(served.lens)

    def kv(self, layer: int) -> Tensor:
        """`[num_granules, num_kv_heads, 2, page_size, head_dim]` of stripes; of head pages one head, whatever the layer."""
        return self._kv[0 if self.by_head else layer]

    def pages_of(self, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Of lens `[..., num_layers, num_kv_heads]`: pages of each head, and where they begin among a sequence's head pages,
        int64."""
        pages = (lens.to(torch.int64) + self.layout.page_size - 1) // self.layout.page_size
        ends = pages.flatten(-2).cumsum(-1).view(pages.shape)
        return pages, ends - pages


class SealedPages:
    """The sealed parts of one method's rows in a step. Implements `sealed.SealedRows`.

    rows: int64 `[num_rows]`, lines of the page tables; bounds: int64 `[num_rows]`, most slots of each row in a layer and head;
    host_slots: the same on the host.
    """

    def __init__(
        self,
        pages: KVPages,
        served: Served,
        units: SealedUnits | None,
        rows: Tensor,
        bounds: Tensor,
        host_slots: tuple[int, ...],
    ) -> None:
        self.max_slots = max(host_slots)
        self.host_slots = host_slots
        self._pages, self._served, self._units = pages, served, units
        self.bounds, self._rows = bounds, rows

    def part(self, layer: int) -> Part:
        """See `sealed.SealedRows`; a sealed part of states is for the method to view."""
        table = HeadTable(self._entries(layer), self.lens(layer), self.max_slots, self.host_slots)
        return Part(PagedKV(self._of_kv.kv(layer)), table)

    def lens(self, layer: int) -> Tensor:
        """See `sealed.SealedRows`."""
        return self._lens[:, layer]

    def all_lens(self) -> Tensor:
        """See `sealed.SealedRows`."""
        return self._lens

    def positions(self, layer: int) -> Tensor:
        """See `sealed.SealedRows`."""
        units, entries = self._of_kv, self._entries(layer).to(torch.int64)
        found = units.positions[entries] if units.by_head else units.positions[:, layer][entries].transpose(1, 2)
        return found.flatten(2)[..., : self.max_slots]

    def state(self, name: str) -> tuple[Tensor, Tensor]:
        """See `sealed.SealedRows`."""
        group = self._served.sealed[name]
        count = -(-self.max_slots // self._pages.groups[group].page_size)
        return self._pages.state(group), self._pages.tables[group][self._rows, :count].to(torch.int64)

    @property
    def _of_kv(self) -> SealedUnits:
        if self._units is None:
            raise EngineFault(f"{self._served.method.fingerprint} seals into states of its own: it must view them itself")
        return self._units

    @cached_property
    def _lens(self) -> Tensor:
        """int32 `[num_rows, num_layers, num_kv_heads]`: what the device knows, and nothing of rows without a sealed part."""
        shape, bounds = self._served.shape, self.bounds.to(torch.int32).view(-1, 1, 1)
        if self._units is None:
            return bounds.expand(-1, shape.num_layers, shape.num_kv_heads)
        held = self._units.lens[self._pages.tables[self._served.lens][self._rows, 0].to(torch.int64)]
        return torch.minimum(held.clamp(min=0), bounds)  # a row without one may have anything there

    @cached_property
    def _firsts(self) -> Tensor:
        """int64 `[num_rows, num_layers, num_kv_heads]`: where each head's pages begin among its row's."""
        return self._of_kv.pages_of(self._lens)[1]

    @cached_property
    def _table(self) -> Tensor:
        """The rows' lines of the payload's table, int32 `[num_rows, most units]`."""
        return self._pages.tables[self._served.payload][self._rows]

    def _entries(self, layer: int) -> Tensor:
        """int32 `[num_rows, max_pages]`, of head pages `[num_rows, num_kv_heads, max_pages]`; anything behind the lengths."""
        count = -(-self.max_slots // self._of_kv.layout.page_size)
        if not self._of_kv.by_head:
            return self._table[:, :count]
        pages = self._firsts[:, layer].unsqueeze(-1) + torch.arange(count, device=self._rows.device)
        within = pages.clamp_(max=self._table.shape[1] - 1).flatten(1)
        return self._table.gather(1, within).view(pages.shape)
