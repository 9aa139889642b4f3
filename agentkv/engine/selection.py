"""A selection of slots, and the pages that attention reads for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.engine.tables import HeadTable, RowTable
from agentkv.kernels.gather_slots import move_head_slots

_COMPACT = 64
"""Slots of a page that selected slots are gathered into: one size, so that a kernel is compiled once."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Slots that attention may read, chosen without deleting the others.

    slots: int32 `[num_rows, (num_kv_heads,) count]`, ascending, slots of each row's tail (pages of it where `pages`); what lies
    behind `lens` is ignored. lens: int32 `[num_rows, (num_kv_heads)]`: slots, or pages. A page that is not full is the row's
    last, so ascending order puts it last in the list. table: the same as attention reads it, where that was made with the
    choice.
    """

    slots: Tensor
    lens: Tensor
    pages: bool = False
    table: HeadTable | None = None


def selected_pages(selection: Selection, table: RowTable, num_kv_heads: int, page_size: int) -> tuple[HeadTable, Tensor | None]:
    """A table of the pages that are selected, and the bias that hides slots before the row's first visible one, if any."""
    pages, lens = _by_head(selection, num_kv_heads)
    last = pages.gather(2, (lens - 1).clamp(min=0).unsqueeze(2)).squeeze(2)
    held = table.lens.unsqueeze(1)
    missing = torch.where(last == (held - 1) // page_size, (last + 1) * page_size - held, 0)
    slots = torch.where(lens > 0, lens * page_size - missing, 0).to(torch.int32)
    most = pages.shape[2] * page_size
    bounds = tuple(min(most, length) for length in table.host_lens)
    offsets = torch.arange(page_size, device=pages.device)
    hiding = _hiding((pages.unsqueeze(3) * page_size + offsets).flatten(2), table) if table.cut else None
    return HeadTable(_granules(pages, table).to(torch.int32), slots, max(bounds), bounds), hiding


def selected_slots(selection: Selection, table: RowTable, pages: Tensor) -> tuple[Tensor, HeadTable, Tensor | None]:
    """Head pages `[num_pages, 1, 2, page_size, head_dim]` with copies of the slots that are selected, their table, and the bias
    as in `selected_pages`. pages: the layer's, see PagedKV."""
    num_kv_heads, _, page_size, head_dim = pages.shape[1:]
    slots, lens = _by_head(selection, num_kv_heads)
    num_rows, _, most = slots.shape
    num_pages = -(-most // _COMPACT)
    compact = pages.new_empty(num_rows * num_kv_heads * num_pages, 1, 2, _COMPACT, head_dim)
    entries = torch.arange(len(compact), device=pages.device).view(num_rows, num_kv_heads, num_pages)
    place = torch.arange(most, device=pages.device)
    source = _columns(_granules(slots // page_size, table), slots % page_size)
    target = _columns(entries[..., place // _COMPACT], (place % _COMPACT).expand_as(slots))
    move_head_slots(pages, source, compact, target)
    bounds = tuple(min(most, length) for length in table.host_lens)
    hiding = _hiding(slots, table) if table.cut else None
    return compact, HeadTable(entries.to(torch.int32), lens.to(torch.int32), max(bounds), bounds), hiding


def _by_head(selection: Selection, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """int64 `[num_rows, num_kv_heads, count]`, 0 behind the lens, and int64 lens `[num_rows, num_kv_heads]`."""
    slots, lens = selection.slots.to(torch.int64), selection.lens.to(torch.int64)
    slots, lens = (slots if slots.dim() == 3 else slots.unsqueeze(1)), (lens if lens.dim() == 2 else lens.unsqueeze(1))
    count = torch.arange(slots.shape[2], device=slots.device)
    slots = slots.masked_fill(count >= lens.unsqueeze(2), 0)
    return slots.expand(-1, num_kv_heads, -1), lens.expand(-1, num_kv_heads)


def _columns(entries: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Places `[num_rows, num_kv_heads, count]` as `[num_kv_heads, num_rows * count]`."""
    return entries.transpose(0, 1).flatten(1), offsets.transpose(0, 1).flatten(1)


def _granules(pages: Tensor, table: RowTable) -> Tensor:
    """int64 `[num_rows, num_kv_heads, count]`: where the rows' pages of those numbers lie."""
    return table.entries[table.rows].to(torch.int64).gather(1, pages.flatten(1)).view(pages.shape)


def _hiding(slots: Tensor, table: RowTable) -> Tensor | None:
    """float32 like slots: -inf for those before the first that the row's token sees, 0 for others."""
    if table.starts is None:
        return None
    hidden = slots < table.starts[:, None, None]
    return torch.zeros(slots.shape, device=slots.device).masked_fill_(hidden, -torch.inf)
