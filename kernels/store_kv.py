"""Write the keys and values of new tokens into their pages.

`pages` everywhere in this folder is one layer of the paged arena, `[num_granules, num_kv_heads, 2, page_size, head_dim]`:
row g is the layer page that starts at granule g (rows overlap in memory, a table entry picks the real ones).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from agentkv.kernels.native import compiled


class Places(NamedTuple):
    """Where new tokens' keys and values go: the arguments of `store_kv` of these names."""

    pages: Tensor
    entries: Tensor
    offsets: Tensor


def store_kv(pages: Tensor, entries: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Store `k` and `v` `[num_tokens, num_kv_heads, head_dim]`.

    entries: int64 `[num_tokens]`, granule of each token's page. offsets: int64 `[num_tokens]`, slot inside it. No two
    tokens may share a slot.
    """
    num_tokens, num_kv_heads, dim = k.shape
    page_size = pages.shape[3]
    dense = k.stride()[1:] == v.stride()[1:] == (dim, 1) and pages.stride()[1:] == (
        2 * page_size * dim,
        page_size * dim,
        dim,
        1,
    )
    put = compiled("put", pages, k, v) if dense and entries.is_contiguous() and offsets.is_contiguous() else None
    if put is not None:
        places = pages.data_ptr(), entries.data_ptr(), offsets.data_ptr()
        tokens = k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), num_tokens
        put(*places, *tokens, num_kv_heads, page_size, dim, pages.stride(0))
        return
    if dense and k.is_cuda:
        from agentkv.kernels import token_ops_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(pages, k, v) and k.dtype == v.dtype == pages.dtype:
            fused.put(pages, entries, offsets, k, v)
            return
    pages[entries, :, 0, offsets] = k
    pages[entries, :, 1, offsets] = v
