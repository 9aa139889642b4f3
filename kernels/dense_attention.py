"""Attention over contiguous keys and values with its log-sum-exp, by whichever library kernel of the device gives both."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 256  # queries of one product where no library kernel serves
_ALIGNED = 16  # elements that a row of a mask must be a multiple of on a GPU


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every query over every key, or under one of two masks.

    q: `[1, num_heads, num_tokens, head_dim]`. k, v: `[1, num_kv_heads, length, head_dim]`. causal: length is num_tokens, and a
    query sees the keys up to its own. mask: added to the scaled scores in q's dtype, float `[1, 1 or num_heads, 1 or
    num_tokens, length]`, -inf hides a key. Returns out like q and natural lse `[1, num_heads, num_tokens]`, float32 (float64
    for it). What a query gets that sees nothing is not defined.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=None if mask is None else mask.to(q.dtype), scale=scale
        )
        return out, lse
    if q.dtype == torch.float64:
        return plain_attention(q, k, v, scale, causal=causal, mask=mask)
    if mask is None and q.dtype != torch.float32:  # the half precision kernel shares KV heads
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scale)[:2]
        return out, lse
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if mask is not None:
        length = k.shape[2]
        padded = functional.pad(mask.to(q.dtype), (0, -length % _ALIGNED))
        mask = padded[..., :length].expand(1, q.shape[1], q.shape[2], length)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, is_causal=causal, scale=scale)[:2]
    return out, lse[..., : q.shape[2]]  # it comes padded


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What `dense_attention` returns, by products of blocks of queries, on any device."""
    group, count, length = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs, lses = [], []
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        scores = torch.matmul(q[:, :, begin:end], k.transpose(2, 3)) * scale
        if mask is not None:
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, begin:end]).to(scores.dtype)
        if causal:
            hidden = torch.ones(end - begin, length, dtype=torch.bool, device=q.device).triu(begin + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        outs.append(torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), v))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
