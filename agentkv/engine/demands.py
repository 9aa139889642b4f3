"""What a request's sampling demands of the engine's host side: what is refused, and what its rows bring along."""

from __future__ import annotations

from functools import partial

from agentkv.engine.core import History, Mask, Sequence
from agentkv.engine.lookup import Drafter
from agentkv.errors import BadRequest, EngineFault
from agentkv.types import Sampling


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
    except Exception as error:  # noqa: BLE001 - whatever a caller's function raises
        seq.fault = EngineFault(f"the mask of a request failed: {type(error).__name__}: {error}")
        return None
    return view
