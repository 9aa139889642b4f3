"""Keys and values of new tokens cast to e4m3 and stored in their pages on a GPU, one launch; the twin is `store_fp8`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.overlap import follow, overlapping
from agentkv.kernels.quantize_blocks_triton import fp8_codes
from agentkv.kernels.quantized_pages import QuantizedPages


@triton.jit
def _store_kernel(
    pages_ptr, scales_ptr, entries_ptr, offsets_ptr, k_ptr, v_ptr, page_stride, scale_stride, k_token, k_head, v_token, v_head,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One KV head of one token."""
    follow(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    live = (dim < DIM)[None, :]
    side = tl.arange(0, 2)[:, None]
    k = tl.load(k_ptr + token * k_token + head * k_head + dim[None, :], mask=live & (side == 0), other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim[None, :], mask=live & (side == 1), other=0.0).to(tl.float32)
    code, scale = fp8_codes(tl.where(side == 0, k, v), scales_ptr.dtype.element_ty)
    entry, slot = tl.load(entries_ptr + token), tl.load(offsets_ptr + token)
    place = (head * 2 + tl.arange(0, 2)) * PAGE + slot
    tl.store(pages_ptr + entry * page_stride + place[:, None] * DIM + dim[None, :], code, mask=live)
    tl.store(scales_ptr + entry * scale_stride + place, scale)


def serves(k: Tensor, v: Tensor) -> bool:
    """Can these be stored here? Half precision or float32, on a GPU, dims of a head side by side."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return all(each.is_cuda and each.dtype in known and each.stride(2) == 1 for each in (k, v))


def put_fp8(payload: QuantizedPages, entries: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """As `quantized_pages.store_fp8`, of tensors that are `serves`."""
    layout, scales = payload.layout, payload.slots().scales
    _store_kernel[(len(k), layout.num_kv_heads)](
        payload.pages, scales, entries, offsets, k, v, payload.pages.stride(0), scales.stride(0), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), PAGE=layout.page_size, DIM=layout.head_dim, DIM_PAD=triton.next_power_of_2(layout.head_dim),
        num_warps=1, **overlapping(k.device),
    )  # fmt: skip
