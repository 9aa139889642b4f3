"""Attention of a row whose keys and values come tile by tile, in plain torch: running maximum, sum and weighted values.

A tile that a row does not reach changes no bit of its result, so how far a loop over tiles runs does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TILE = 256
"""Slots of a tile, about."""


def row_spans(num_rows: int, num_tokens: int, counts: Sequence[int] | None) -> list[slice]:
    """Each row's query tokens. counts: tokens of each row, None for one each. Raises ValueError where they do not add up."""
    each = counts if counts is not None else (1,) * num_rows
    if len(each) != num_rows or sum(each) != num_tokens:
        raise ValueError(f"{num_tokens} query tokens, but the counts of {num_rows} rows are {tuple(each)}")
    ends = [sum(each[: index + 1]) for index in range(num_rows)]
    return [slice(end - count, end) for end, count in zip(ends, each, strict=True)]


def row_tiles(entries: Tensor, page_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(granules int64 `[pages of a tile]`, slots int64 `[their tokens]`) of a row; the last tile is filled up with granule 0.

    entries: int32 `[max_pages]`; what stands there past the row's end is never trusted.
    """
    step = max(1, TILE // page_size)
    for begin in range(0, len(entries), step):
        part = entries[begin : begin + step].to(torch.int64).clamp(min=0)
        part = torch.nn.functional.pad(part, (0, step - len(part)))
        yield part, torch.arange(begin * page_size, (begin + step) * page_size, device=entries.device)


def visible(slots: Tensor, length: Tensor, count: int, causal: bool, starts: Tensor | None, bias: Tensor | None) -> Tensor:
    """bool `[count, num_slots]`: which slots each of a row's query tokens sees.

    length: int32 0-d, slots held. causal: the row's last `count` slots are the tokens' own, each sees up to its own. starts:
    int32 `[count]`, first slot seen. bias: `[num_slots]`, -inf hides.
    """
    ends = length.expand(count)
    if causal:
        ends = ends - torch.arange(count - 1, -1, -1, device=slots.device)
    seen = slots < ends.unsqueeze(1)
    if starts is not None:
        seen = seen & (slots >= starts.unsqueeze(1))
    return seen if bias is None else seen & (bias > -torch.inf)


def tile_bias(bias: Tensor | None, row: int, slots: Tensor) -> Tensor | None:
    """`[num_slots]` of a row's bias at the slots of a tile, -inf past its end. bias: `[num_rows, max_len]`."""
    if bias is None:
        return None
    inside = slots < bias.shape[1]
    return bias[row].index_select(0, slots.clamp(max=bias.shape[1] - 1)).masked_fill(~inside, -torch.inf)


class RunningSoftmax:
    """One row's state. q: `[count, num_heads, width]` in float32 or float64, scaled already."""

    def __init__(self, q: Tensor, num_kv_heads: int, value_dim: int) -> None:
        count, num_heads, _ = q.shape
        self.count, self.group = count, num_heads // num_kv_heads
        self.q = torch.unflatten(q, 1, (num_kv_heads, self.group)).permute(1, 0, 2, 3).flatten(1, 2)
        self.top = self.q.new_full((num_kv_heads, count * self.group, 1), -torch.inf)
        self.sums = torch.zeros_like(self.top)
        self.out = self.q.new_zeros(num_kv_heads, count * self.group, value_dim)

    def add(self, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None) -> None:
        """A tile. k, v: `[num_kv_heads, num_slots, width]`; slots that no token sees may hold anything, NaN too.

        seen: bool `[count, num_slots]`. bias: `[num_slots]`, added to the scores.
        """
        scores = self.q @ k.transpose(1, 2)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~seen.repeat_interleave(self.group, 0), -torch.inf)
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        base = top.masked_fill(top == -torch.inf, 0)  # nothing seen yet: all weights are 0
        weights, shrink = torch.exp(scores - base), torch.exp(self.top - base)
        self.out = self.out * shrink + weights @ v.masked_fill(~seen.any(0).unsqueeze(-1), 0)
        self.sums = self.sums * shrink + weights.sum(-1, keepdim=True)
        self.top = top

    def result(self) -> tuple[Tensor, Tensor]:
        """out `[count, num_heads, value_dim]` and natural lse `[count, num_heads]`; 0 and -inf where nothing was seen."""
        out = self.out / self.sums.masked_fill(self.sums == 0, 1)
        lse = (self.top + self.sums.log()).squeeze(-1)
        shape = (self.count, self.group)
        out = torch.unflatten(out, 1, shape).permute(1, 0, 2, 3).flatten(1, 2)
        return out, torch.unflatten(lse, 1, shape).transpose(0, 1).flatten(1)
