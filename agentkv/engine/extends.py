"""Attention of a captured step's short chunks: the host knows neither their rows nor their lengths, only bounds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agentkv.engine.decodes import attend_heads, attend_rows
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import DeviceBatch, PagedKV, Part
from agentkv.kernels.query_tiles import QueryTiles


def attend_tiles(q: Tensor, part: Part, tiles: QueryTiles, batch: DeviceBatch, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse over a part of pages; a RowTable ends with the step's own tokens, a HeadTable is seen whole by every token.

    TypeError for what is not K and V in the model's dtype, and for a bias.
    """
    if not isinstance(part.payload, PagedKV) or part.bias is not None:
        raise TypeError("a short chunk in a captured step reads K and V in pages, without a bias")
    pages, table = part.payload.pages, part.table
    if q.is_cuda:
        from agentkv.kernels.paged_extend import paged_extend, serves  # needs triton, which a CPU-only platform may lack

        if serves(q, pages):
            lens, starts = table.lens, table.starts if isinstance(table, RowTable) else None
            if isinstance(table, HeadTable):
                pages, lens = pages.expand(-1, lens.shape[1], -1, -1, -1), lens.contiguous()
            most = max(table.host_lens) if isinstance(table, RowTable) else table.max_slots
            return paged_extend(q, pages, table.entries, table.rows, lens, tiles, scale, most=most, starts=starts)
    return _token_by_token(q, replace(part, table=_by_token(table, tiles)), batch, scale)


def _token_by_token(q: Tensor, part: Part, batch: DeviceBatch, scale: float) -> tuple[Tensor, Tensor]:
    """The plain twin: each token is a row that decodes."""
    alone = replace(batch, rows=tuple(replace(batch.rows[0], start=i, end=i + 1) for i in range(len(q))))
    if isinstance(part.table, RowTable):
        return attend_rows(q, part, part.table, alone, scale, True)
    return attend_heads(q, part, part.table, alone, scale)


def _by_token(table: RowTable | HeadTable, tiles: QueryTiles) -> RowTable | HeadTable:
    """A line for each token."""
    lines, count = tiles.lines, len(tiles.lines)
    if isinstance(table, HeadTable):
        return HeadTable(table.entries[lines], table.lens[lines], table.max_slots)
    most, first = max(table.host_lens), table.first_slots[0]
    return replace(
        table,
        rows=table.rows[lines],
        lens=tiles.seen(table.lens).clamp(min=0),
        host_rows=(-1,) * count,
        host_lens=(most,) * count,
        host_starts=((first,),) * count if table.starts is not None else (),
    )
