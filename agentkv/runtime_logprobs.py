"""Log-probabilities of a generation, from token ids to what a turn and its events say."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from agentkv.dialogue import Delta
from agentkv.engine.cache.intervals import common_prefix
from agentkv.engine.core import StepOutput
from agentkv.engine.tokenizer import Tokenizer
from agentkv.types import TokenLogprob, TopLogprob


class LogprobLog:
    """One entry for each drawn token. With a delta go those whose text can no longer be taken back; the rest wait for the
    next, or for the end of the turn: what was streamed is always the beginning of what the turn has."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        self._entries: list[TokenLogprob] = []
        self._ends: list[int] = []  # length of the text when each token was in
        self._sent = 0

    def add(self, output: StepOutput) -> None:
        """Take what a step made."""
        for token_id, score in zip(output.token_ids, output.scores, strict=True):
            shown = "" if token_id in self._stop_ids else self._detokenizer.push(token_id)
            self._ids.append(token_id)
            self._ends.append((self._ends[-1] if self._ends else 0) + len(shown))
            top = tuple(self._top(each, logprob) for each, logprob in score.top)
            own = self._top(token_id, score.logprob)
            self._entries.append(
                TokenLogprob(id=own.id, token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)
            )

    def ride(self, deltas: list[Delta], decided: int) -> list[Delta]:
        """The deltas with the entries that may go now. decided: characters of the text that stay whatever comes."""
        count = bisect_left(self._ends, decided)
        if decided and count < len(self._ends) and self._ends[count] == decided:
            count += 1
        carrier = next((index for index, delta in enumerate(deltas) if delta.text or delta.reasoning), None)
        if carrier is None or count <= self._sent:
            return deltas
        fresh, self._sent = tuple(self._entries[self._sent : count]), count
        return [*deltas[:carrier], deltas[carrier].replace(logprobs=fresh), *deltas[carrier + 1 :]]

    def of(self, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """The entries of the ids to commit, as far as they are the ones that were drawn."""
        return tuple(self._entries[: common_prefix(self._ids, ids)])

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token_id)
        text = self._tokenizer.token_text(token_id)
        return TopLogprob(id=token_id, token=text, logprob=logprob, bytes=None if data is None else tuple(data))
