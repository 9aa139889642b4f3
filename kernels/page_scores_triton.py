"""Upper bounds of scores by page on a GPU. The twin is `page_scores`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGES = 32
"""Pages of one program."""
MODES = {"none": 0, "max": 1, "sum": 2}


@triton.jit
def _page_kernel(
    q_ptr, bounds_ptr, table_ptr, first_ptr, last_ptr, out_ptr, max_pages,
    q_row_stride, q_head_stride, bounds_stride, bounds_head_stride, bounds_side_stride, row_stride,
    GROUP: tl.constexpr, MODE: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """PAGES pages of one row and one KV head, for all query heads of its group."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    page, dim = tl.program_id(0) * PAGES + tl.arange(0, PAGES), tl.arange(0, DIM_PAD)
    inside = (page >= tl.load(first_ptr + row)) & (page < tl.load(last_ptr + row)) & (page < max_pages)
    place = tl.load(table_ptr + row * row_stride + page, mask=inside, other=0).to(tl.int64) * bounds_stride
    lows = bounds_ptr + (place + head * bounds_head_stride)[:, None] + dim[None, :]
    live = inside[:, None] & (dim[None, :] < DIM)
    low = tl.load(lows, mask=live, other=0.0).to(tl.float32)
    high = tl.load(lows + bounds_side_stride, mask=live, other=0.0).to(tl.float32)
    reduced = tl.full([PAGES], float("-inf") if MODE == 1 else 0.0, tl.float32)
    for member in tl.static_range(GROUP):
        query = q_ptr + row * q_row_stride + (head * GROUP + member) * q_head_stride
        q = tl.load(query + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
        score = tl.sum(tl.maximum(q * low, q * high), 1)
        if MODE == 0:
            line = row * (tl.num_programs(2) * GROUP) + head * GROUP + member
            tl.store(out_ptr + line * max_pages + page, tl.where(inside, score, float("-inf")), mask=page < max_pages)
        reduced = tl.maximum(reduced, score) if MODE == 1 else reduced + score
    if MODE != 0:
        line = row * tl.num_programs(2) + head
        tl.store(out_ptr + line * max_pages + page, tl.where(inside, reduced, float("-inf")), mask=page < max_pages)


def score_pages(q: Tensor, bounds: Tensor, table: Tensor, first: Tensor, last: Tensor, reduce: str) -> Tensor:
    """As `page_scores`, for at most float32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, max_pages = bounds.shape[1], table.shape[1]
    lines = num_heads if reduce == "none" else num_kv_heads
    out = torch.empty(num_rows, lines, max_pages, dtype=torch.float32, device=q.device)
    _page_kernel[(triton.cdiv(max_pages, PAGES), num_rows, num_kv_heads)](
        q, bounds, table, first, last, out, max_pages, *q.stride()[:2], *bounds.stride()[:3], table.stride(0),
        GROUP=num_heads // num_kv_heads, MODE=MODES[reduce], PAGES=PAGES,
        DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out
