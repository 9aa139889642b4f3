"""Scores that the slots of paged rows keep from step to step: they grow, and in each head the lowest is struck out.

(arXiv 2306.14048)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DEAD = -1.0
"""The score of a slot that was struck out; those of the living are not negative."""


class ScorePages(NamedTuple):
    """Scores of a batch's rows where they lie. All is on the device, and nobody waits for it.

    units: float32 `[num_granules, num_layers, num_kv_heads, page_size]`, each unit contiguous; units may overlap. pages: int64
    `[num_rows, max_pages]`, contiguous, granules; behind a row's last page anything that exists. firsts: int32 `[num_rows]`;
    ends: int32 `[num_rows, num_layers, num_kv_heads]`: a head has the slots from its row's first to its own end.
    """

    units: Tensor
    pages: Tensor
    firsts: Tensor
    ends: Tensor

    @property
    def width(self) -> int:
        """Slots of a row's pages."""
        return self.pages.shape[1] * self.units.shape[3]


def grow(scores: ScorePages, layer: int, received: Tensor) -> None:
    """Add what the slots of a layer received, float32 `[num_rows, num_kv_heads, n]`, n at most `width`; what stands outside of
    a head's slots is left out."""
    if scores.units.is_cuda:
        from agentkv.kernels import kept_scores_triton as fused  # needs triton, which a CPU-only platform may lack

        fused.grow(scores, layer, received)
        return
    size, ends = scores.units.shape[3], scores.ends[:, layer]
    slots = torch.arange(scores.width, device=received.device)
    live = (slots >= scores.firsts.view(-1, 1, 1)) & (slots < ends.unsqueeze(2))
    more = torch.zeros(*received.shape[:2], scores.width, device=received.device)
    more[..., : received.shape[2]] = received
    more = more.masked_fill(~live, 0)
    more = torch.unflatten(more, 2, (-1, size)).transpose(1, 2).flatten(0, 1)
    held = torch.unflatten(live.any(1), 1, (-1, size)).any(2).flatten()
    source = _real(held)
    pages, units = scores.pages.flatten()[source], scores.units[:, layer]
    before = units[pages]
    units.index_put_((pages,), torch.where(held[source].view(-1, 1, 1), before + more[source], before))


def hiding(scores: ScorePages, layer: int) -> Tensor:
    """-inf for the dead and for what stands before a row's first slot, else 0: float32 `[num_rows, num_kv_heads, width]`.
    Behind a head's end anything."""
    if scores.units.is_cuda:
        from agentkv.kernels import kept_scores_triton as fused

        return fused.hiding(scores, layer)
    held = scores.units[:, layer][scores.pages].transpose(1, 2).flatten(2)
    early = torch.arange(scores.width, device=held.device) < scores.firsts.view(-1, 1, 1)
    return torch.zeros_like(held).masked_fill_((held < 0) | early, -torch.inf)


def strike_lowest(front: ScorePages, back: ScorePages, most: Tensor) -> None:
    """Where more than `most` slots of a head are alive, the one with the lowest score is DEAD from now on; of equals the last.

    A head's slots are those of `front`, then those of `back`. most: int32 `[num_rows]`.
    """
    if front.units.is_cuda:
        from agentkv.kernels import kept_scores_triton as fused

        fused.strike_lowest(front, back, most)
        return
    scores = torch.cat([_living(part) for part in (front, back)], 3)
    alive, number = scores >= 0, torch.arange(scores.shape[3], device=scores.device)
    low = scores.masked_fill(~alive, torch.inf).amin(3, keepdim=True)
    victim = torch.where(alive & (scores == low), number, -1).amax(3)
    victim = torch.where(alive.sum(3) > most.view(-1, 1, 1), victim, -1)
    for part, first in ((front, 0), (back, front.width)):
        _strike(part, torch.where((victim >= first) & (victim < first + part.width), victim - first, -1))


def _living(part: ScorePages) -> Tensor:
    """Scores `[num_rows, num_layers, num_kv_heads, width]`, DEAD for what is no slot of the head."""
    held = part.units[part.pages].permute(0, 2, 3, 1, 4).flatten(3)
    slots = torch.arange(part.width, device=held.device)
    live = (slots >= part.firsts.view(-1, 1, 1, 1)) & (slots < part.ends.unsqueeze(3))
    return held.masked_fill(~live, DEAD)


def _strike(part: ScorePages, slots: Tensor) -> None:
    """slots: int64 `[num_rows, num_layers, num_kv_heads]`, -1 for none."""
    size, (_, layers, heads) = part.units.shape[3], slots.shape
    struck, at = (slots >= 0).flatten(), slots.clamp(min=0).flatten()
    source = _real(struck)
    place = source.div(layers * heads, rounding_mode="floor"), source.div(heads, rounding_mode="floor") % layers, source % heads
    pages, at = part.pages[place[0], at[source] // size], at[source]
    index = pages, place[1], place[2], at % size
    part.units[index] = part.units[index].masked_fill(struck[source], DEAD)


def _real(valid: Tensor) -> Tensor:
    """int64 `[n]`: the number of each where it is valid, and of the first valid one elsewhere (0 if there is none). So what is
    written for all of them is written to nobody else's place, and the same where it is written twice."""
    return torch.where(valid, torch.arange(len(valid), device=valid.device), valid.to(torch.uint8).argmax())
