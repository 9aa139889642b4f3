"""Scores and kept sets of eviction rules by brute force in float64, from plain tensors.

Queries are [num_tokens, num_heads, head_dim], keys [num_tokens, num_kv_heads, head_dim], both after RoPE; query head h reads KV
head h // group. The rules are those of kvpress 0.5.5, which departs from the papers where a docstring says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """What a rule keeps, and how clearly: both of the shape of its scores, over all positions.

    kept: bool. margin: distance (float64) of a position's score from the cut that decided on it; inf where no score did.
    """

    kept: Tensor
    margin: Tensor


@dataclass(frozen=True)
class Agreement:
    """How far two kept sets are the same.

    positions: of all heads. clear: those with a margin over the tolerance. clear_same: of them, the same in both. differing:
    positions kept in one only. widest: the largest margin of a differing position, 0 without any.
    """

    positions: int
    clear: int
    clear_same: int
    differing: int
    widest: float


def agreement(choice: Choice, kept: Tensor, tolerance: float) -> Agreement:
    """Compare a recomputed choice with kept sets (bool, same shape) made elsewhere from scores known up to `tolerance`."""
    assert choice.kept.shape == kept.shape
    differ, clear = choice.kept != kept, choice.margin > tolerance
    widest = choice.margin[differ].max().item() if differ.any() else 0.0
    return Agreement(kept.numel(), int(clear.sum()), int((clear & ~differ).sum()), int(differ.sum()), widest)


def probabilities(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Softmax of q k / sqrt(head_dim) over visible keys (bool [num_queries, num_keys]): [num_heads, num_queries, num_keys]."""
    q, k = q.double(), k.double()
    group = q.shape[1] // k.shape[1]
    rows = []
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
        logits[~visible] = -math.inf
        weights = (logits - logits.max(dim=1, keepdim=True).values).exp()
        rows.append(weights / weights.sum(dim=1, keepdim=True))
    return torch.stack(rows)


def window_scores(q: Tensor, k: Tensor, window: int, kernel: int) -> Tensor:
    """Attention of the last `window` queries on the keys before them (arXiv:2404.14469): [num_kv_heads, num_tokens - window].

    Mean over the queries (the paper's sum, up to a factor), average over `kernel` neighbours with zeros beyond the edges, mean
    over the query heads of a KV head (the paper's code stores query heads). Softmax is over all keys, the window's included.
    """
    n = len(k)
    places = torch.arange(n)
    raw = probabilities(q[-window:], k, places[None, :] <= places[-window:, None])[:, :, : n - window].mean(dim=1)
    pooled = torch.zeros_like(raw)
    for at in range(n - window):
        pooled[:, at] = raw[:, max(0, at - kernel // 2) : at + kernel // 2 + 1].sum(dim=1) / kernel
    return pooled.view(k.shape[1], -1, n - window).mean(dim=1)


def _best(scores: Tensor, count: int) -> tuple[Tensor, float]:
    """The `count` highest of a flat tensor (bool; of equals the lower index), and the midpoint of the scores at the cut."""
    values = scores.tolist()
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    kept = torch.zeros(len(values), dtype=torch.bool)
    kept[order[:count]] = True
    if count in (0, len(order)):
        return kept, math.inf if count == 0 else -math.inf
    return kept, (values[order[count - 1]] + values[order[count]]) / 2


def _with_window(kept: Tensor, margin: Tensor, window: int) -> Choice:
    heads = len(kept)
    return Choice(
        torch.cat([kept, torch.ones(heads, window, dtype=torch.bool)], 1),
        torch.cat([margin, torch.full((heads, window), math.inf, dtype=torch.float64)], 1),
    )


def keep_per_head(scores: Tensor, window: int, capacity: int) -> Choice:
    """In each KV head the best of scores [num_kv_heads, num_tokens - window] and the window, `capacity` in all."""
    found = [_best(head, capacity - window) for head in scores]
    margin = torch.stack([(head - cut).abs() for head, (_, cut) in zip(scores, found, strict=True)])
    return _with_window(torch.stack([kept for kept, _ in found]), margin, window)


def keep_across_heads(scores: Tensor, window: int, capacity: int, floor: float) -> Choice:
    """Heads of a layer compete for num_kv_heads * capacity tokens; int(capacity * floor) of each one's best are sure, or 1.

    Scores [num_kv_heads, num_tokens - window]. arXiv:2407.11550 in kvpress's form: the window counts towards the sure ones, and
    the total is exact (the paper's code blends a head's budget with the even one, and rounds by head). floor 0: none is sure.
    """
    sure = max(1, int(capacity * floor)) if floor > 0 else 0
    found = [_best(head, max(0, sure - window)) for head in scores]
    kept = torch.stack([best for best, _ in found])
    rest = scores.masked_fill(kept, -math.inf).flatten()
    more, shared_cut = _best(rest, len(scores) * (capacity - window) - int(kept.sum()))
    margin = torch.stack([(head - min(cut, shared_cut)).abs() for head, (_, cut) in zip(scores, found, strict=True)])
    return _with_window(kept | more.view(scores.shape), margin, window)


def keep_first_and_last(num_tokens: int, first: int, capacity: int) -> Tensor:
    """The rule of arXiv:2309.17453 for every head: `first` tokens and the newest, `capacity` in all. Bool [num_tokens]."""
    return torch.tensor([at < first or at >= num_tokens - (capacity - first) for at in range(num_tokens)])


def replay_scores(q: Tensor, k: Tensor, start: int, end: int, sinks: int) -> Tensor:
    """The most attention that a replayed query pays to each of the tokens start..end (arXiv:2505.23416).

    q: of the replayed ids; k: of the prompt, then of the replayed ids. Softmax is over three groups of keys only: the first
    min(sinks, start) of the prompt, the chunk, and the replayed ids up to the query. The maximum is over the queries and the
    query heads of a KV head: [num_kv_heads, end - start].
    """
    first, replayed = min(sinks, start), len(q)
    keys = torch.cat([k[:first], k[start:end], k[-replayed:]])
    visible = torch.ones(replayed, len(keys), dtype=torch.bool)
    visible[:, -replayed:].tril_()
    weights = probabilities(q, keys, visible)[:, :, first : first + end - start]
    return weights.view(k.shape[1], -1, replayed, end - start).amax(dim=(1, 2))


def keep_across_model(scores: Tensor, sinks: int, capacity: int, layerwise: bool) -> Choice:
    """The best of all layers' and heads' tokens, `capacity` per head on average; or layer by layer, heads competing.

    Scores [num_layers, num_kv_heads, num_tokens]; the first `sinks` tokens stay. What was not replayed has score 0 and goes
    first (the paper keeps the whole system prompt).
    """
    raised = scores.double().clone()
    raised[..., :sinks] = scores.max() + 1
    pieces = [layer.flatten() for layer in raised] if layerwise else [raised.flatten()]
    share = raised.shape[1] * capacity * (1 if layerwise else len(raised))
    found = [_best(piece, share) for piece in pieces]
    margin = torch.stack([(piece - cut).abs() for piece, (_, cut) in zip(pieces, found, strict=True)])
    return Choice(torch.stack([kept for kept, _ in found]).view(raised.shape), margin.view(raised.shape))
