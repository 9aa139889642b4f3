"""Whole pages of keys and values quantised and stored on a GPU, one launch; the twin is `store_pages`, bit for bit."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels import quantize_blocks_triton as blocks
from agentkv.kernels.quantize_blocks import Against
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages


@triton.jit(do_not_specialize=["entries_ptr"])
def _page_kernel(
    pages_ptr, params_ptr, entries_ptr, k_ptr, v_ptr, page_stride, param_stride, k_page, k_head, k_token, v_page, v_head,
    v_token,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr, MOST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One group of keys, and the values of its tokens, of one KV head of one page."""
    page, head, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, dim = group * KEY_GROUP + tl.arange(0, KEY_GROUP), tl.arange(0, DIM)
    k = tl.load(k_ptr + page * k_page + head * k_head + slot[:, None] * k_token + dim[None, :]).to(tl.float32)
    v = tl.load(v_ptr + page * v_page + head * v_head + slot[:, None] * v_token + dim[None, :]).to(tl.float32)
    packed_k, k_scale, k_zero = blocks.by_channel(k, params_ptr.dtype.element_ty, BITS, MOST, EXACT)
    packed_v, v_scale, v_zero = blocks.by_token(v, params_ptr.dtype.element_ty, VALUE_GROUP, BITS, MOST, EXACT)
    WIDTH: tl.constexpr = DIM * BITS // 8
    GROUPS: tl.constexpr = DIM // VALUE_GROUP
    PAIRS: tl.constexpr = PAGE // KEY_GROUP * DIM
    entry = tl.load(entries_ptr + page)
    codes = pages_ptr + entry * page_stride + head * 2 * PAGE * WIDTH + slot[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(codes, packed_k)
    tl.store(codes + PAGE * WIDTH, packed_v)
    pairs = params_ptr + entry * param_stride + 2 * head * (PAIRS + PAGE * GROUPS)
    of_keys = pairs + 2 * (group * DIM + dim)
    tl.store(of_keys, k_scale)
    tl.store(of_keys + 1, k_zero)
    of_values = pairs + 2 * (PAIRS + tl.arange(0, GROUPS)[None, :] * PAGE + slot[:, None])
    tl.store(of_values, v_scale)
    tl.store(of_values + 1, v_zero)


def serves(layout: PageLayout, k: Tensor, v: Tensor) -> bool:
    """Can these be stored here? Sizes that are powers of two; half precision or float32, dims of a head side by side."""
    sizes = (layout.head_dim, layout.key_group, layout.value_group)
    known = (torch.float32, torch.bfloat16, torch.float16)
    return all(size & (size - 1) == 0 for size in sizes) and all(x.dtype in known and x.stride(3) == 1 for x in (k, v))


def put_pages(payload: QuantizedPages, entries: Tensor, k: Tensor, v: Tensor, against: Against = "stored") -> None:
    """As `quantized_pages.store_pages`, of tensors that are `serves`."""
    layout = payload.layout
    params = payload.pages[:, : layout.page_bytes].view(layout.dtype)[:, layout.params_start // layout.dtype.itemsize :]
    _page_kernel[(len(k), layout.num_kv_heads, layout.page_size // layout.key_group)](
        payload.pages, params, entries, k, v, payload.pages.stride(0), params.stride(0), *k.stride()[:3], *v.stride()[:3],
        HEADS=layout.num_kv_heads, PAGE=layout.page_size, DIM=layout.head_dim, BITS=layout.bits, KEY_GROUP=layout.key_group,
        VALUE_GROUP=layout.value_group, MOST=torch.finfo(layout.dtype).max, EXACT=against == "exact",
    )  # fmt: skip
