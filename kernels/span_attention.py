"""Attention of many queries of one row over keys that all of them see: a part that lies wholly before them."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kernels.dense_attention import dense_attention


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every query over the keys that its KV head holds, without causality.

    q: `[num_tokens, num_heads, head_dim]`. k, v: `[num_kv_heads, length, head_dim]`, finite everywhere. lens: int32
    `[num_kv_heads]` on the device, keys that a head holds. bias: float32 `[1 or num_kv_heads, >= length]`, added to the scaled
    scores, -inf hides a key.

    Returns out like q and natural lse `[num_tokens, num_heads]`, float32 (float64 for it); 0 and -inf where a head sees
    nothing.
    """
    num_kv_heads, length, _ = k.shape
    if not length:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    hidden = torch.arange(length, device=q.device) >= lens.unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device) if bias is None else bias[:, :length].to(q.dtype)
    mask = mask.masked_fill(hidden, -torch.inf).repeat_interleave(q.shape[1] // num_kv_heads, 0)
    queries = q.transpose(0, 1).unsqueeze(0)
    out, lse = dense_attention(queries, k.unsqueeze(0), v.unsqueeze(0), scale, mask=mask[None, :, None])
    blind = (mask == -torch.inf).all(1)
    return (
        out.squeeze(0).transpose(0, 1).masked_fill(blind[None, :, None], 0),
        lse.squeeze(0).transpose(0, 1).masked_fill(blind, -torch.inf),
    )
