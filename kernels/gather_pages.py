"""Copy a row's keys and values out of their pages, one after another: what library kernels read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["entries_ptr", "length"])
def _gather_kernel(
    pages_ptr, entries_ptr, k_ptr, v_ptr, length, page_stride, head_stride, plane,
    PAGE: tl.constexpr, PAGE_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """One page of one KV head. plane: elements of one head of the result."""
    page, head = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, PAGE_PAD)
    dim = tl.arange(0, DIM_PAD)
    slot = page * PAGE + token
    live = ((token < PAGE) & (slot < length))[:, None] & (dim[None, :] < DIM)
    start = tl.load(entries_ptr + page).to(tl.int64) * page_stride + head * head_stride
    source = pages_ptr + start + token[:, None] * DIM + dim[None, :]
    target = head.to(tl.int64) * plane + slot[:, None] * DIM + dim[None, :]
    tl.store(k_ptr + target, tl.load(source, mask=live), mask=live)
    tl.store(v_ptr + target, tl.load(source + PAGE * DIM, mask=live), mask=live)


def gather_pages(pages: Tensor, entries: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V `[num_kv_heads, length, head_dim]`, contiguous, of a row's first `length` slots.

    pages: one layer's view `[num_granules, num_kv_heads, 2, page_size, head_dim]`. entries: int32 `[max_pages]`, the row's line
    of the page table.
    """
    num_kv_heads, _, page_size, head_dim = pages.shape[1:]
    k, v = torch.empty(2, num_kv_heads, length, head_dim, dtype=pages.dtype, device=pages.device).unbind(0)
    _gather_kernel[(triton.cdiv(length, page_size), num_kv_heads)](
        pages, entries, k, v, length, pages.stride(0), pages.stride(1), length * head_dim,
        PAGE=page_size, PAGE_PAD=triton.next_power_of_2(page_size), DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
        num_warps=2,
    )  # fmt: skip
    return k, v
