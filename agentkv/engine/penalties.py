"""What changes a row's logits before it draws: penalties by the tokens there were, biases, masks. Where there is more than
masks, in float64.

Work and transfers are for the rows that ask. What a row has seen is counted once: its counts stay on the device between
steps, and a step adds the tokens that are new.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import History, RowWork
from agentkv.kernels.send import carry, send


def alters(work: RowWork) -> bool:
    """Does the row draw from other logits than the model's?"""
    return counts(work) or work.allowed is not None


def counts(work: RowWork) -> bool:
    """Are the row's logits changed by arithmetic, rather than hidden by a mask alone?"""
    return work.sampling.penalised or bool(work.sampling.logit_bias)


def altered(scores: Tensor, works: Sequence[RowWork]) -> Tensor:
    """Scores `[num_rows, vocab_size]`, one work each, with the repetition penalty, the presence and frequency penalties and the
    biases of each row, in this order, and -inf where its mask says so. float64 where a row `counts`; overwritten."""
    asking = [index for index, work in enumerate(works) if work.sampling.penalised]
    if len(asking) == len(works):
        scores = _penalised(scores, works)
    elif asking:
        rows = send(asking, scores.device)
        scores[rows] = _penalised(scores[rows], [works[index] for index in asking])
    if any(work.sampling.logit_bias for work in works):
        scores = _biased(scores, works)
    return _masked(scores, works) if any(work.allowed is not None for work in works) else scores


def _penalised(scores: Tensor, works: Sequence[RowWork]) -> Tensor:
    given = [work.sampling for work in works]
    flat = [x for each in given for x in (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)]
    weights = send(flat, scores.device, torch.float64).view(-1, 3)
    repetition, presence, frequency = weights.unsqueeze(2).unbind(1)
    prompt, made = _counts(works, scores.shape[1], scores.device)
    repeated: Tensor = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(prompt + made > 0, repeated, scores)
    return scores - presence * (made > 0) - frequency * made


def _counts(works: Sequence[RowWork], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How often each token was in the prompt, and in the answer, int32 `[num_rows, vocab_size]` each."""
    histories: list[History] = []
    for work in works:
        assert work.history is not None, "a penalised row comes with its history"
        histories.append(work.history)
    fresh = [_places(history, vocab_size) for history in histories]
    places = send([place for each in fresh for place in each], device)
    for history, part in zip(histories, torch.split(places, [len(each) for each in fresh]), strict=True):
        if history.counts is None:
            history.counts = torch.zeros(2 * vocab_size, dtype=torch.int32, device=device)
        history.counts.index_add_(0, part, torch.ones_like(part, dtype=torch.int32))
        history.counted = len(history.token_ids)
    counts = torch.stack([history.counts for history in histories])
    return counts[:, :vocab_size], counts[:, vocab_size:]


def _places(history: History, vocab_size: int) -> list[int]:
    """Where the tokens that are not counted yet count: an answer's come after all of the prompt's."""
    start, prompt = history.counted, history.num_prompt
    fresh = enumerate(history.token_ids[start:], start)
    return [token if position < prompt else token + vocab_size for position, token in fresh]


def _biased(scores: Tensor, works: Sequence[RowWork]) -> Tensor:
    """Biases of all rows in one transfer; a row has each token once, so nothing depends on an order of additions."""
    flat = [x for row, work in enumerate(works) for token, bias in work.sampling.logit_bias.items() for x in (row, token, bias)]
    rows, tokens, biases = send(flat, scores.device, torch.float64).view(-1, 3).T
    return scores.index_put_((rows.long(), tokens.long()), biases, accumulate=True)


def _masked(scores: Tensor, works: Sequence[RowWork]) -> Tensor:
    """Masks are waited for here, while the device still computes the logits, and carried over in one transfer a kind."""
    masks = [(row, view) for row, work in enumerate(works) if work.allowed is not None and (view := work.allowed()) is not None]
    for itemsize in (1, 4):
        kind = [(row, view) for row, view in masks if view.itemsize == itemsize]
        if kind:
            joined = torch.frombuffer(bytearray().join(view.cast("B") for _, view in kind), dtype=torch.uint8)
            told = carry(joined, scores.device).view(len(kind), -1)
            hidden = _of_words(told, scores) if itemsize == 4 else _of_bytes(told, scores)
            if len(kind) == len(works):
                scores += hidden
            else:
                scores.index_add_(0, send([row for row, _ in kind], scores.device), hidden)
    return scores


def _of_bytes(told: Tensor, scores: Tensor) -> Tensor:
    """What a mask adds to logits, 0 or -inf; told: uint8 `[num_masks, vocab_size]`."""
    return torch.zeros_like(told, dtype=scores.dtype).masked_fill_(told == 0, -torch.inf)


def _of_words(told: Tensor, scores: Tensor) -> Tensor:
    """The same of packed words, uint8 `[num_masks, num_bytes]`; they are little-endian, so bits are in the order of the tokens.

    A byte picks a line of 8 from a table: on a CPU a sum of that is several times as fast as filling by a mask.
    """
    bits = torch.arange(256, device=told.device).unsqueeze(1) >> torch.arange(8, device=told.device) & 1
    lines = torch.zeros(256, 8, dtype=scores.dtype, device=told.device).masked_fill_(bits == 0, -torch.inf)
    return lines.index_select(0, told.flatten().int()).view(len(told), -1)[:, : scores.shape[1]]
