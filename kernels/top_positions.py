"""The best positions of each row, ties by position, in ascending order: the same on every device and in every batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def top_positions(
    scores: Tensor,
    k: int,
    *,
    counts: Tensor | None = None,
    lens: Tensor | None = None,
    protect_first: int = 0,
    protect_last: int = 0,
    ties: Literal["lower", "higher"] = "lower",
) -> Tensor:
    """Positions of the k largest scores of each row of `scores` `[..., n]`, the protected ones among the k.

    counts: int32 `[...]`, a row's own k, at most k. lens: int32 `[...]`, scores that a row has, None for n; those behind are
    not looked at. protect_first, protect_last: so many positions at the start and at the end (of `lens`) are taken whatever
    their scores, also where counts is less; the others compete among themselves. ties: which position wins where scores are
    equal. NaN is lower than every number and equal to -inf.

    Returns int32 `[..., min(k, n)]`, ascending, n where a row has fewer. Raises ValueError where k is less than what is
    protected. Nothing waits for the device.
    """
    length = scores.shape[-1]
    if k < protect_first + protect_last or min(protect_first, protect_last) < 0:
        raise ValueError(f"{k} positions cannot hold {protect_first} protected at the start and {protect_last} at the end")
    width = min(k, length)
    if width == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int32, device=scores.device)
    if scores.is_cuda and scores.dtype != torch.float64:
        from agentkv.kernels.top_positions_triton import select_positions

        return select_positions(scores, width, counts, lens, protect_first, protect_last, ties == "higher")[0]
    place = torch.arange(length, dtype=torch.int32, device=scores.device)
    if lens is None:
        lens = torch.full(scores.shape[:-1], length, dtype=torch.int32, device=scores.device)
    ends = lens.unsqueeze(-1)
    held = place < ends
    protected = held & ((place < protect_first) | (place >= ends - protect_last))
    open_ = held & ~protected
    wanted = ends.clamp(max=width) if counts is None else torch.minimum(counts.unsqueeze(-1), ends).clamp(max=width)
    need = (wanted - protected.sum(-1, keepdim=True)).clamp(min=0)
    taken = protected | _largest(scores, open_, need, width, ties)
    target = torch.where(taken, taken.cumsum(-1) - 1, width)  # what is not taken goes to a place that is cut off
    out = torch.full((*scores.shape[:-1], width + 1), length, dtype=torch.int32, device=scores.device)
    return out.scatter_(-1, target, place.expand(scores.shape))[..., :width]


def top_values(
    scores: Tensor,
    k: int,
    values: Tensor,
    *,
    counts: Tensor,
    lens: Tensor,
    protect_first: int = 0,
    protect_last: int = 0,
    per_value: int = 1,
) -> tuple[Tensor, Tensor]:
    """`top_positions` of `scores` `[num_rows, num_lines, n]`, and what the rows have there.

    values: int32 `[num_rows, >= n / per_value]`, last dim contiguous: position p has `values[p]`; with per_value > 1, where
    each value is of so many positions, int64 `values[p // per_value] * per_value + p % per_value`. Behind a line's count
    anything.
    """
    width = min(k, scores.shape[2])
    if scores.is_cuda and scores.dtype != torch.float64 and width and protect_first + protect_last <= k:
        from agentkv.kernels.top_positions_triton import select_positions

        return select_positions(scores, width, counts, lens, protect_first, protect_last, False, values, per_value)
    chosen = top_positions(scores, k, counts=counts, lens=lens, protect_first=protect_first, protect_last=protect_last)
    places = chosen.clamp(max=max(0, scores.shape[2] - 1)).to(torch.int64)
    picked = values.unsqueeze(1).expand(-1, scores.shape[1], -1).gather(2, places // per_value)
    return chosen, picked if per_value == 1 else picked.to(torch.int64) * per_value + places % per_value


def _largest(scores: Tensor, open_: Tensor, need: Tensor, width: int, ties: str) -> Tensor:
    """Mask of the `need` `[..., 1]` largest scores among the open ones: all above the last of them, then its equals."""
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    values = scores.to(wide).masked_fill(~open_ | scores.isnan(), -torch.inf)
    least = values.topk(width, -1).values.gather(-1, (need - 1).clamp(min=0).to(torch.int64))
    above, equal = open_ & (values > least), open_ & (values == least)
    room = need - above.sum(-1, keepdim=True)
    number = equal.cumsum(-1)
    if ties == "higher":
        number = number[..., -1:] - number + 1
    return (above | (equal & (number <= room))) & (need > 0)
