"""Interval algebra against sets of integers, and what makes two histories the same."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from agentkv.engine.cache.intervals import clip, common_prefix, edits_to_apply, merged, normal_edits, size, subtract
from agentkv.engine.core import Edit
from agentkv.types import Interval

intervals = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5)


def points(given: list[Interval] | tuple[Interval, ...]) -> set[int]:
    return {point for start, end in given for point in range(start, end)}


@given(left=intervals, right=intervals, low=st.integers(0, 20), high=st.integers(0, 20))
def test_they_are_sets(left: list[Interval], right: list[Interval], low: int, high: int) -> None:
    both = merged(left)
    assert points(both) == points(left)
    assert all(a < b for a, b in both)
    assert all(b < c for (_, b), (c, _) in pairwise(both))
    assert size(both) == len(points(left))
    assert points(subtract(left, right)) == points(left) - points(right)
    assert points(clip(left, low, high)) == points(left) & set(range(low, high))


@given(left=st.lists(st.integers(0, 1), max_size=12), right=st.lists(st.integers(0, 1), max_size=12))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert common_prefix(left, right) == expected


@given(
    edits=st.lists(
        st.builds(Edit, st.integers(0, 20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=3).map(tuple))
    ),
    length=st.integers(0, 22),
)
def test_normal_edits_do_the_same(edits: list[Edit], length: int) -> None:
    """Played in order of their boundaries, both leave the same tokens at every moment up to the cut."""
    normal = normal_edits(edits, length)
    assert normal_edits(normal, length) == normal
    assert [edit.at for edit in normal] == sorted({edit.at for edit in normal})
    for moment in range(length + 1):

        def gone(which: list[Edit] | tuple[Edit, ...], moment: int = moment) -> set[int]:
            return {p for e in which if min(e.at, length) <= moment for p in points(e.removed) if p < min(e.at, length) - 1}

        assert gone(normal) == gone(edits)
    removed = [point for edit in normal for point in points(edit.removed)]
    assert len(removed) == len(set(removed)), "a token goes once"


def test_what_is_left_of_a_history() -> None:
    first, second = Edit(5, ((0, 2),)), Edit(9, ((3, 6),))
    wanted = (first, second)
    assert edits_to_apply((), wanted, 4) == [first, second], "a state of 4 tokens is at boundary 5"
    assert edits_to_apply((first,), wanted, 4) == [second]
    assert edits_to_apply((Edit(5, ((0, 1),)),), wanted, 4) == [Edit(5, ((1, 2),)), second]
    assert edits_to_apply((first,), wanted, 8) == [second]
    assert edits_to_apply((first, second), wanted, 8) == []
    assert edits_to_apply((), wanted, 5) is None, "token 4 has seen what was removed before it"
    assert edits_to_apply((first,), (), 4) is None, "more is gone than the history says"
    assert edits_to_apply((first, Edit(8, ((3, 6),))), wanted, 8) is None, "gone too early"
