"""Attention that slots received in a step, by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from agentkv.engine.gathered import gather_row
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import AttentionView, DecodeMass, DeviceBatch, PagedKV, Part, RowMass
from agentkv.kernels.received_mass import received_mass
from agentkv.kernels.slot_mass import slot_mass

if TYPE_CHECKING:
    from agentkv.kernels.page_columns_triton import PagedKeys


def received(
    q: Tensor,
    view: AttentionView,
    batch: DeviceBatch,
    scale: float,
    lse: Tensor,
    reduce: Literal["sum", "max"] = "sum",
    *,
    window: tuple[int, int] | None = None,
) -> Sequence[RowMass]:
    """What the slots of each row of the batch received: exp(score - lse), summed (or the most) over the row's queries and the
    query heads of a group (arXiv 2306.14048).

    q: `[num_tokens, num_heads, head_dim]`. lse: as `attend` gave it for the whole view. Earlier parts of a view make up
    RowMass.sealed, one behind another. window: see `Needs.mass_window`, None
    counts every query. TypeError for selections and for tokens that see a window only.
    """
    last = view.parts[-1]
    if not isinstance(last.table, RowTable):
        raise TypeError("attention received is counted where all slots are read, not of a selection")
    if any(len(set(starts)) > 1 for starts in last.table.host_starts):
        raise TypeError("attention received is not counted in layers that see a window only")
    if not batch.prefill and all(count == 1 for count in batch.counts) and all(map(_by_slot, view.parts)):
        return _of_decodes(q, view.parts, lse, scale, reduce)
    if not last.table.exact:
        raise TypeError("a captured step counts attention received of plain pages, hidden slots by a bias on all that is seen")
    by_part = [_of_rows(q, part, batch, lse, scale, reduce, own=part is last, window=window) for part in view.parts]
    return _by_row(by_part, last.table.first_slots)


def _by_slot(part: Part) -> bool:
    """Can its slots be told of together, from the page of each row's first visible one on? A bias is of all slots of a row."""
    table = part.table
    return isinstance(part.payload, PagedKV) and (part.bias is None or isinstance(table, HeadTable) or not table.cut)


def _by_row(by_part: Sequence[Sequence[Tensor]], firsts: tuple[int, ...]) -> tuple[RowMass, ...]:
    """by_part: of each part of the view, the last its tail, by row."""
    masses = []
    for first, *sealed, tail in zip(firsts, *by_part, strict=True):
        joined = torch.cat(sealed, 1) if any(each.shape[1] for each in sealed) else None
        masses.append(RowMass(joined, tail, first))
    return tuple(masses)


def _of_decodes(q: Tensor, parts: tuple[Part, ...], lse: Tensor, scale: float, reduce: Literal["sum", "max"]) -> DecodeMass:
    """Rows with one query each, all together."""
    *earlier, tail = [_of_slots(q, part, lse, scale, reduce) for part in parts]
    last = parts[-1].table
    assert isinstance(last, RowTable)
    rows: tuple[RowMass, ...] = ()
    if last.exact:
        by_part = [
            [mass[row, :, first:bound] for row, (first, bound) in enumerate(zip(*_bounds(part), strict=True))]
            for mass, part in zip([*earlier, tail], parts, strict=True)
        ]
        rows = _by_row(by_part, last.first_slots)
    sealed = earlier[0] if len(earlier) == 1 else torch.cat(earlier, 2) if earlier else None
    return DecodeMass(sealed, tail, rows)


def _of_slots(q: Tensor, part: Part, lse: Tensor, scale: float, reduce: Literal["sum", "max"]) -> Tensor:
    """`[num_rows, num_kv_heads, max_slots]` of one part's slots, from the page of each row's first visible one on."""
    assert isinstance(part.payload, PagedKV)
    pages, table, early = part.payload.pages, part.table, None
    if isinstance(table, RowTable):
        early = table.hidden if table.cut else None
        table, _ = table.visible(pages.shape[1])
    if not table.max_slots:
        return lse.new_zeros(*table.lens.shape, 0)
    lines = (table.entries, table.rows, table.lens)
    bias = None if part.bias is None else part.bias.expand(-1, table.lens.shape[1], -1)
    mass = slot_mass(q, pages, *lines, lse, scale, max_len=table.max_slots, reduce=reduce, bias=bias)
    if early is not None:
        mass.masked_fill_(torch.arange(mass.shape[2], device=mass.device) < early.view(-1, 1, 1), 0)
    return mass


