"""The newest page of each row, and of the full ones before it those with the best scores, as many as fit a budget."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentkv.engine.selection import Selection
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.kernels.top_positions import top_values


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
        pages, entries = top_values(
            scores, self._most, self._entries, counts=self._counts, lens=self._held, protect_last=1
        )
        table = replace(self._lens, entries=entries if entries.shape[1] > 1 else entries[:, 0], like=self._lens)
        return Selection(pages, self._counts, pages=True, table=table)


def _lines(each: Tensor, count: int) -> Tensor:
    """`[num_rows]` as contiguous `[num_rows, count]`."""
    return each.unsqueeze(1).expand(-1, count).contiguous()
