"""Attention of a prefill chunk of one row: gathered history and causal chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from agentkv.kernels.dense_attention import dense_attention
from agentkv.kernels.merge_parts import merge_parts

_BLOCK = 256  # queries of a windowed chunk that share one product


def token_slots(entries: Tensor, length: int, page_size: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """(entries, offsets) int64 `[length - start]` of a row's slots from `start` on, from its table row `entries` (int32)."""
    slots = torch.arange(start, length, device=entries.device)
    num_pages = -(-length // page_size)
    return entries[:num_pages].to(torch.int64)[slots // page_size], slots % page_size


def gather_kv(pages: Tensor, slots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """K and V `[num_kv_heads, length, head_dim]`, contiguous, of the given slots."""
    entries, offsets = slots
    heads = torch.arange(pages.shape[1], device=pages.device).unsqueeze(1)
    return pages[entries, heads, 0, offsets], pages[entries, heads, 1, offsets]


def chunk_attention(
    q: Tensor,
    pages: Tensor,
    slots: tuple[Tensor, Tensor],
    scale: float,
    starts: Sequence[int] | None = None,
    *,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of one row's chunk over the row's `slots` (its own tokens are stored already).

    q: `[num_tokens, num_heads, head_dim]`, the last num_tokens of the slots. starts: index in `slots` of the first one that
    each token sees, ascending; None where each sees all up to its own. Returns out like q, and natural lse `[num_tokens,
    num_heads]` where it is asked or costs nothing (CPU), else None.
    """
    return causal_attention(q, *gather_kv(pages, slots), scale, starts, lse=lse)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Sequence[int] | None = None, *, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same over K and V `[num_kv_heads, length, head_dim]`, of which the last num_tokens are the chunk's own."""
    queries, k, v = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    lse = lse or q.device.type == "cpu"
    if starts is not None and starts[-1] > 0:
        return _windowed(queries, k, v, scale, starts, lse)
    if lse:
        return _in_two(queries, k, v, scale)
    group = q.shape[1] // k.shape[1]
    if q.dtype not in (torch.float16, torch.bfloat16):  # only the half precision kernels share KV heads
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    bias = causal_lower_right(q.shape[0], k.shape[2])
    out = functional.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale, enable_gqa=group > 1)
    return out.squeeze(0).transpose(0, 1), None


def _in_two(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """History without a mask, then the causal square, merged: on a CPU twice as fast as one call with a mask.

    q: `[1, num_heads, num_tokens, head_dim]`; k, v: `[1, num_kv_heads, length, head_dim]`.
    Intervals of the row's keys: [0, history) all visible, [history, length) causal. Returns as `chunk_attention`.
    """
    history = k.shape[2] - q.shape[2]
    parts = [dense_attention(q, k[:, :, history:], v[:, :, history:], scale, causal=True)]
    if history:
        parts.insert(0, dense_attention(q, k[:, :, :history], v[:, :, :history], scale))
    outs, lses = ([each.squeeze(0).transpose(0, 1) for each in given] for given in zip(*parts, strict=True))
    return merge_parts(outs, lses)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Sequence[int], lse: bool) -> tuple[Tensor, Tensor | None]:
    """Blocks of queries, each over the keys between its first start and its last token, masked.

    q: `[1, num_heads, num_tokens, head_dim]`; k, v: `[1, num_kv_heads, length, head_dim]`. Returns as `chunk_attention`.
    """
    count, history = q.shape[2], k.shape[2] - q.shape[2]
    group = q.shape[1] // k.shape[1]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        low, high = starts[begin], history + end
        keys = torch.arange(low, high, device=q.device)
        first = torch.tensor(starts[begin:end], device=q.device).unsqueeze(1)
        last = torch.arange(history + begin, high, device=q.device).unsqueeze(1)
        hidden = (keys < first) | (keys > last)
        queries, seen, values = q[:, :, begin:end], k[:, :, low:high], v[:, :, low:high]
        if lse:
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)[None, None]
            out, sums = dense_attention(queries, seen, values, scale, mask=mask)
            lses.append(sums)
        else:
            seen, values = seen.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            out = functional.scaled_dot_product_attention(queries, seen, values, attn_mask=~hidden, scale=scale)
        outs.append(out)
    merged = torch.cat(outs, 2).squeeze(0).transpose(0, 1)
    return merged, torch.cat(lses, 2).squeeze(0).transpose(0, 1) if lse else None
