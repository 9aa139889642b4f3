"""What a captured step is built for: not the rows that it has, but all that it may be replayed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentkv.engine.core import Reach, RowWork
from agentkv.types import Sampling

GREEDY = Sampling(temperature=0.0)


class Limits(NamedTuple):
    """Rows of one form that decode, each with one token: what their launches depend on. Steps of equal limits share a graph.

    rows: that there are, with dead ones. slots: by group of the form, the most that a row holds with its new token. seen: by
    group, the most of them that a row sees, 0 where each sees all. sealed: the most that a row's sealed part has in a layer and
    head, 0 where no row has one. holes: was a token pruned, or sealed? tokens: 0; of rows that read short chunks instead, how
    many that is in all, with dead ones: they are those of one more dead row.
    """

    form: int
    rows: int
    slots: tuple[int, ...]
    seen: tuple[int, ...]
    sealed: int
    holes: bool
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Buckets:
    """How numbers are rounded up, so that few graphs serve all steps. rows: counts of rows; more than the last are not
    captured. slots: the least that a captured row may hold; from there on powers of two. tokens: of short chunks in all. far: a
    chunk of more than half of the last of them behind more slots than this is not captured: it fills the device by itself, and
    the attention of long chunks, which the host plans, is faster there."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    slots: int = 1024
    tokens: tuple[int, ...] = (32, 64, 128, 256, 512)
    far: int = 32768

    def of_rows(self, count: int) -> int:
        """At least `count`, which is not more than the last of `rows`."""
        return next(most for most in self.rows if most >= count)

    def short(self, works: Sequence[RowWork]) -> bool:
        """Are these chunks few and short enough to be captured?"""
        long = any(len(work.tokens) > self.tokens[-1] // 2 and work.slot > self.far for work in works)
        return not long and len(works) <= self.rows[-1] and sum(len(work.tokens) for work in works) <= self.tokens[-1]

    def of_tokens(self, count: int) -> int:
        """At least `count`, which is not more than the last of `tokens`."""
        return next(most for most in self.tokens if most >= count)

    def of_slots(self, count: int, most: int) -> int:
        """At least `count`; `most` where the next power of two is more."""
        return min(max(self.slots, 1 << (count - 1).bit_length()), most)


DEFAULT = Buckets()
"""How they are rounded on a GPU."""


def single(works: Sequence[RowWork]) -> list[RowWork]:
    """Decode rows with guesses as rows of one token each: a guess sees what its row holds up to itself."""
    if not any(work.drafted for work in works):
        return list(works)
    return [_token(work, i) if work.drafted else work for work in works for i in range(len(work.tokens))]


def _token(work: RowWork, i: int) -> RowWork:
    return replace(
        work,
        tokens=work.tokens[i : i + 1],
        position=work.position + i,
        slot=work.slot + i,
        reaches=tuple(None if reach is None else Reach(reach.slot + i, reach.first[i : i + 1]) for reach in work.reaches),
        drafted=0,
    )


def dead(form: int, row: int, count: int = 1) -> RowWork:
    """A row that fills up a captured step: so often token 0 at position 0 of the row of the dead."""
    return RowWork(row, [0] * count, 0, 0, True, GREEDY, 0, 1, form=form)
