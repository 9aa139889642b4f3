"""Attention that each key received from many queries: column sums (arXiv 2306.14048) or maxima (arXiv 2505.23416)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_TILE = 1 << 22
"""Probabilities that are held at once on the CPU."""


def received_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    ends: Tensor,
    scale: float,
    *,
    lens: Tensor | None = None,
    bias: Tensor | None = None,
    reduce: Literal["sum", "max"] = "sum",
) -> Tensor:
    """For each key the sum (or the maximum) over queries and the query heads of its group of exp(score - lse).

    q: `[num_queries, num_heads, head_dim]`. k: `[num_kv_heads, n, head_dim]`, last dim contiguous. lse: float32
    `[num_queries, num_heads]`, natural log-sum-exp of the scaled scores, as attention over these keys (or more) gave it; -inf
    counts for nothing. ends: int32 `[num_queries]` or `[num_kv_heads, num_queries]`, query i sees the keys before ends[i].
    lens: int32 `[num_kv_heads]`, keys that a head holds. bias: float32 `[num_kv_heads, n]`, added to the scaled scores.

    Returns float32 (float64 for float64) `[num_kv_heads, n]`, summed in the order of the queries: the same bits each time.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = k.shape
    ends = ends.expand(num_kv_heads, num_queries)
    if lens is not None:
        ends = torch.minimum(ends, lens.unsqueeze(1))
    if q.is_cuda and q.dtype != torch.float64:
        from agentkv.kernels.attention_columns import reduce_columns

        return reduce_columns(q, k, lse, ends, scale, bias=bias, op=reduce)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    columns = k.to(wide).transpose(1, 2)
    grouped = (q.to(wide) * scale).view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)
    tops = lse.to(wide).view(num_queries, num_kv_heads, -1, 1).transpose(0, 1)
    slots = torch.arange(length, device=q.device)
    received = torch.zeros(num_kv_heads, length, dtype=wide, device=q.device)
    step = max(1, _TILE // max(1, num_heads * length))
    for begin in range(0, num_queries, step):
        part = slice(begin, begin + step)
        mine = grouped[:, part]  # `[num_kv_heads, queries, group, head_dim]`
        scores = torch.bmm(mine.flatten(1, 2), columns).view(*mine.shape[:3], length)
        if bias is not None:
            scores += bias.to(wide)[:, None, None]
        hidden = (slots >= ends[:, part, None, None]) | (tops[:, part] == -torch.inf)
        mass = scores.sub_(tops[:, part]).exp_().masked_fill_(hidden, 0)
        received = received + mass.sum((1, 2)) if reduce == "sum" else torch.maximum(received, mass.amax((1, 2)))
    return received
