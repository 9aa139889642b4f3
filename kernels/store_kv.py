"""Write the keys and values of new tokens into their pages.

`pages` everywhere in this folder is one layer of the paged arena, `[num_granules, num_kv_heads, 2, page_size, head_dim]`:
row g is the layer page that starts at granule g (rows overlap in memory, a table entry picks the real ones).
"""

from __future__ import annotations

from torch import Tensor


def store_kv(pages: Tensor, entries: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Store `k` and `v` `[num_tokens, num_kv_heads, head_dim]`.

    entries: int64 `[num_tokens]`, granule of each token's page. offsets: int64 `[num_tokens]`, slot inside it. No two
    tokens may share a slot.
    """
    pages[entries, :, 0, offsets] = k
    pages[entries, :, 1, offsets] = v
