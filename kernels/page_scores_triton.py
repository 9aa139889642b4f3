"""Upper bounds of scores by page on a GPU. The twin is `page_scores`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.overlap import follow, overlapping

MODES = {"none": 0, "max": 1, "sum": 2}


class Tiles(NamedTuple):
    """How the kernel is compiled: pages of a tile, tiles of a program, warps, stages of its pipeline. The defaults are what was
    fastest of 22 on an H200, 4 rows of 8,192 pages, 32/8 heads of 128 in bfloat16: 84 % of the copy rate."""

    pages: int = 128
    tiles: int = 2
    warps: int = 4
    stages: int = 2


def tiles_of(row_bytes: int) -> Tiles:
    """What fits the shared memory where a bound has so many bytes: a tile has at most those of the defaults at 256."""
    return Tiles(pages=min(128, max(16, 128 * 256 // triton.next_power_of_2(row_bytes))))


@triton.jit(do_not_specialize=["first_ptr", "last_ptr", "max_pages", "row_stride"])
def _page_kernel(
    q_ptr, bounds_ptr, table_ptr, first_ptr, last_ptr, out_ptr, max_pages,
    q_row_stride, q_head_stride, bounds_stride, bounds_head_stride, bounds_side_stride, row_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, MODE: tl.constexpr, PAGES: tl.constexpr,
    COUNT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """COUNT tiles of one row and one KV head, for all query heads of its group; the heads of a page one after another."""
    follow(OVERLAP)
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    row = tl.program_id(1).to(tl.int64)
    member, dim = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    low, high = tl.load(first_ptr + row), tl.load(last_ptr + row)
    q_place = row * q_row_stride + (head * GROUP + member)[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_place, mask=(member[:, None] < GROUP) & (dim[None, :] < DIM), other=0.0)
    # the larger product takes the maximum where q is positive, the minimum where it is negative
    upper, lower = tl.where(q > 0, q, 0.0).to(q.dtype), tl.where(q > 0, 0.0, q).to(q.dtype)
    for start in tl.range(block * COUNT * PAGES, (block + 1) * COUNT * PAGES, PAGES, num_stages=NUM_STAGES):
        page = start + tl.arange(0, PAGES)
        inside = (page >= low) & (page < high) & (page < max_pages)
        place = tl.load(table_ptr + row * row_stride + page, mask=inside, other=0).to(tl.int64) * bounds_stride
        bounds = bounds_ptr + (place + head * bounds_head_stride)[:, None] + dim[None, :]
        live = inside[:, None] & (dim[None, :] < DIM)
        least = tl.load(bounds, mask=live, other=0.0)
        greatest = tl.load(bounds + bounds_side_stride, mask=live, other=0.0)
        score = tl.dot(upper, tl.trans(greatest), input_precision=PRECISION)
        score = tl.dot(lower, tl.trans(least), score, input_precision=PRECISION)
        if MODE == 0:
            line = row * (HEADS * GROUP) + head * GROUP + member
            mask = (member[:, None] < GROUP) & (page[None, :] < max_pages)
            shown = tl.where(inside[None, :], score, float("-inf"))
            tl.store(out_ptr + line[:, None] * max_pages + page[None, :], shown, mask=mask)
        else:
            score = tl.where(member[:, None] < GROUP, score, float("-inf") if MODE == 1 else 0.0)
            reduced = tl.max(score, 0) if MODE == 1 else tl.sum(score, 0)
            line = row * HEADS + head
            tl.store(out_ptr + line * max_pages + page, tl.where(inside, reduced, float("-inf")), mask=page < max_pages)


def score_pages(
    q: Tensor, bounds: Tensor, table: Tensor, first: Tensor, last: Tensor, reduce: str, tiles: Tiles | None = None
) -> Tensor:
    """As `page_scores`, for at most float32; bounds in q's dtype."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, max_pages = bounds.shape[1], table.shape[1]
    tiles = tiles or tiles_of(head_dim * bounds.element_size())
    group = num_heads // num_kv_heads
    lines = num_heads if reduce == "none" else num_kv_heads
    out = torch.empty(num_rows, lines, max_pages, dtype=torch.float32, device=q.device)
    _page_kernel[(triton.cdiv(max_pages, tiles.pages * tiles.tiles) * num_kv_heads, num_rows)](
        q, bounds, table, first, last, out, max_pages, *q.stride()[:2], *bounds.stride()[:3], table.stride(0),
        HEADS=num_kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), MODE=MODES[reduce],
        PAGES=tiles.pages, COUNT=tiles.tiles, DIM=head_dim, DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", NUM_STAGES=tiles.stages, num_warps=tiles.warps,
        **overlapping(q.device),
    )  # fmt: skip
    return out
