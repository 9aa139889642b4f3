"""What a request's sampling demands of the engine's host side: what is refused, and what its rows bring along."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from agentkv.engine.cache.intervals import common_prefix
from agentkv.engine.core import History, Mask, Request, RowWork, Sequence, Status
from agentkv.engine.lookup import Drafter
from agentkv.errors import BadRequest, EngineFault
from agentkv.types import Sampling

LEAST_HEAD = 512
"""Tokens that two prompts must share for one to wait until the other has read them."""


def check_sampling(sampling: Sampling, vocab_size: int, *, text: bool) -> None:
    """Refuse what cannot be served with this vocabulary, or without text."""
    if sampling.stop and not text:
        raise BadRequest("stop strings need a tokenizer", param="stop")
    last = vocab_size - 1
    if sampling.logit_bias and max(sampling.logit_bias) > last:
        raise BadRequest(f"logit_bias: {max(sampling.logit_bias)} is no token id", hint=f"0 to {last}", param="logit_bias")


def equip(seq: Sequence, vocab_size: int, lookup: int) -> None:
    """Give a new sequence what its sampling needs, nothing where it needs nothing.

    Only a sequence whose draws depend on nothing but their logits, seed and number guesses ahead: a penalty or a mask is a
    function of the tokens before, which are not known behind a guess.
    """
    if seq.request.sampling.penalised:
        seq.history = History(seq.token_ids, seq.num_prompt_tokens)
    if seq.request.mask is not None:
        seq.allowed = partial(_allowed, seq, seq.request.mask, vocab_size)
    if lookup > 1 and seq.history is None and seq.allowed is None:
        seq.drafter = Drafter(seq.token_ids, lookup - 1)


def leader_of(request: Request) -> Sequence | None:
    """The sequence whose prompt a new one shares; None where there is none, or it is of another prompt."""
    leader = request.beside
    if leader is None or leader.status is Status.CLOSED:
        return None
    ours, theirs = (request.key, request.edits), (leader.request.key, leader.request.edits)
    same = ours == theirs and request.token_ids == leader.token_ids[: leader.num_prompt_tokens]
    return leader if same else None


def head_of(seq: Sequence, others: Iterable[Sequence], cached: int) -> Sequence | None:
    """The sequence that has yet to read the most of what the new one's prompt begins with. It is worth waiting for where that
    is LEAST_HEAD tokens beyond the `cached` ones, and half of what the other has to read: so nobody waits for much that it
    would not have had to read itself. None where there is none, or where the new one goes before it.
    """
    found, longest = None, cached + LEAST_HEAD - 1
    for other in others:
        same = other.request.key == seq.request.key and not other.request.edits
        if not same or not other.prefilling or other.request.priority < seq.request.priority:
            continue
        common = common_prefix(seq.request.token_ids, other.request.token_ids)
        if common > longest and 2 * (common - cached) >= other.num_prompt_tokens - other.num_forwarded:
            found, longest = other, common
    return found


def promote(closed: Sequence, others: Iterable[Sequence]) -> None:
    """Whoever waited for a sequence that is closed waits for the first of them instead, which goes ahead."""
    heir: Sequence | None = None
    for seq in others:
        if seq.leader is closed:
            seq.leader, heir = heir, heir or seq


class MasksAhead:
    """Makes the masks of a step in threads while the device runs it; the sampler waits for those that are not done."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="agentkv-mask")

    def start(self, works: Iterable[RowWork]) -> None:
        """Begin with the masks of the rows that draw. Until the step is over nobody may append to their sequences."""
        for work in works:
            if work.sample and work.allowed is not None:
                work.allowed = partial(_awaited, self._threads.submit(work.allowed), work.allowed)


def _awaited(ahead: Future[memoryview | None], make: Callable[[], memoryview | None]) -> memoryview | None:
    """The mask of a thread that has begun it; one that has not come to it yet, on busy cores, would only be waited for."""
    return make() if ahead.cancel() else ahead.result()


def check_drawn(seq: Sequence, token: int | None) -> None:
    """Fault a sequence whose mask left no token."""
    if token is not None and token < 0:
        seq.fault = EngineFault("the mask of a request allows no token")


def _allowed(seq: Sequence, mask: Mask, vocab_size: int) -> memoryview | None:
    """The mask of the next draw. What goes wrong in it is the fault of this sequence, not of the step."""
    try:
        view = memoryview(mask(seq.token_ids[seq.num_prompt_tokens :]))
        if view.ndim != 1 or not view.c_contiguous:
            raise ValueError("a mask is one contiguous line")
        wanted = {1: vocab_size, 4: -(-vocab_size // 32)}.get(view.itemsize)
        if len(view) != wanted:
            raise ValueError(f"{len(view)} items of {view.itemsize} bytes are no mask of {vocab_size} tokens")
    except BadRequest as refused:
        seq.fault = refused
        return None
    except Exception as error:  # noqa: BLE001 - whatever a caller's function raises
        seq.fault = EngineFault(f"the mask of a request failed: {type(error).__name__}: {error}")
        return None
    return view