def _bounds(part: Part) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each row the first of these slots that it sees, and where they end."""
    if isinstance(part.table, RowTable):
        found, hidden = part.table.visible(1)
        return hidden, found.bounds
    return (0,) * len(part.table.lens), part.table.bounds


def _of_rows(
    q: Tensor,
    part: Part,
    batch: DeviceBatch,
    lse: Tensor,
    scale: float,
    reduce: Literal["sum", "max"],
    *,
    own: bool,
    window: tuple[int, int] | None,
) -> list[Tensor]:
    """The same row by row. own: a row's last slots are its queries' own. window: see `received`."""
    masses = []
    for index, span in enumerate(batch.rows):
        runs = counted(span.position, span.end - span.start, window)
        queries, tops = (pick(each[span.start : span.end], runs) for each in (q, lse))
        last = pick(torch.arange(span.start - span.end + 1, 1, dtype=torch.int32, device=q.device), runs)
        masses.append(of_row(queries, part, index, tops, last * own, scale, reduce))
    return masses


def of_row(
    q: Tensor, part: Part, index: int, lse: Tensor, last: Tensor, scale: float, reduce: Literal["sum", "max"] = "sum"
) -> Tensor:
    """`[num_kv_heads, slots]` of the slots of the batch's row of that index in a part.

    q: `[num_queries, num_heads, head_dim]`, some of the row's. last: int32 `[num_queries]`, 0 where a query sees all slots, -1
    where it sees all but one, ...
    """
    keys = paged_keys(part, index) if on_pages(q) else None
    if keys is not None:
        return columns(q.unsqueeze(0), keys, lse.unsqueeze(0), last + keys.length, scale, reduce)[0]
    k, lens, bias = _keys(part, index, q.dtype)
    num_kv_heads, length, _ = k.shape
    if not length or not len(q):
        return lse.new_zeros(num_kv_heads, length)
    bias = None if bias is None else bias[:, :length].expand(num_kv_heads, -1)
    return received_mass(q, k, lse, length + last, scale, lens=lens, bias=bias, reduce=reduce)


def paged_keys(part: Part, index: int) -> PagedKeys | None:
    """A row's keys where they lie, if they lie in pages of its own and none is hidden."""
    if not isinstance(part.payload, PagedKV) or not isinstance(part.table, RowTable) or part.bias is not None:
        return None
    from agentkv.kernels.page_columns_triton import PagedKeys  # it needs triton

    table, first = part.table, part.table.first_slots[index]
    entries = table.entries[table.host_rows[index], first // table.page_size :]
    return PagedKeys(part.payload.pages, 0, entries, first % table.page_size, table.host_lens[index] - first)


def on_pages(q: Tensor) -> bool:
    """May keys be read where they lie for these queries?"""
    return q.is_cuda and q.dtype != torch.float64 and q.numel() > 0


def columns(
    q: Tensor, keys: PagedKeys, lse: Tensor, ends: Tensor, scale: float, reduce: Literal["sum", "max"] = "sum"
) -> Tensor:
    """`[num_layers, num_kv_heads, slots]` of such keys. See `paged_columns`."""
    from agentkv.kernels.page_columns_triton import paged_columns

    return paged_columns(q, keys, lse, ends, scale, maximum=reduce == "max")


def counted(position: int, count: int, window: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Runs of a row's `count` queries from a logical position on that count."""
    if window is None:
        return [(0, count)]
    size, stride = window
    firsts = range(position // stride * stride + stride - size - position, count, stride)
    runs = ((max(0, first), min(first + size, count)) for first in firsts)
    return [(start, end) for start, end in runs if start < end]


def pick(values: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Those runs, one behind another."""
    if len(runs) == 1:
        return values[slice(*runs[0])]
    return torch.cat([values[start:end] for start, end in runs]) if runs else values[:0]


def _keys(part: Part, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A row's keys, slots held by head where that is less than all, and bias: see GatheredRow."""
    if isinstance(part.payload, PagedKV) and isinstance(part.table, RowTable) and part.bias is None:
        pages, (entries, offsets) = part.payload.pages, part.table.chunk_plan[index]
        heads = torch.arange(pages.shape[1], device=pages.device).unsqueeze(1)
        return pages[entries, heads, 0, offsets], None, None
    row = gather_row(part, index, dtype)
    return row.k, row.lens, row.bias
