"""Attention that slots received in a step, by row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentkv.engine.gathered import gather_row
from agentkv.engine.tables import RowTable
from agentkv.engine.view import AttentionView, DeviceBatch, PagedKV, Part, RowMass
from agentkv.kernels.received_mass import received_mass


def received(
    q: Tensor, view: AttentionView, batch: DeviceBatch, scale: float, lse: Tensor, reduce: Literal["sum", "max"] = "sum"
) -> tuple[RowMass, ...]:
    """What the slots of each row of the batch received: exp(score - lse), summed (or the most) over the row's queries and the
    query heads of a group (arXiv 2306.14048).

    q: `[num_tokens, num_heads, head_dim]`. lse: as `attend` gave it for the whole view. Earlier parts of a view make up
    RowMass.sealed, one behind another. TypeError for what a view of all slots in the model's dtype is not: selections,
    payloads that are decoded as they are read, tokens that see a window only.
    """
    *earlier, last = view.parts
    if not isinstance(last.table, RowTable) or not all(isinstance(part.payload, PagedKV) for part in view.parts):
        raise TypeError("attention received is counted where all slots are read, from pages of plain keys")
    if any(len(set(starts)) > 1 for starts in last.table.host_starts):
        raise TypeError("attention received is not counted in layers that see a window only")
    masses = []
    for index, span in enumerate(batch.rows):
        queries, tops = q[span.start : span.end], lse[span.start : span.end]
        sealed = [_of_row(queries, part, index, tops, scale, reduce, own=False) for part in earlier]
        tail = _of_row(queries, last, index, tops, scale, reduce, own=True)
        joined = torch.cat(sealed, 1) if any(each.shape[1] for each in sealed) else None
        masses.append(RowMass(joined, tail, last.table.first_slots[index]))
    return tuple(masses)


def _of_row(
    q: Tensor, part: Part, index: int, lse: Tensor, scale: float, reduce: Literal["sum", "max"], *, own: bool
) -> Tensor:
    """`[num_kv_heads, slots]` of one row's slots in one part. own: the last slots are the queries' own."""
    row = gather_row(part, index, q.dtype)
    num_kv_heads, length, _ = row.k.shape
    if not length:
        return q.new_zeros(num_kv_heads, 0, dtype=lse.dtype)
    stop = (
        torch.arange(length - len(q) + 1, length + 1, device=q.device)
        if own
        else torch.full((len(q),), length, device=q.device)
    )
    bias = None if row.bias is None else row.bias[:, :length].expand(num_kv_heads, -1)
    return received_mass(q, row.k, lse, stop.to(torch.int32), scale, lens=row.lens, bias=bias, reduce=reduce)
