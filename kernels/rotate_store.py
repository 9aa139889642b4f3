"""Rotary embedding of queries and keys, and the new tokens' keys and values into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kernels.rotate import rotate
from agentkv.kernels.store_kv import Places, store_kv


def rotate_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    into: Places,
) -> Tensor:
    """The queries of qkv, turned, `[num_tokens, num_heads, head_dim]`; its keys, turned, and its values are stored.

    qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, queries first. cos, sin, weight (of queries and keys), eps: as
    in `rotate`. Just what `rotate` and `store_kv` do, on a GPU in one launch.
    """
    _, num_kv_heads, _, page_size, dim = into.pages.shape
    dense = qkv.stride()[1:] == (dim, 1) and into.pages.stride()[1:] == (2 * page_size * dim, page_size * dim, dim, 1)
    if qkv.is_cuda and dense and cos.is_contiguous() and sin.is_contiguous():
        from agentkv.kernels import token_ops_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(qkv, cos, sin, *(() if weight is None else (weight,))) and into.pages.dtype == qkv.dtype:
            return fused.turn_and_put(qkv, num_heads, cos, sin, weight, eps, into)
    qk, v = qkv.tensor_split((num_heads + num_kv_heads,), dim=1)
    q, k = torch.tensor_split(rotate(qk, cos, sin, weight, eps), (num_heads,), dim=1)
    store_kv(*into, k, v)
    return q
