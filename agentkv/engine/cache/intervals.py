"""Half-open intervals of logical positions, and edits in normal form.

Everything here is pure. Interval lists are sorted, disjoint and non-empty unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentkv.engine.core import Edit
from agentkv.types import Interval


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted and disjoint; touching intervals become one, empty ones go."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def clip(intervals: Iterable[Interval], low: int, high: int) -> list[Interval]:
    """The parts inside [low, high)."""
    cut = ((max(start, low), min(end, high)) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]


def subtract(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The parts of `left` that no interval of `right` covers."""
    holes = merged(right)
    out: list[Interval] = []
    for start, end in merged(left):
        for low, high in holes:
            if high <= start or low >= end:
                continue
            if low > start:
                out.append((start, low))
            start = high
        if start < end:
            out.append((start, end))
    return out


def size(intervals: Iterable[Interval]) -> int:
    """Positions covered by disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids are equal. Compares slices, so long equal runs cost little."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # the first difference is in [low, high)
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def normal_edits(edits: Iterable[Edit], length: int) -> tuple[Edit, ...]:
    """The edits as a history of `length` tokens has them: two histories are the same if and only if these are equal.

    Boundaries past the end move to the end, parts that are already gone or not yet forwarded are left out, and prunes at
    one boundary become one edit.
    """
    gone: list[Interval] = []
    by_boundary: dict[int, list[Interval]] = {}
    for edit in sorted(edits, key=lambda edit: edit.at):
        at = min(edit.at, length)
        fresh = subtract(clip(edit.removed, 0, at - 1), gone)
        if fresh:
            by_boundary.setdefault(at, []).extend(fresh)
            gone = merged(gone + fresh)
    return tuple(Edit(at, tuple(merged(removed))) for at, removed in sorted(by_boundary.items()))


def edits_to_apply(applied: tuple[Edit, ...], wanted: tuple[Edit, ...], length: int) -> list[Edit] | None:
    """What is left of `wanted` for a state of `length` forwarded tokens that has seen `applied`; None: not a continuation.

    Both are in normal form. An edit at boundary `at` belongs before token `at - 1` is forwarded, so those of `wanted`
    that lie below `length + 1` must have been applied, those at it may have been, and later ones follow.
    """
    boundary = length + 1
    if [edit for edit in applied if edit.at < boundary] != [edit for edit in wanted if edit.at < boundary]:
        return None
    if any(edit.at > boundary for edit in applied):
        return None
    done = [interval for edit in applied if edit.at == boundary for interval in edit.removed]
    due = [interval for edit in wanted if edit.at == boundary for interval in edit.removed]
    if subtract(done, due):
        return None
    rest = subtract(due, done)
    later = [edit for edit in wanted if edit.at > boundary]
    return [Edit(boundary, tuple(rest)), *later] if rest else later
