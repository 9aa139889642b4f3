"""Decode attention on a GPU: one query token a row, keys split over programs, merged in order.

A row's split depends on how many slots it reads alone, and parts are merged in logical order without atomics, so a row's
result does not depend on the rest of the batch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256
"""Fewest tokens of a split."""
MOST_SPLITS = 64
BLOCK = 64


@triton.jit
def _split_of(length, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """(number of splits, tokens of each) of a row of that length."""
    count = tl.minimum(tl.cdiv(length, SPLIT), MOST_SPLITS)
    size = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), BLOCK) * BLOCK
    return tl.cdiv(length, tl.maximum(size, 1)), size


@triton.jit
def _visible(length, starts_ptr, row, WINDOWED: tl.constexpr):
    """Slots that the row reads: the last ones of its `length`."""
    if WINDOWED:
        length = length - tl.load(starts_ptr + row)
    return length


@triton.jit
def _part_kernel(
    q_ptr, pages_ptr, table_ptr, rows_ptr, lens_ptr, starts_ptr, part_ptr, part_lse_ptr, scale,
    q_row_stride, q_head_stride, page_stride, table_stride, num_heads,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One row, one KV head, one split: its part of out (float32, normalised) and its log-sum-exp."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + row)
    visible = _visible(length, starts_ptr, row, WINDOWED)
    count, size = _split_of(visible, SPLIT, MOST_SPLITS, BLOCK)
    if split >= count:
        return
    start = length - visible + split * size
    stop = tl.minimum(start + size, length)

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    live_q = (member[:, None] < GROUP) & (dim[None, :] < DIM)
    q_offset = row.to(tl.int64) * q_row_stride + (head * GROUP + member[:, None]) * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=live_q, other=0.0)

    table_row = table_ptr + tl.load(rows_ptr + row) * table_stride
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)
        live = token < stop
        entry = tl.load(table_row + token // PAGE, mask=live, other=0).to(tl.int64)
        place = entry * page_stride + head * (2 * PAGE * DIM) + (token % PAGE) * DIM
        offset = place[:, None] + dim[None, :]
        live_kv = live[:, None] & (dim[None, :] < DIM)
        k = tl.load(pages_ptr + offset, mask=live_kv, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(live[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - new_top[:, None])
        shrink = tl.exp(top - new_top)
        v = tl.load(pages_ptr + offset + PAGE * DIM, mask=live_kv, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top

    line = (row.to(tl.int64) * num_heads + head * GROUP + member) * MOST_SPLITS + split
    tl.store(part_ptr + line[:, None] * DIM + dim[None, :], acc / total[:, None], mask=live_q)
    tl.store(part_lse_ptr + line, top + tl.log(total), mask=member < GROUP)


@triton.jit
def _merge_kernel(
    part_ptr, part_lse_ptr, lens_ptr, starts_ptr, out_ptr, lse_ptr, num_heads,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One row, one head: its parts in logical order."""
    row, head = tl.program_id(0), tl.program_id(1)
    count, _ = _split_of(_visible(tl.load(lens_ptr + row), starts_ptr, row, WINDOWED), SPLIT, MOST_SPLITS, BLOCK)
    line = row.to(tl.int64) * num_heads + head
    dim = tl.arange(0, DIM_PAD)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    for split in range(count):
        place = line * MOST_SPLITS + split
        lse = tl.load(part_lse_ptr + place)
        part = tl.load(part_ptr + place * DIM + dim, mask=dim < DIM, other=0.0)
        new_top = tl.maximum(top, lse)
        shrink = tl.exp(top - new_top)
        weight = tl.exp(lse - new_top)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        top = new_top
    tl.store(out_ptr + line * DIM + dim, acc / total, mask=dim < DIM)
    tl.store(lse_ptr + line, top + tl.log(total))


def split_decode(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    max_len: int,
    scale: float,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token a row over all that the row holds, or from its slot `starts` on.

    q: `[num_rows, num_heads, head_dim]`, half precision or float32, last dim contiguous. table: int32 `[max_rows,
    max_pages]`. rows: int64 `[num_rows]`. lens: int32 `[num_rows]`, at least 1. starts: int32 `[num_rows]`, below lens.
    max_len: a host bound on lens - starts.
    Returns out like q and lse `[num_rows, num_heads]` float32.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, _, page_size, _ = pages.shape
    group = num_heads // num_kv_heads
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    splits = min(MOST_SPLITS, triton.cdiv(max_len, SPLIT))
    parts = torch.empty(num_rows, num_heads, MOST_SPLITS, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(num_rows, num_heads, MOST_SPLITS, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    _part_kernel[(num_rows, num_kv_heads, splits)](
        q, pages, table, rows, lens, starts, parts, part_lse, scale,
        q.stride(0), q.stride(1), pages.stride(0), table.stride(0), num_heads,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), PAGE=page_size, DIM=head_dim, DIM_PAD=dim_pad,
        SPLIT=SPLIT, MOST_SPLITS=MOST_SPLITS, BLOCK=BLOCK, PRECISION=precision, WINDOWED=starts is not None,
    )  # fmt: skip
    _merge_kernel[(num_rows, num_heads)](
        parts, part_lse, lens, starts, out, lse, num_heads,
        DIM=head_dim, DIM_PAD=dim_pad, SPLIT=SPLIT, MOST_SPLITS=MOST_SPLITS, BLOCK=BLOCK, WINDOWED=starts is not None,
    )  # fmt: skip
    return out, lse
