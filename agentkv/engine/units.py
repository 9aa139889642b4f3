"""Amounts of memory: units by KV group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Units:
    """Counts by group, in the order of the runner's groups; what is left out is 0. May be negative (units that return)."""

    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Iterable[int]) -> Units:
        """The same from any iterable."""
        return cls(tuple(counts))

    def __add__(self, other: Units) -> Units:
        return Units.of(a + b for a, b in self._with(other))

    def __sub__(self, other: Units) -> Units:
        return Units.of(a - b for a, b in self._with(other))

    def __bool__(self) -> bool:
        return any(self.counts)

    @property
    def total(self) -> int:
        """Units of all groups together, whatever their sizes."""
        return sum(self.counts)

    def most(self, other: Units) -> Units:
        """The larger of the two, by group."""
        return Units.of(max(pair) for pair in self._with(other))

    def least(self, other: Units) -> Units:
        """The smaller of the two, by group."""
        return Units.of(min(pair) for pair in self._with(other))

    def within(self, other: Units) -> bool:
        """Is it no more than the other in any group?"""
        return all(a <= b for a, b in self._with(other))

    def _with(self, other: Units) -> Iterable[tuple[int, int]]:
        return zip_longest(self.counts, other.counts, fillvalue=0)


NOTHING = Units()
"""No units of any group."""
