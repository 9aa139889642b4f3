"""What a request's sampling demands of the engine's host side: what is refused, and what its rows bring along."""

from __future__ import annotations

from agentkv.engine.core import History, Sequence
from agentkv.errors import BadRequest
from agentkv.types import Sampling


def check_sampling(sampling: Sampling, vocab_size: int, *, text: bool) -> None:
    """Refuse what cannot be served with this vocabulary, or without text."""
    if sampling.stop and not text:
        raise BadRequest("stop strings need a tokenizer", param="stop")
    last = vocab_size - 1
    if sampling.logit_bias and max(sampling.logit_bias) > last:
        raise BadRequest(f"logit_bias: {max(sampling.logit_bias)} is no token id", hint=f"0 to {last}", param="logit_bias")


def equip(seq: Sequence) -> None:
    """Give a new sequence what its sampling needs, nothing where it needs nothing."""
    if seq.request.sampling.penalised:
        seq.history = History(seq.token_ids, seq.num_prompt_tokens)
