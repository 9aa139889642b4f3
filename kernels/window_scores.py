"""Attention that the last queries of a row give to each of its keys (arXiv 2404.14469), and pooling of such scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def window_scores(
    q: Tensor, k: Tensor, scale: float, *, lens: Tensor | None = None, reduce: Literal["none", "sum"] = "none"
) -> Tensor:
    """Softmax over all keys that each of the last queries sees: those before the window, and inside it those up to its own.

    q: `[window, num_heads, head_dim]`, the queries of the last `window` keys. k: `[num_kv_heads, n, head_dim]`, last dim
    contiguous. lens: int32 `[num_kv_heads]` on q's device, keys that each head holds (its window ends there), None for n.
    Returns probabilities `[num_heads, window, n]`, or their sum over the window `[num_heads, n]`, which on a GPU is made
    without the large tensor. float32 (float64 for float64). Keys past a head's length get 0; so does a query that has
    none. Raises ValueError where the window is longer than the keys.
    """
    window, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = k.shape
    if window > length:
        raise ValueError(f"a window of {window} queries over {length} keys")
    ends = window_ends(window, num_kv_heads, length, lens, q.device)
    if reduce == "sum" and q.is_cuda and q.dtype != torch.float64:
        from agentkv.kernels.attention_columns import attention_lse, reduce_columns

        lse = attention_lse(q, k, ends, scale)
        return reduce_columns(q, k, lse, ends, scale, by_head=True)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = (q.to(wide) * scale).view(window, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    products = torch.bmm(grouped.reshape(num_kv_heads, -1, head_dim), k.to(wide).transpose(1, 2))
    scores = products.view(num_kv_heads, -1, window, length)
    hidden = torch.arange(length, device=q.device) >= ends.unsqueeze(-1)
    scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    given = torch.softmax(scores, -1).masked_fill_(hidden.unsqueeze(1), 0).view(num_heads, window, length)
    return given.sum(1) if reduce == "sum" else given


def window_ends(window: int, num_kv_heads: int, length: int, lens: Tensor | None, device: torch.device) -> Tensor:
    """int32 `[num_kv_heads, window]`: how many keys of a head each of its last queries sees. lens as in `window_scores`."""
    behind = torch.arange(1 - window, 1, dtype=torch.int32, device=device)
    if lens is None:
        return (behind + length).expand(num_kv_heads, window)
    return (lens.unsqueeze(1) + behind).clamp(min=0)


def pool_scores(scores: Tensor, kernel: int, kind: Literal["avg", "max"] = "avg") -> Tensor:
    """Each score `[..., n]` replaced by the mean or maximum of the `kernel` scores around it.

    The mean counts what lies outside as zeros (it always divides by `kernel`), the maximum leaves it out. Raises ValueError
    where `kernel` is not odd and positive.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"a pool of {kernel} scores has no middle: give an odd number of at least 1")
    if kernel == 1 or scores.numel() == 0:
        return scores
    rows = scores.reshape(-1, 1, scores.shape[-1])
    pool = functional.avg_pool1d if kind == "avg" else functional.max_pool1d
    return pool(rows, kernel, stride=1, padding=kernel // 2).view(scores.shape)
