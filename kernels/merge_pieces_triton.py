"""Merges the parts that the pieces of a decode row made, in logical order (see `paged_decode`)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl

from agentkv.kernels.overlap import follow

TOGETHER = 64
"""Pieces that are read at once: more would not fit a program's registers."""


@triton.jit
def merge_kernel(
    part_ptr, part_lse_ptr, ends_ptr, out_ptr, lse_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PER_HEAD: tl.constexpr,
    DIM: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr = False,
    beside_ptr=None, beside_lse_ptr=None,
):  # fmt: skip
    """One query token, one head, SHARE of its dims: its pieces in logical order, then what lies beside, if anything: another
    part's out and natural log-sum-exp, contiguous. AT_ONCE: pieces that are read together."""
    follow(OVERLAP)
    token, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    MEMBERS: tl.constexpr = GROUP * QUERIES
    row = token // QUERIES
    kv_head = head // GROUP
    member = (token % QUERIES) * GROUP + head % GROUP
    line = row * HEADS + kv_head if PER_HEAD else row
    begin = tl.load(ends_ptr + line - 1, mask=line > 0, other=0)
    count = tl.load(ends_ptr + line) - begin
    dim = share * SHARE + tl.arange(0, SHARE)
    line_out = token.to(tl.int64) * (HEADS * GROUP) + head
    top = tl.max(tl.full([SHARE], -1e30, tl.float32), 0)  # a line may hold nothing
    sums = tl.sum(tl.zeros([SHARE], tl.float32), 0)
    out = tl.zeros([SHARE], tl.float32)
    for first in range(0, count, AT_ONCE):
        number = first + tl.arange(0, AT_ONCE)
        live = number < count
        item = begin + number if PER_HEAD else (begin + number) * HEADS + kv_head
        place = item.to(tl.int64) * MEMBERS + member
        lse = tl.load(part_lse_ptr + place, mask=live, other=float("-inf"))
        part = tl.load(part_ptr + place[:, None] * DIM + dim[None, :], mask=live[:, None] & (dim[None, :] < DIM), other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight, shrink = tl.exp2(lse - new_top), tl.exp2(top - new_top)
        sums = sums * shrink + tl.sum(weight, 0)
        out = out * shrink + tl.sum(part * weight[:, None], 0)
        top = new_top
    if beside_ptr is not None:
        beside_lse = tl.load(beside_lse_ptr + line_out) * 1.4426950408889634
        new_top = tl.maximum(top, beside_lse)
        weight_beside, shrink = tl.exp2(beside_lse - new_top), tl.exp2(top - new_top)
        sums = sums * shrink + weight_beside
        beside = tl.load(beside_ptr + line_out * DIM + dim, mask=dim < DIM, other=0.0)
        out = out * shrink + beside.to(tl.float32) * weight_beside
        top = new_top
    sums_safe = tl.where(sums > 0, sums, 1.0)
    out = out / sums_safe
    tl.store(out_ptr + line_out * DIM + dim, out, mask=dim < DIM)
    total = tl.where(sums > 0, (top + tl.log2(sums_safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + line_out, total, mask=share == 0)
