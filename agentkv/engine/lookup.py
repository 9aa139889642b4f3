"""Prompt lookup: guess the next tokens of a sequence from what it holds already, so that one step can check several.

Agents copy: file names, edited files, commands. Where the end of a sequence stood before, what followed there is a good guess
(LLMA, arXiv 2304.04487; prompt lookup decoding). The guesses are forwarded together with the last token; a token is drawn
after each of them, and those that the draws agree with stay. The answer is that of the undrafted run.

Host code: no torch, no model.
"""

from __future__ import annotations

from array import array
from itertools import takewhile

from agentkv.engine.core import Draw, RowWork, Sequence

MOST_QUERIES = 8
"""Tokens that a decode row may forward in one step: the one that was drawn, and up to seven guesses."""

ROOM = 32
"""Decode tokens a step up to which a guess costs little, since the step waits for the weights to be read. Drafts end there."""

GRAM = 3
"""Tokens that must match before anything is guessed."""

REACH = 16
"""Longer matches are not told apart."""

PLACES = 16
"""The most recent places of the last GRAM tokens that are looked at, so that a step's work has a bound."""

LEVELS = (4, 6, 9, REACH + 1)
"""Match lengths below each of these share one belief: long matches go on for longer."""

WORTH = 0.25
"""A guess is forwarded while all guesses up to it are believed to be right with at least this probability."""

FIRST_BELIEF, MEMORY = 0.8, 8
"""Belief in a guess before anything was seen, and how many guesses a belief remembers."""


def share(num_rows: int, step_tokens: int) -> int:
    """How many guesses each of `num_rows` decode rows may bring into a step of at most `step_tokens` tokens.

    Half of a step is left to prompts, so that drafts never keep one waiting.
    """
    room = min(ROOM, step_tokens // 2)
    return max(0, min(MOST_QUERIES - 1, room // num_rows - 1)) if num_rows else 0


def drafted(seq: Sequence, most: int) -> list[int]:
    """Guesses of what follows. What is promised to the sequence has room for them: they end before its last token."""
    limit = min(most, seq.max_tokens - seq.num_generated - 1)
    return seq.drafter.draft(limit) if seq.drafter is not None and limit > 0 else []


def agreed(work: RowWork, token: int) -> list[Draw]:
    """A row's draws up to the first that is not what was guessed; `token` is the first of them.

    Each was made from the logits, by the seed and the number that it has without guesses: so these are the tokens of a run
    without guesses, sampled ones too.
    """
    draws = [(token, work.score), *work.later]
    guesses = work.tokens[len(work.tokens) - work.drafted :]
    right = takewhile(lambda pair: pair[0][0] == pair[1], zip(draws, guesses, strict=False))
    return draws[: 1 + sum(1 for _ in right)]


class Drafter:
    """Guesses of one sequence. token_ids: its own list, which only grows; looked at when `draft` is called.

    The places of every GRAM tokens form a chain, newest first, as in LZ77: a token costs one dictionary entry and one int.
    The longest match among the newest PLACES counts, the newest of equals. Whether the continuation there was right is
    seen at the next call, forwarded or not: so belief falls without cost, and rises again without trying.
    """

    def __init__(self, token_ids: list[int], most: int) -> None:
        self._ids = token_ids
        self._most = most
        self._newest: dict[tuple[int, ...], int] = {}  # GRAM tokens -> where the newest of them ends
        self._before = array("i")  # that end, less GRAM -> where the same tokens ended before, -1 for nowhere
        self._beliefs = [FIRST_BELIEF] * len(LEVELS)
        self._open: tuple[int, int, int] | None = None  # where a match was made, where it goes on, its level

    def draft(self, limit: int) -> list[int]:
        """Up to `limit` tokens that are likely to follow, none where nothing matches or guesses have been wrong lately."""
        self._learn()
        self._index()
        match = self.match()
        if match is None:
            return []
        source, length = match
        level = next(index for index, bound in enumerate(LEVELS) if length < bound)
        self._open = (len(self._ids), source, level)
        return self._continuation(source, min(limit, self._most, _worth(self._beliefs[level])))

    def match(self) -> tuple[int, int] | None:
        """Where the end of the indexed tokens stood before: (index of the token that followed, tokens that match)."""
        ids, end = self._ids, len(self._ids)
        place = self._before[end - GRAM] if end >= GRAM else -1
        found, longest = -1, 0
        for _ in range(PLACES):
            if place < 0 or longest == REACH:
                break
            length = GRAM
            while length < min(place, REACH) and ids[place - length - 1] == ids[end - length - 1]:
                length += 1
            if length > longest:
                found, longest = place, length
            place = self._before[place - GRAM]
        return (found, longest) if longest else None

    def _index(self) -> None:
        """Take in the tokens that are new."""
        start = len(self._before)
        fresh = self._ids[start:]
        for end, gram in enumerate(zip(*(fresh[i:] for i in range(GRAM)), strict=False), start + GRAM):
            self._before.append(self._newest.get(gram, -1))
            self._newest[gram] = end

    def _continuation(self, source: int, count: int) -> list[int]:
        """`count` tokens from `source` on; past the end of the sequence the guesses themselves go on repeating."""
        guessed: list[int] = []
        room = len(self._ids) - source
        for i in range(count):
            guessed.append(self._ids[source + i] if i < room else guessed[i - room])
        return guessed

    def _learn(self) -> None:
        """Compare the last match with what came: each right token raises its level's belief, the first wrong one lowers it."""
        if self._open is None:
            return
        (at, source, level), self._open = self._open, None
        for i in range(len(self._ids) - at):
            right = self._ids[source + i] == self._ids[at + i]
            self._beliefs[level] += (right - self._beliefs[level]) / MEMORY
            if not right:
                return


def _worth(belief: float) -> int:
    """How many guesses in a row are right with probability WORTH at least, if each is with probability `belief`."""
    count, chance = 0, belief
    while chance >= WORTH and count < MOST_QUERIES:
        count, chance = count + 1, chance * belief
    return count
