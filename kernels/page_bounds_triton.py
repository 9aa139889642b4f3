"""Bounds of the keys of pages on a GPU. The twin is `page_bounds`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["layer_stride"])
def _bounds_kernel(
    pages_ptr, entries_ptr, bounds_ptr, targets_ptr, counts_ptr, page_stride, head_stride, layer_stride,
    bounds_stride, bounds_head_stride, bounds_side_stride, bounds_layer_stride,
    HEADS: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PAGE: tl.constexpr, PAGE_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """One page of one KV head of one layer; the heads of a page one after another."""
    head, page, layer = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    slot, dim = tl.arange(0, PAGE_PAD), tl.arange(0, DIM_PAD)
    held = tl.load(counts_ptr + page) if HAS_COUNTS else PAGE
    live = (slot[:, None] < held) & (dim[None, :] < DIM)
    place = tl.load(entries_ptr + page) * page_stride + head * head_stride + layer * layer_stride
    keys = pages_ptr + place + slot[:, None] * DIM + dim[None, :]
    low = tl.min(tl.load(keys, mask=live, other=float("inf")).to(tl.float32), 0)
    high = tl.max(tl.load(keys, mask=live, other=float("-inf")).to(tl.float32), 0)
    out = tl.load(targets_ptr + page) * bounds_stride + head * bounds_head_stride + layer * bounds_layer_stride + dim
    tl.store(bounds_ptr + out, low, mask=dim < DIM)
    tl.store(bounds_ptr + out + bounds_side_stride, high, mask=dim < DIM)


def write_bounds(pages: Tensor, entries: Tensor, bounds: Tensor, targets: Tensor, counts: Tensor | None) -> None:
    """As `page_bounds`, for at most float32."""
    _launch(pages, entries, bounds, targets, counts, 1, 0, 0)


def write_layer_bounds(pages: Tensor, num_layers: int, step: int, entries: Tensor, bounds: Tensor, targets: Tensor) -> None:
    """As `layer_bounds`. pages: of the first layer; step: elements to the next."""
    _launch(pages, entries, bounds[:, 0], targets, None, num_layers, step, bounds.stride(1))


def _launch(
    pages: Tensor, entries: Tensor, bounds: Tensor, targets: Tensor, counts: Tensor | None, num_layers: int, *steps: Any
) -> None:
    """steps: elements from layer to layer, of pages and of bounds."""
    _, num_kv_heads, _, page_size, head_dim = pages.shape
    if not len(entries):
        return
    _bounds_kernel[(len(entries) * num_kv_heads, num_layers)](
        pages, entries, bounds, targets, entries if counts is None else counts, *pages.stride()[:2], steps[0],
        *bounds.stride()[:3], steps[1], HEADS=num_kv_heads,
        HAS_COUNTS=counts is not None, PAGE=page_size, PAGE_PAD=triton.next_power_of_2(page_size),
        DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), num_warps=2,
    )  # fmt: skip
