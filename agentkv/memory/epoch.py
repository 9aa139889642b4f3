"""A new epoch: placeholders stand where bodies were, and everything behind them moves up."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

from agentkv.memory.span import Prune
from agentkv.types import Frozen

Replacement = tuple[int, int, tuple[int, ...]]
"""[start, end) of old ids and what stands there instead. Lists of them are in order and do not overlap."""


class Rebuilt(Frozen, frozen=True, kw_only=True):
    """A rebuild, ready to be applied. start: the first position that changes. frees: logical tokens given back.

    prunes: all prunes of the branch once it is applied.
    """

    start: int
    frees: int
    replacements: list[Replacement]
    prunes: dict[str, Prune]


def replaced(ids: array[int], replacements: Sequence[Replacement]) -> array[int]:
    """The ids of the new epoch."""
    new, done = array("i"), 0
    for low, high, stand_in in replacements:
        new.extend(ids[done:low])
        new.extend(stand_in)
        done = high
    new.extend(ids[done:])
    return new


def shift(replacements: Sequence[Replacement]) -> Callable[[int], int]:
    """From an old position outside the replaced bodies to the new one."""
    ends = [high for _, high, _ in replacements]
    total, gone = 0, [0]
    for low, high, stand_in in replacements:
        total += high - low - len(stand_in)
        gone.append(total)
    return lambda position: position - gone[bisect_right(ends, position)]
