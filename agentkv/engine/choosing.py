"""Choices of what decode rows read, ready for attention: pages within a budget, or slots that several layers share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentkv.engine.selection import Selection
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.kernels.top_positions import top_positions, top_values


class PageBudget:
    """How many pages decode rows read, and of how many slots: lengths alone say that, so it holds in every layer of a step, and
    so does the work list. The newest page is read whatever it holds: what is known of pages may not be there for it yet.

    table: of rows that see all they hold, one token each. budget: most slots of a line, a page at least. by_head: does each KV
    head choose, or all together? full: int32 `[num_rows]`, pages before the newest; first: zeros like it.
    """

    def __init__(self, table: RowTable, budget: int, num_kv_heads: int, by_head: bool) -> None:
        size, lines = table.page_size, num_kv_heads if by_head else 1
        self._table, self._most = table, -(-budget // size)
        self.full = (table.lens - 1) // size
        self.first = torch.zeros_like(self.full)
        newest = table.lens - self.full * size
        beside = torch.minimum(self.full, (budget - newest) // size)
        self._held, self._counts = (_lines(each + 1, lines) for each in (self.full, beside))
        self._entries = self.lines(table)
        bounds = tuple(min(length, budget) for length in table.host_lens)
        self._lens = HeadTable(self._entries, _lines(newest + beside * size, num_kv_heads), max(bounds), bounds)

    def lines(self, table: RowTable) -> Tensor:
        """int32 `[num_rows, num_pages]`: units of the rows' pages in a group that has them page by page, KV or state."""
        return table.entries[table.rows, : -(-max(self._table.host_lens) // self._table.page_size)]

    def best(self, scores: Tensor) -> Selection:
        """scores: `[num_rows, num_kv_heads (1 where all choose together), num_pages]` of the pages before the newest; of equal
        ones the earlier is read."""
        pages, entries = top_values(scores, self._most, self._entries, counts=self._counts, lens=self._held, protect_last=1)
        table = replace(self._lens, entries=entries if entries.shape[1] > 1 else entries[:, 0], like=self._lens)
        return Selection(pages, self._counts, pages=True, table=table)


def best_slots(
    scores: Tensor, most: int, counts: Tensor, table: RowTable, num_kv_heads: int, *, protect_first: int, protect_last: int
) -> Selection:
    """The `counts` best slots of each row, for all heads, the first and the last ones among them; of equal ones the earlier.

    scores: `[num_rows, n]` of rows that see all they hold. most: of counts int32 `[num_rows]`. On a GPU attention reads them
    where they lie; elsewhere it reads copies.
    """
    lens = torch.minimum(counts, table.lens)
    if not scores.is_cuda:
        slots = top_positions(
            scores, most, counts=counts, lens=table.lens, protect_first=protect_first, protect_last=protect_last
        )
        return Selection(slots, lens)
    slots, names = top_values(
        scores.unsqueeze(1),
        most,
        table.visible(num_kv_heads)[0].entries,
        counts=counts,
        lens=table.lens,
        protect_first=protect_first,
        protect_last=protect_last,
        per_value=table.page_size,
    )
    return Selection(slots.squeeze(1), lens, table=slot_table(names.squeeze(1), lens, table, num_kv_heads))


def slot_table(names: Tensor, lens: Tensor, table: RowTable, num_kv_heads: int) -> HeadTable:
    """Slots that all heads read: names int64 `[num_rows, count]`, see HeadTable; the first lens `[num_rows]` of each."""
    bounds = tuple(min(names.shape[1], length) for length in table.host_lens)
    return HeadTable(names, _lines(lens, num_kv_heads), max(bounds), bounds, by_slot=True)


def _lines(each: Tensor, count: int) -> Tensor:
    """`[num_rows]` as contiguous `[num_rows, count]`."""
    return each.unsqueeze(1).expand(-1, count).contiguous()
