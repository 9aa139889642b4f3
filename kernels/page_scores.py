"""Upper bound of a query's score over the keys of each page, from their elementwise bounds (arXiv 2406.10774)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64
"""Pages of one product, however many a row has: so a row's bits do not depend on its batch."""


def page_scores(
    q: Tensor,
    bounds: Tensor,
    table: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    reduce: Literal["max", "sum", "none"] = "max",
) -> Tensor:
    """Sum over channels of the larger of q * minimum and q * maximum: no key of the page has a greater product with q.

    q: `[num_rows, num_heads, head_dim]`, last dim contiguous. bounds: `[num_bounds, num_kv_heads, 2, head_dim]` as
    `page_bounds` writes them. table: int32 or int64 `[num_rows, max_pages]`, index in bounds of each page of a row. first,
    last: int32 `[num_rows]`: pages outside [first, last) get -inf, whatever the table has there.

    Returns float32 (float64 for float64) `[num_rows, num_kv_heads, max_pages]`, reduced over the query heads of a group, or
    with "none" `[num_rows, num_heads, max_pages]`. Scores are not scaled.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from agentkv.kernels.page_scores_triton import score_pages

        return score_pages(q, bounds, table, first, last, reduce)
    num_rows, _, head_dim = q.shape
    num_kv_heads, max_pages = bounds.shape[1], table.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page = torch.arange(max_pages, device=q.device)
    outside = (page < first.unsqueeze(1)) | (page >= last.unsqueeze(1))
    places = functional.pad(table.to(torch.int64).masked_fill(outside, 0), (0, -max_pages % BLOCK))
    blocks = places.shape[1] // BLOCK
    read = bounds[places].to(wide).view(num_rows, blocks, BLOCK, num_kv_heads, 2, head_dim).permute(0, 3, 1, 4, 5, 2)
    grouped = q.to(wide).view(num_rows, num_kv_heads, 1, -1, head_dim)
    # the larger product takes the maximum where q is positive, the minimum where it is negative
    scores = torch.matmul(grouped.clamp(min=0), read[:, :, :, 1]) + torch.matmul(grouped.clamp(max=0), read[:, :, :, 0])
    scores = scores.transpose(2, 3).flatten(3)[..., :max_pages]
    if reduce == "none":
        return scores.flatten(1, 2).masked_fill(outside.unsqueeze(1), -torch.inf)
    reduced = scores.amax(2) if reduce == "max" else scores.sum(2)
    return reduced.masked_fill_(outside.unsqueeze(1), -torch.inf)
