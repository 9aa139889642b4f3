"""Logits to token ids. A row's draw depends on its logits, its seed and its step, never on the rest of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import RowWork
from agentkv.engine.penalties import altered, alters, counts
from agentkv.kernels.send import send

_MASK32 = 0xFFFFFFFF
_COLDEST = 1e-6  # colder is greedy anyway, and would overflow


def sample(logits: Tensor, works: Sequence[RowWork], likeliest: Tensor | None = None) -> Tensor:
    """Token ids int64 `[num_rows]` on the device, from logits `[num_rows, vocab_size]`, one work each. likeliest: where
    the largest logits are, if that is known. The host waits for nothing but masks.

    First penalties, biases and masks; a row whose mask allows nothing gives -1. Then temperature 0 takes the largest logit.
    Otherwise: divide by temperature, keep the top_k largest, of those the smallest set whose probability reaches top_p, of
    those what has min_p of the largest probability, and draw. Equal logits stand in order of token id.
    """
    likeliest = logits.argmax(dim=-1) if likeliest is None else likeliest
    changed = [index for index, work in enumerate(works) if alters(work)]
    drawn = [index for index, work in enumerate(works) if work.sampling.temperature > 0]
    if not changed and not drawn:
        return likeliest
    taken = sorted({*changed, *drawn})
    whole = len(taken) == len(works)
    where = send(taken, logits.device)
    scores = logits.clone() if whole else logits[where]
    if drawn or any(counts(works[index]) for index in changed):
        scores = scores.double()  # a mask alone only hides logits
    if changed:
        scores = altered(scores, [works[index] for index in taken])
    best = scores.argmax(dim=-1)
    tokens = best.clone() if whole else likeliest.index_copy(0, where, best)
    if drawn:
        rows = send([taken.index(index) for index in drawn], logits.device)
        tokens[where[rows]] = _draw(scores[rows], [works[index] for index in drawn])
    if any(works[index].allowed is not None for index in taken):
        nothing = scores.gather(1, best.unsqueeze(1)).squeeze(1) == -torch.inf
        tokens[where] = tokens[where].masked_fill(nothing, -1)
    return tokens


def _draw(logits: Tensor, works: Sequence[RowWork]) -> Tensor:
    """Draw by the largest logit plus Gumbel noise, float64 `[num_rows, vocab_size]`."""
    device = logits.device
    temperature = send([work.sampling.temperature for work in works], device, torch.float64)
    scaled = logits / temperature.clamp_min(_COLDEST).unsqueeze(1)
    if any(work.sampling.top_k or work.sampling.top_p < 1 for work in works):
        scaled = _limit(scaled, works)
    if any(work.sampling.min_p for work in works):
        least = send([work.sampling.min_p for work in works], device, torch.float64).log().unsqueeze(1)
        scaled = scaled.masked_fill(scaled - scaled.amax(dim=-1, keepdim=True) < least, -torch.inf)
    return (scaled + _gumbel(works, logits.shape[1], device)).argmax(dim=-1)


def _limit(scaled: Tensor, works: Sequence[RowWork]) -> Tensor:
    """-inf outside each row's top_k and top_p sets."""
    device, vocab_size = scaled.device, scaled.shape[1]
    top_k = send([work.sampling.top_k or vocab_size for work in works], device).unsqueeze(1)
    top_p = send([work.sampling.top_p for work in works], device, torch.float64).unsqueeze(1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= top_k, -torch.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    outside = (before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _gumbel(works: Sequence[RowWork], vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise `[num_rows, vocab_size]` float64, a pure function of (seed, step, token id) on every device."""
    keys = send([_key(work.seed, work.step) for work in works], device).unsqueeze(1)
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device).unsqueeze(0)
    high = _mix((keys >> 32) ^ _mix(ids ^ (keys & _MASK32)))
    low = _mix(high ^ ids ^ 0x5BD1E995)
    bits = (high << 20) | (low >> 12)  # 52 bits
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _key(seed: int, step: int) -> int:
    """A 62-bit key of a row's draw."""
    digest = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & (2**64 - 1)
    digest = ((digest ^ (digest >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (digest ^ (digest >> 29)) & (2**62 - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit values held in int64 (products stay below 2**63)."""
    for multiplier in (0x7FEB352D, 0x6C078965):
        x = ((x ^ (x >> 16)) * multiplier) & _MASK32
    return x ^ (x >> 15)
