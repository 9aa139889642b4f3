"""How well the tokens that one layer looks at most cover what later layers look at, and which layers cover best."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil

import torch
from torch import Tensor

QUERIES = 64
"""Tokens of a text's second half whose attention is looked at."""


def coverage(traces: Sequence[tuple[Tensor, Tensor]], scale: float, share: float) -> list[list[float]]:
    """`cover[layer][later]`: the share of a later layer's attention that falls on the tokens which `layer` scores highest (by
    the most that a head gives): of the head with the least, since few heads look things up and a mean would not hear them; mean
    over QUERIES tokens of the second half. A layer sees `share` of the tokens.

    traces: q `[num_tokens, num_heads, head_dim]` and k `[num_tokens, num_kv_heads, head_dim]` of each layer."""
    length = len(traces[0][0])
    at = torch.linspace(length // 2, length - 1, min(QUERIES, length - length // 2)).long()
    ends = at.to(traces[0][0].device)
    given = torch.stack([_attention(q[ends], k, ends, scale) for q, k in traces])
    cover = []
    for layer in range(len(traces)):
        received = given[layer].amax(0)
        covered = torch.zeros(len(traces), dtype=torch.float64)
        for index, end in enumerate(at.tolist()):
            best = received[index].topk(ceil(share * (end + 1))).indices
            covered += given[:, :, index, best].sum(2).amin(1).double().cpu()
        cover.append((covered / len(at)).tolist())
    return cover


def _attention(q: Tensor, k: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Probabilities `[num_heads, num_queries, num_tokens]` of queries at the positions `ends`, float32 or wider."""
    q, k = (each.double() if each.dtype == torch.float64 else each.float() for each in (q, k))
    scores = torch.einsum("qhd,nhd->hqn", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    later = torch.arange(len(k), device=k.device) > ends.unsqueeze(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), 2)


def mean_coverage(cover: Sequence[Sequence[float]], observers: Sequence[int]) -> float:
    """Mean coverage of the layers behind the first observer that are none; 1 where there are none."""
    shares = [
        cover[max(each for each in observers if each < layer)][layer]
        for layer in range(observers[0] + 1, len(cover))
        if layer not in observers
    ]
    return sum(shares) / len(shares) if shares else 1.0


def choose_observers(cover: Sequence[Sequence[float]], full: int) -> tuple[tuple[int, ...], float]:
    """The observers of the greatest mean coverage, and that, where `full` layers read everything: the observers and all layers
    before the first. Of equals the earlier."""
    num_layers = len(cover)

    @cache
    def behind(observer: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The best sum of coverage of the layers behind an observer, with so many more observers, and these."""
        if not left:
            return sum(cover[observer][observer + 1 :]), ()
        found = []
        for after in range(observer + 1, num_layers - left + 1):
            total, others = behind(after, left - 1)
            found.append((sum(cover[observer][observer + 1 : after]) + total, (after, *others)))
        return max(found, key=lambda pair: pair[0])

    starts = []
    for first in range(full):
        if first + full - first - 1 < num_layers:
            total, others = behind(first, full - first - 1)
            starts.append((total, (first, *others)))
    total, observers = max(starts, key=lambda pair: pair[0])
    return observers, total / (num_layers - full)
