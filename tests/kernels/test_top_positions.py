"""Top positions against sorting in Python; ties, protected ends, rows of their own k and length."""

from __future__ import annotations

import math

import pytest
import torch
from devices import NoWaiting
from hypothesis import given
from hypothesis import strategies as st

from agentkv.kernels.top_positions import top_positions


def slow(scores: list[float], k: int, width: int, first: int = 0, last: int = 0, higher: bool = False) -> list[int]:
    """The positions of one row, filled up to width with the sentinel -1."""
    n = len(scores)
    always = [j for j in range(n) if j < first or j >= n - last]
    others = [j for j in range(n) if j not in always]
    value = [-math.inf if math.isnan(score) else score for score in scores]
    others.sort(key=lambda j: (-value[j], -j if higher else j))
    kept = sorted(always + others[: max(0, min(k, n) - len(always))])
    return kept + [-1] * (width - len(kept))


FEW = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-30, -math.inf, math.inf, math.nan, 7.0])


@given(data=st.data())
def test_equals_sorting(data: st.DataObject) -> None:
    n, num_rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    rows = [data.draw(st.lists(FEW, min_size=n, max_size=n)) for _ in range(num_rows)]
    first, last = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    k = data.draw(st.integers(first + last, first + last + 6))
    lens = data.draw(st.one_of(st.none(), st.lists(st.integers(0, n), min_size=num_rows, max_size=num_rows)))
    counts = data.draw(st.one_of(st.none(), st.lists(st.integers(0, k), min_size=num_rows, max_size=num_rows)))
    higher = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    with NoWaiting():
        got = top_positions(
            torch.tensor(rows, dtype=dtype), k, protect_first=first, protect_last=last, ties="higher" if higher else "lower",
            counts=None if counts is None else torch.tensor(counts, dtype=torch.int32),
            lens=None if lens is None else torch.tensor(lens, dtype=torch.int32),
        )  # fmt: skip
    assert got.dtype == torch.int32
    assert got.shape == (num_rows, min(k, n))
    for index, row in enumerate(rows):
        held = row[: lens[index]] if lens else row
        own = counts[index] if counts else k
        want = slow([float(torch.tensor(each, dtype=dtype)) for each in held], own, min(k, n), first, last, higher)
        assert got[index].tolist() == [n if j == -1 else j for j in want]


def test_protected_positions_do_not_lose_to_equals() -> None:
    """All scores equal and large: what is protected stays, and the rest goes by position."""
    scores = torch.full((1, 2, 6), 3e38)
    assert top_positions(scores, 4, protect_first=1, protect_last=2).tolist() == [[[0, 1, 4, 5]] * 2]
    assert top_positions(scores, 4, protect_first=1, protect_last=2, ties="higher").tolist() == [[[0, 3, 4, 5]] * 2]


def test_more_than_there_is_keeps_everything() -> None:
    assert top_positions(torch.tensor([0.5, 0.1]), 9).tolist() == [0, 1]
    assert top_positions(torch.zeros(3, 0), 4).shape == (3, 0)
    assert top_positions(torch.zeros(3, 4), 0).shape == (3, 0)


def test_too_many_protected_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        top_positions(torch.zeros(4), 2, protect_first=2, protect_last=1)
