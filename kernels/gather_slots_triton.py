"""Copies of slots that differ by KV head on a GPU. The twin is `gather_slots`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS = 16
"""Slots of one program."""


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(
    source_ptr, source_entries_ptr, source_offsets_ptr, target_ptr, target_entries_ptr, target_offsets_ptr, valid_ptr, count,
    source_stride, source_head_stride, source_side, target_stride, target_head_stride, target_side,
    HAS_VALID: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """K and V of SLOTS slots of one head."""
    head = tl.program_id(1)
    slot, dim = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.arange(0, DIM_PAD)
    place = head * count + slot
    live = slot < count
    if HAS_VALID:
        live = live & (tl.load(valid_ptr + place, mask=live, other=0) != 0)
    read = tl.load(source_entries_ptr + place, mask=live, other=0) * source_stride + head * source_head_stride
    read += tl.load(source_offsets_ptr + place, mask=live, other=0) * DIM
    write = tl.load(target_entries_ptr + place, mask=live, other=0) * target_stride + head * target_head_stride
    write += tl.load(target_offsets_ptr + place, mask=live, other=0) * DIM
    wide = live[:, None] & (dim[None, :] < DIM)
    for side in tl.static_range(2):
        moved = tl.load(source_ptr + read[:, None] + side * source_side + dim[None, :], mask=wide)
        tl.store(target_ptr + write[:, None] + side * target_side + dim[None, :], moved, mask=wide)


@triton.jit(do_not_specialize=["entries_ptr", "lens_ptr", "length", "row_stride"])
def _read_kernel(
    pages_ptr, entries_ptr, lens_ptr, k_ptr, v_ptr, length, page_stride, head_stride, row_stride,
    HAS_LENS: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """K and V of SLOTS slots of one head, in order."""
    head = tl.program_id(1).to(tl.int64)
    slot, dim = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.arange(0, DIM_PAD)
    held = slot < (tl.minimum(tl.load(lens_ptr + head), length) if HAS_LENS else length)
    entry = tl.load(entries_ptr + head * row_stride + slot // PAGE, mask=held, other=0).to(tl.int64)
    read = (entry * page_stride + head * head_stride + (slot % PAGE) * DIM)[:, None] + dim[None, :]
    write = (head * length + slot)[:, None] * DIM + dim[None, :]
    live, wide = held[:, None] & (dim[None, :] < DIM), (slot[:, None] < length) & (dim[None, :] < DIM)
    tl.store(k_ptr + write, tl.load(pages_ptr + read, mask=live, other=0.0), mask=wide)
    tl.store(v_ptr + write, tl.load(pages_ptr + read + PAGE * DIM, mask=live, other=0.0), mask=wide)


def copy_slots(
    source_pages: Tensor,
    source: tuple[Tensor, Tensor],
    target_pages: Tensor,
    target: tuple[Tensor, Tensor],
    valid: Tensor | None,
) -> None:
    """As `move_head_slots`, for 16 and 32 bit dtypes."""
    num_kv_heads, count = source[0].shape
    if not count:
        return
    places = [each.contiguous() for each in (*source, *target)]
    head_dim = source_pages.shape[4]
    _copy_kernel[(triton.cdiv(count, SLOTS), num_kv_heads)](
        source_pages, *places[:2], target_pages, *places[2:], source_pages if valid is None else valid.contiguous(), count,
        *_strides(source_pages), source_pages.stride(2), *_strides(target_pages), target_pages.stride(2),
        HAS_VALID=valid is not None, SLOTS=SLOTS, DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def read_slots(pages: Tensor, entries: Tensor, length: int, lens: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `gather_heads`; entries `[num_kv_heads, num_pages]`."""
    num_kv_heads, (page_size, head_dim) = len(entries), pages.shape[3:]
    k, v = (torch.empty(num_kv_heads, length, head_dim, dtype=pages.dtype, device=pages.device) for _ in range(2))
    if length:
        _read_kernel[(triton.cdiv(length, SLOTS), num_kv_heads)](
            pages, entries, entries if lens is None else lens, k, v, length, *_strides(pages), entries.stride(0),
            HAS_LENS=lens is not None, SLOTS=SLOTS, PAGE=page_size, DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
        )  # fmt: skip
    return k, v


def _strides(pages: Tensor) -> tuple[int, int]:
    """Of a page and of a head in it, which is 0 where each head has pages of its own."""
    return pages.stride(0), pages.stride(1) if pages.shape[1] > 1 else 0
