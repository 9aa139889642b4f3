"""Merges the parts that the pieces of a decode row made, in logical order (see `paged_decode`)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl

from agentkv.kernels.overlap import follow


@triton.jit
def merge_kernel(
    part_ptr, part_lse_ptr, ends_ptr, out_ptr, lse_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PER_HEAD: tl.constexpr,
    DIM: tl.constexpr, SHARE: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr = False,
    beside_ptr=None, beside_lse_ptr=None,
):  # fmt: skip
    """One query token, one head, SHARE of its dims: its pieces in logical order, then what lies beside, if anything: another
    part's out and natural log-sum-exp, contiguous."""
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
    number = tl.arange(0, MOST)
    live = number < count
    item = begin + number if PER_HEAD else (begin + number) * HEADS + kv_head
    place = item.to(tl.int64) * MEMBERS + member
    lse = tl.load(part_lse_ptr + place, mask=live, other=float("-inf"))
    part = tl.load(part_ptr + place[:, None] * DIM + dim[None, :], mask=live[:, None] & (dim[None, :] < DIM), other=0.0)
    line_out = token.to(tl.int64) * (HEADS * GROUP) + head
    top = tl.maximum(tl.max(lse, 0), -1e30)  # a line may hold nothing
    if beside_ptr is not None:
        beside_lse = tl.load(beside_lse_ptr + line_out) * 1.4426950408889634
        top = tl.maximum(top, beside_lse)
    weight = tl.exp2(lse - top)
    sums = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0)
    if beside_ptr is not None:
        weight_beside = tl.exp2(beside_lse - top)
        sums += weight_beside
        out += tl.load(beside_ptr + line_out * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32) * weight_beside
    sums_safe = tl.where(sums > 0, sums, 1.0)
    out = out / sums_safe
    tl.store(out_ptr + line_out * DIM + dim, out, mask=dim < DIM)
    total = tl.where(sums > 0, (top + tl.log2(sums_safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + line_out, total, mask=share == 0)
