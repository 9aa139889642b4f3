"""Sliding windows over rows with holes: a window counts positions, memory counts slots."""

from __future__ import annotations

from collections.abc import Sequence

from agentkv.types import Interval


def first_slots(kept: Sequence[Interval], first: int, count: int, window: int) -> list[int]:
    """For each query at the logical positions `first` to `first + count`, the first slot that it sees.

    kept: logical intervals that have slots, ascending and disjoint, the queries' own among them. A query sees the positions
    from `window - 1` before its own, so its first slot is the number of kept positions before that one.
    """
    found: list[int] = []
    run = behind = 0  # slots of the runs that lie wholly before the window
    for low in range(first - window + 1, first - window + 1 + count):
        while kept[run][1] <= low:
            behind += kept[run][1] - kept[run][0]
            run += 1
        found.append(behind + max(0, low - kept[run][0]))
    return found
