"""Plain torch twins of the kernels: slow, obvious, and the oracle of their tests.

Nothing here shares a function with the kernels it checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def read_row(pages: Tensor, entries: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """K and V `[length, num_kv_heads, head_dim]` of a row, token by token."""
    page_size = pages.shape[3]
    keys = [pages[entries[slot // page_size], :, 0, slot % page_size] for slot in range(length)]
    values = [pages[entries[slot // page_size], :, 1, slot % page_size] for slot in range(length)]
    return torch.stack(keys), torch.stack(values)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of a row, in float64.

    q: `[num_tokens, num_heads, head_dim]`, the last num_tokens of k's length. k, v: `[length, num_kv_heads, head_dim]`.
    Returns out like q (float64) and lse `[num_tokens, num_heads]`.
    """
    num_tokens, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros(num_tokens, num_heads, dtype=torch.float64)
    for token in range(num_tokens):
        visible = length - num_tokens + token + 1
        for head in range(num_heads):
            keys = k[:visible, head // group].double()
            scores = keys @ q[token, head].double() * scale
            top = scores.max()
            weights = torch.exp(scores - top)
            lse[token, head] = top + math.log(float(weights.sum()))
            out[token, head] = (weights / weights.sum()) @ v[:visible, head // group].double()
    return out, lse


def move_units(arena: Tensor, unit_bytes: int, granule: int, source: Sequence[int], target: Sequence[int]) -> None:
    """Copy units of plain bytes, one after another. arena: uint8; source, target: granules."""
    for old, new in zip(source, target, strict=True):
        unit = arena[old * granule : old * granule + unit_bytes].clone()
        arena[new * granule : new * granule + unit_bytes] = unit


def observe(
    q: Tensor, k: Tensor, scale: float, window: int, kernel: int, pool: str, reduce: str, reduce_first: bool
) -> list[list[float]]:
    """What the last `window` queries make of each key before them, by KV head, in float64: see `observed_scores`.

    q: `[n, num_heads, head_dim]`, k: `[n, num_kv_heads, head_dim]`, of the same tokens. [] for each head if none is before.
    """
    length, num_kv_heads, _ = k.shape
    older, group = max(0, length - window), q.shape[1] // num_kv_heads

    def pooled(scores: list[float]) -> list[float]:
        near = [scores[max(0, at - kernel // 2) : at + kernel // 2 + 1] for at in range(older)]
        return [max(each) if pool == "max" else math.fsum(each) / kernel for each in near]

    def joined(heads: list[list[float]]) -> list[float]:
        return [max(each) if reduce == "max" else math.fsum(each) / group for each in zip(*heads, strict=True)]

    found = []
    for kv_head in range(num_kv_heads):
        heads = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            sums = torch.zeros(length, dtype=torch.float64)
            for token in range(older, length):
                sums[: token + 1] += torch.softmax(k[: token + 1, kv_head].double() @ q[token, head].double() * scale, 0)
            heads.append(sums[:older].tolist())
        found.append(pooled(joined(heads)) if reduce_first else joined([pooled(each) for each in heads]))
    return found


def probabilities(q: Tensor, k: Tensor, scale: float, ends: Sequence[int]) -> Tensor:
    """What each query gives to each key, in float64 `[num_heads, num_queries, n]`; query i sees the first ends[i] keys.

    q: `[num_queries, num_heads, head_dim]`, k: `[n, num_kv_heads, head_dim]`.
    """
    group = q.shape[1] // k.shape[1]
    given = torch.zeros(q.shape[1], q.shape[0], k.shape[0], dtype=torch.float64)
    for head in range(q.shape[1]):
        for i, end in enumerate(ends):
            given[head, i, :end] = torch.softmax(k[:end, head // group].double() @ q[i, head].double() * scale, 0)
    return given
