"""Attention of a few last tokens a row on the CPU, pages read in place (`attend` of native.cpp).

Any page size, any order of pages, any number of query heads a KV head. The twin is `decode_attention`.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from agentkv.kernels.native import Rows, compiled


def serves(q: Tensor, pages: Tensor) -> bool:
    """Can `paged_attention` be given these?"""
    _, _, _, page_size, head_dim = pages.shape
    dense = q.stride(2) == 1 and pages.stride()[1:] == (2 * page_size * head_dim, page_size * head_dim, head_dim, 1)
    return dense and compiled("attend", q, pages) is not None


def paged_attention(
    q: Tensor,
    pages: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    scale: float,
    counts: tuple[int, ...] | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each row's last tokens over all that the row holds up to each.

    q: `[num_tokens, num_heads, head_dim]`, row by row, float32 or bfloat16 like pages (`serves` says whether they can be
    given). table: entries int32 `[max_rows, max_pages]`, rows int64 `[num_rows]`, lens int32 `[num_rows]`, see RowTable.
    counts: tokens of each row, None for one each. starts: int32 `[num_tokens]`, first slot that each token sees; slots before
    a row's least start are never read. Sums are float32 in pieces of 512 slots, whatever the batch.

    Returns out like q and lse `[num_tokens, num_heads]` float32; a token that sees nothing gets 0 and -inf.
    """
    entries, rows, lens = table
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, _, page_size, _ = pages.shape
    firsts = torch.tensor((0, *accumulate(counts))) if counts else None
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32)
    given = Rows(
        entries.data_ptr(), lens.data_ptr(), _address(starts), rows.data_ptr(), _address(firsts), len(rows), entries.stride(0),
        q.stride(0), q.stride(1), num_kv_heads, num_heads // num_kv_heads, page_size, head_dim, pages.stride(0), scale,
    )  # fmt: skip
    attend = compiled("attend", q, pages)
    if attend is None or not serves(q, pages):
        raise ValueError(f"no compiled attention for {q.dtype} on {q.device} in this layout")
    attend(ctypes.byref(given), q.data_ptr(), pages.data_ptr(), out.data_ptr(), lse.data_ptr(), torch.get_num_threads())
    return out, lse


def _address(given: Tensor | None) -> int | None:
    return None if given is None else given.data_ptr()
