"""Slots with the best scores, chosen once for several layers."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.engine.selection import Selection
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.kernels.top_positions import top_positions, top_values


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
    return HeadTable(names, lens.unsqueeze(1).expand(-1, num_kv_heads).contiguous(), max(bounds), bounds, by_slot=True)
