"""Attention that a decode step's queries give to each slot of paged rows, from the saved log-sum-exp (arXiv 2306.14048)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
BLOCK = 256
"""Slots of one product, whatever the rows hold: so a row's bits do not depend on its batch."""


def slot_mass(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    lse: Tensor,
    scale: float,
    *,
    max_len: int,
    queries: int = 1,
    reduce: Literal["sum", "max"] = "sum",
    bias: Tensor | None = None,
) -> Tensor:
    """For each slot the sum (or maximum) over a row's queries and its group's query heads of exp(score - lse).

    q, pages, table, rows, lens, max_len, queries and bias as in `ragged_decode` (a bias may be longer); all query tokens see
    all slots. lse: `[num_rows * queries, num_heads]`, natural, of everything that the query attended to, these slots among it;
    -inf counts for nothing.

    Returns float32 (float64 for float64) `[num_rows, num_kv_heads, max_len]`, 0 past a head's length.
    """
    head_dim = q.shape[2]
    num_rows, num_kv_heads = lens.shape
    table = table if table.dim() == 3 else table.unsqueeze(1).expand(-1, num_kv_heads, -1)
    members = (
        q.view(num_rows, queries, num_kv_heads, -1, head_dim).transpose(1, 2).reshape(num_rows, num_kv_heads, -1, head_dim)
    )
    tops = lse.view(num_rows, queries, num_kv_heads, -1).transpose(1, 2).reshape(num_rows, num_kv_heads, -1)
    if q.is_cuda and q.dtype != torch.float64:
        from agentkv.kernels.slot_mass_triton import mass_of_slots

        return mass_of_slots(members, pages, table, rows, lens, tops, scale, max_len, reduce == "max", bias)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    members, tops, table = members.to(wide), tops.to(wide).unsqueeze(-1), table[rows]
    heads = torch.arange(num_kv_heads, device=q.device).unsqueeze(1) * (pages.shape[1] > 1)
    parts = [torch.zeros(num_rows, num_kv_heads, 0, dtype=wide, device=q.device)]
    for first in range(0, max_len, BLOCK):
        slots = torch.arange(first, first + BLOCK, device=q.device)
        hidden = slots >= lens.unsqueeze(-1)
        page = (slots // pages.shape[3]).clamp(max=table.shape[2] - 1)
        entries = table[..., page].to(torch.int64).masked_fill(hidden, 0)
        keys = pages[entries, heads, 0, slots % pages.shape[3]].to(wide)
        scores = torch.matmul(members, keys.transpose(2, 3)) * scale
        if bias is not None:
            part = bias[..., first : first + BLOCK].to(wide)
            scores[..., : part.shape[-1]] += part.unsqueeze(2)
        unseen = hidden.unsqueeze(2) | (tops == -torch.inf)
        mass = scores.sub_(tops).exp_().masked_fill_(unseen, 0)
        parts.append(mass.sum(2) if reduce == "sum" else mass.amax(2))
    return torch.cat(parts, -1)[..., :max_len]


def slot_peaks(scores: Tensor, lse: Tensor, lens: Tensor) -> Tensor:
    """For each slot of decode rows the most that a query head gives it, exp(score - lse), from scores that attention left.

    scores: float32 `[num_rows, num_heads, n]`, contiguous, scaled, times log2(e), see `paged_decode`. lse: `[num_rows,
    num_heads]` as in `slot_mass`. lens: int32 `[num_rows]`. Returns float32 `[num_rows, n]`, 0 past a row's length.
    """
    if scores.is_cuda:
        from agentkv.kernels.slot_mass_triton import peaks_of_slots

        return peaks_of_slots(scores, lse, lens)
    tops = lse.to(torch.float32).unsqueeze(-1) * LOG2_E
    hidden = torch.arange(scores.shape[2], device=scores.device) >= lens.unsqueeze(1)
    given = torch.exp2(scores - tops).masked_fill_(hidden.unsqueeze(1) | (tops == -torch.inf), 0)
    return given.amax(1)
