"""Attention of a prefill chunk of one row: gathered history and causal chunk."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from agentkv.kernels.merge_parts import merge_parts


def token_slots(entries: Tensor, length: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(entries, offsets) int64 `[length]` of a row's first `length` slots, from its table row `entries` (int32)."""
    slots = torch.arange(length, device=entries.device)
    num_pages = -(-length // page_size)
    return entries[:num_pages].to(torch.int64)[slots // page_size], slots % page_size


def gather_kv(pages: Tensor, slots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """K and V `[num_kv_heads, length, head_dim]`, contiguous, of the given slots."""
    entries, offsets = slots
    heads = torch.arange(pages.shape[1], device=pages.device).unsqueeze(1)
    return pages[entries, heads, 0, offsets], pages[entries, heads, 1, offsets]


def chunk_attention(q: Tensor, pages: Tensor, slots: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor | None]:
    """Causal attention of one row's chunk over everything the row holds (its own tokens are stored already).

    q: `[num_tokens, num_heads, head_dim]`, the last num_tokens of the row's `slots`. Returns out like q, and lse
    `[num_tokens, num_heads]` where the library gives it (CPU), else None.
    """
    k, v = gather_kv(pages, slots)
    queries = q.transpose(0, 1).unsqueeze(0)
    if q.device.type == "cpu":
        out, lse = _chunk_cpu(queries, k.unsqueeze(0), v.unsqueeze(0), scale)
        return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
    group = q.shape[1] // pages.shape[1]
    if q.dtype not in (torch.float16, torch.bfloat16):  # only the half precision kernels share KV heads
        k, v, group = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), 1
    bias = causal_lower_right(q.shape[0], k.shape[1])
    out = functional.scaled_dot_product_attention(
        queries, k.unsqueeze(0), v.unsqueeze(0), attn_mask=bias, scale=scale, enable_gqa=group > 1
    )
    return out.squeeze(0).transpose(0, 1), None


def _chunk_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """History without a mask, then the causal square, merged: twice as fast as one call with a mask.

    q: `[1, num_heads, num_tokens, head_dim]`; k, v: `[1, num_kv_heads, length, head_dim]`.
    Intervals of the row's keys: [0, history) all visible, [history, length) causal.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    history = k.shape[2] - q.shape[2]
    out, lse = flash(q, k[:, :, history:], v[:, :, history:], is_causal=True, scale=scale)
    if history == 0:
        return out, lse
    before, before_lse = flash(q, k[:, :, :history], v[:, :, :history], scale=scale)
    return merge_parts((before, out), (before_lse, lse))
