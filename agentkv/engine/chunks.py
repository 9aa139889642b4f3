"""Attention of prefill chunks over one part, row by row: a chunk is long enough to fill the device by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.engine.gathered import gather_row
from agentkv.engine.tables import RowTable
from agentkv.engine.view import DeviceBatch, PagedKV, Part
from agentkv.kernels.chunk_attention import causal_attention, chunk_attention
from agentkv.kernels.span_attention import span_attention


def attend_own(
    q: Tensor, part: Part, table: RowTable, batch: DeviceBatch, scale: float, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out, and lse where it is asked or costs nothing, over the part that ends with the chunks' own tokens."""
    if part.bias is not None:
        raise TypeError("a bias on the part that holds a chunk's own tokens: in prefill only earlier parts have one")
    if q.device.type == "cuda" and table.starts is None and isinstance(part.payload, PagedKV):
        from agentkv.kernels.paged_prefill import paged_prefill, serves  # needs triton, which a CPU-only platform may lack

        if serves(q, part.payload.pages):
            pages, rows = part.payload.pages, zip(batch.rows, table.host_rows, table.host_lens, strict=True)
            done = [paged_prefill(q[s.start : s.end], pages, table.entries[row], length, scale) for s, row, length in rows]
            return _joined([each for each, _ in done]), _joined([each for _, each in done])
    return _attend_own_rows(q, part, table, batch, scale, lse)


def _attend_own_rows(
    q: Tensor, part: Part, table: RowTable, batch: DeviceBatch, scale: float, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The same with every device, dtype and window."""
    out = torch.empty_like(q)
    lses: list[Tensor] = []
    for index, (span, starts) in enumerate(zip(batch.rows, table.chunk_starts, strict=True)):
        chunk = q[span.start : span.end]
        if isinstance(part.payload, PagedKV):
            done, sums = chunk_attention(chunk, part.payload.pages, table.chunk_plan[index], scale, starts, lse=lse)
        else:
            row = gather_row(part, index, q.dtype)
            done, sums = causal_attention(chunk, row.k, row.v, scale, starts, lse=lse)
        out[span.start : span.end] = done
        if sums is not None:
            lses.append(sums)
    return out, _joined(lses) if lses else None


def attend_whole(q: Tensor, part: Part, batch: DeviceBatch, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse over a part of which every token of a row sees all."""
    outs, lses = [], []
    for index, span in enumerate(batch.rows):
        row = gather_row(part, index, q.dtype)
        out, lse = span_attention(q[span.start : span.end], row.k, row.v, row.lens, scale, row.bias)
        outs.append(out)
        lses.append(lse)
    return _joined(outs), _joined(lses)


def _joined(rows: list[Tensor]) -> Tensor:
    """One behind another; of one row nothing is copied."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
