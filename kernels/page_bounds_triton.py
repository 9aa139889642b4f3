"""Bounds of the keys of pages on a GPU. The twin is `page_bounds`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _bounds_kernel(
    pages_ptr, entries_ptr, bounds_ptr, targets_ptr, counts_ptr, page_stride, head_stride, bounds_stride, bounds_head_stride,
    bounds_side_stride, HAS_COUNTS: tl.constexpr,
    PAGE: tl.constexpr, PAGE_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """One page of one KV head."""
    page, head = tl.program_id(0), tl.program_id(1)
    slot, dim = tl.arange(0, PAGE_PAD), tl.arange(0, DIM_PAD)
    held = tl.load(counts_ptr + page) if HAS_COUNTS else PAGE
    live = (slot[:, None] < held) & (dim[None, :] < DIM)
    place = tl.load(entries_ptr + page) * page_stride + head * head_stride
    keys = pages_ptr + place + slot[:, None] * DIM + dim[None, :]
    low = tl.min(tl.load(keys, mask=live, other=float("inf")).to(tl.float32), 0)
    high = tl.max(tl.load(keys, mask=live, other=float("-inf")).to(tl.float32), 0)
    out = bounds_ptr + tl.load(targets_ptr + page) * bounds_stride + head * bounds_head_stride + dim
    tl.store(out, low, mask=dim < DIM)
    tl.store(out + bounds_side_stride, high, mask=dim < DIM)


def write_bounds(pages: Tensor, entries: Tensor, bounds: Tensor, targets: Tensor, counts: Tensor | None) -> None:
    """As `page_bounds`, for at most float32."""
    _, num_kv_heads, _, page_size, head_dim = pages.shape
    if not len(entries):
        return
    _bounds_kernel[(len(entries), num_kv_heads)](
        pages, entries, bounds, targets, entries if counts is None else counts, *pages.stride()[:2], *bounds.stride()[:3],
        HAS_COUNTS=counts is not None, PAGE=page_size, PAGE_PAD=triton.next_power_of_2(page_size),
        DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), num_warps=2,
    )  # fmt: skip
