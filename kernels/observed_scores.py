"""What the last queries of a prompt make of the keys before them, by KV head (arXiv 2404.14469, 2407.11550)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentkv.kernels.top_positions import top_positions
from agentkv.kernels.window_scores import pool_scores, window_scores


class Observed(NamedTuple):
    """scores: float32 (float64 of float64) `[num_kv_heads, n]`, of the first `lens` int32 `[num_kv_heads]` columns of each
    head, -inf behind. order: int64 `[num_kv_heads, n]`, the key that each column is of, ascending in the first `lens`."""

    scores: Tensor
    lens: Tensor
    order: Tensor

    def split(self, num_lines: int) -> list[Observed]:
        """So many heads each."""
        return [Observed(*parts) for parts in zip(*(torch.split(each, num_lines) for each in self), strict=True)]

    def best(self, most: int, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The keys with the best scores, ties by the lower: indexes int64 `[num_kv_heads, most]`, ascending in the first
        int32 `[num_kv_heads]`, which are `counts` or as many as there are."""
        length = self.order.shape[1]
        columns = top_positions(self.scores, min(most, length), counts=counts, lens=self.lens)
        return self.order.gather(1, columns.clamp(max=length - 1).to(torch.int64)), torch.minimum(counts, self.lens)


def observed_scores(
    q: Tensor,
    k: Tensor,
    held: Tensor | None,
    older: Tensor,
    scale: float,
    *,
    kernel: int,
    pool: Literal["avg", "max"],
    reduce: Literal["mean", "max"] = "mean",
    reduce_first: bool = False,
) -> Observed:
    """Attention that the queries give to each older key, pooled over its neighbours, over the query heads of a KV head.

    q: `[window, num_heads, head_dim]`, of the newest held keys. k: `[num_kv_heads, n, head_dim]`. held: bool
    `[num_kv_heads, n]`, the keys that there are, None for all; older: those of them that are scored, which come before the
    others. kernel: see `pool_scores`; nothing but older keys is pooled. reduce: over the query heads of a KV head.
    reduce_first: before the pool. Sums over the queries stand for means: they rank alike. Without a query all scores are 0.
    """
    num_kv_heads, length, _ = k.shape
    order, keys, ends = torch.arange(length, device=k.device).expand(num_kv_heads, -1), k, None
    if held is not None:
        order, ends = torch.sort((~held).to(torch.uint8), dim=1, stable=True).indices, held.sum(1, dtype=torch.int32)
        keys = k.gather(1, order.unsqueeze(-1).expand_as(k))
    lens = older.sum(1, dtype=torch.int32)
    given = torch.zeros(q.shape[1], length, device=k.device)
    if len(q):
        given = window_scores(q[-length:], keys, scale, lens=ends, reduce="sum")
    outside = torch.arange(length, device=k.device) >= lens.unsqueeze(1)
    given = given.view(num_kv_heads, -1, length)
    return Observed(_ranked(given, outside, kernel, pool, reduce, reduce_first), lens, order)


def observed_columns(
    given: Tensor,
    older: int,
    *,
    kernel: int,
    pool: Literal["avg", "max"],
    reduce: Literal["mean", "max"] = "mean",
    reduce_first: bool = False,
) -> Observed:
    """The same from the attention that keys received, of heads of several layers at once: given float32 `[num_lines, group, n]`
    of the query heads of each line, of which the first `older` keys are scored and none is missing."""
    num_lines, _, length = given.shape
    outside = torch.arange(length, device=given.device).unsqueeze(0) >= older
    lens = torch.full((num_lines,), older, dtype=torch.int32, device=given.device)
    order = torch.arange(length, device=given.device).expand(num_lines, -1)
    return Observed(_ranked(given, outside, kernel, pool, reduce, reduce_first), lens, order)


def _ranked(given: Tensor, outside: Tensor, kernel: int, pool: Literal["avg", "max"], reduce: str, first: bool) -> Tensor:
    """Scores `[num_lines, n]` of what query heads gave `[num_lines, group, n]`, -inf outside."""
    scores = given.masked_fill(outside.unsqueeze(1), 0)
    if not first:
        scores = pool_scores(scores, kernel, pool)
    scores = scores.mean(1) if reduce == "mean" else scores.amax(1)
    if first:
        scores = pool_scores(scores, kernel, pool)
    return scores.masked_fill(outside, -torch.inf)
