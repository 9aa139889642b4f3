"""Attention by slot of paged rows on a GPU. The twin is `slot_mass`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS = 64
"""Slots of one program."""
PEAK_SLOTS = 128
"""The same where scores are there already."""


@triton.jit(do_not_specialize=["max_len"])
def _mass_kernel(
    q_ptr, pages_ptr, table_ptr, rows_ptr, lens_ptr, lse_ptr, bias_ptr, out_ptr, scale, max_len,
    page_stride, head_stride, row_stride, table_head_stride, bias_row_stride, bias_head_stride,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, MEMBERS_PAD: tl.constexpr, MAXIMUM: tl.constexpr, HAS_BIAS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one KV head of one row."""
    head, row = tl.program_id(1), tl.program_id(2)
    line = (row * HEADS + head).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    member, dim = tl.arange(0, MEMBERS_PAD), tl.arange(0, DIM_PAD)
    live = slot < tl.minimum(tl.load(lens_ptr + line), max_len)
    table_row = table_ptr + tl.load(rows_ptr + row) * row_stride + head * table_head_stride
    entry = tl.load(table_row + slot // PAGE, mask=live, other=0).to(tl.int64)
    place = entry * page_stride + head * head_stride + (slot % PAGE) * DIM
    k = tl.load(pages_ptr + place[:, None] + dim[None, :], mask=live[:, None] & (dim[None, :] < DIM), other=0.0)
    own = line * MEMBERS + member
    live_q = (member[:, None] < MEMBERS) & (dim[None, :] < DIM)
    q = tl.load(q_ptr + own[:, None] * DIM + dim[None, :], mask=live_q, other=0.0)
    lse = tl.load(lse_ptr + own, mask=member < MEMBERS, other=float("-inf")) * 1.4426950408889634
    seen = lse > float("-inf")
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        bias_line = bias_ptr + row.to(tl.int64) * bias_row_stride + head * bias_head_stride
        score += (tl.load(bias_line + slot, mask=live, other=0.0) * 1.4426950408889634)[None, :]
    mass = tl.exp2(score - tl.where(seen, lse, 0.0)[:, None])
    mass = tl.where(seen[:, None] & live[None, :], mass, 0.0)
    total = tl.max(mass, 0) if MAXIMUM else tl.sum(mass, 0)
    tl.store(out_ptr + line * max_len + slot, total, mask=slot < max_len)


@triton.jit(do_not_specialize=["length"])
def _peak_kernel(
    scores_ptr, lse_ptr, lens_ptr, out_ptr, length, lse_row_stride, lse_head_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one row, over all query heads."""
    row = tl.program_id(1).to(tl.int64)
    slot, head = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.arange(0, HEADS_PAD)
    live = slot < tl.minimum(tl.load(lens_ptr + row), length)
    lse_place = lse_ptr + row * lse_row_stride + head * lse_head_stride
    lse = tl.load(lse_place, mask=head < HEADS, other=float("-inf")) * 1.4426950408889634
    seen = (lse > float("-inf"))[:, None] & live[None, :]
    score = tl.load(scores_ptr + (row * HEADS + head)[:, None] * length + slot[None, :], mask=seen, other=float("-inf"))
    best = tl.max(score - tl.where(lse > float("-inf"), lse, 0.0)[:, None], 0)
    tl.store(out_ptr + row * length + slot, tl.exp2(best), mask=slot < length)


def peaks_of_slots(scores: Tensor, lse: Tensor, lens: Tensor) -> Tensor:
    """As `slot_peaks`."""
    num_rows, num_heads, length = scores.shape
    out = torch.empty(num_rows, length, dtype=torch.float32, device=scores.device)
    _peak_kernel[(triton.cdiv(length, PEAK_SLOTS), num_rows)](
        scores, lse, lens, out, length, lse.stride(0), lse.stride(1),
        HEADS=num_heads, HEADS_PAD=triton.next_power_of_2(num_heads), SLOTS=PEAK_SLOTS,
    )  # fmt: skip
    return out


def mass_of_slots(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    lse: Tensor,
    scale: float,
    max_len: int,
    maximum: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """As `slot_mass`, with query tokens and query heads of a KV head together: q `[num_rows, num_kv_heads, members, head_dim]`,
    lse `[num_rows, num_kv_heads, members]`; table int32 `[max_rows, num_kv_heads, max_pages]`."""
    num_rows, num_kv_heads, members, head_dim = q.shape
    out = torch.empty(num_rows, num_kv_heads, max_len, dtype=torch.float32, device=q.device)
    if out.numel():
        _mass_kernel[(triton.cdiv(max_len, SLOTS), num_kv_heads, num_rows)](
            q.contiguous(), pages, table, rows, lens.contiguous(), lse.contiguous(), lse if bias is None else bias, out,
            scale * 1.4426950408889634, max_len,
            pages.stride(0), pages.stride(1) if pages.shape[1] > 1 else 0, table.stride(0), table.stride(1),
            *((0, 0) if bias is None else bias.stride()[:2]),
            HEADS=num_kv_heads, MEMBERS=members, MEMBERS_PAD=max(16, triton.next_power_of_2(members)), MAXIMUM=maximum,
            HAS_BIAS=bias is not None,
            PAGE=pages.shape[3], DIM=head_dim, DIM_PAD=max(16, triton.next_power_of_2(head_dim)), SLOTS=SLOTS,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )  # fmt: skip
    return out
