"""The brute-force oracle of eviction rules against closed forms that fit on paper."""

from __future__ import annotations

import math

import pytest
import torch
from recompute import (
    Choice,
    agreement,
    keep_across_heads,
    keep_across_model,
    keep_first_and_last,
    keep_per_head,
    replay_scores,
    window_scores,
)


def test_equal_logits_leave_the_pool_s_edges() -> None:
    scores = window_scores(torch.zeros(8, 4, 6), torch.randn(8, 2, 6), window=2, kernel=5)
    mean = (1 / 7 + 1 / 8) / 2  # the last two of eight tokens see seven and eight keys
    want = mean * torch.tensor([0.6, 0.8, 1, 1, 0.8, 0.6], dtype=torch.float64)
    torch.testing.assert_close(scores, want.expand(2, 6))


def test_a_query_head_scores_its_own_kv_head() -> None:
    q, k = torch.zeros(9, 6, 4), torch.zeros(9, 2, 4)
    k[5, :, 0] = 1
    q[-1, 4, 0] = 60  # the second of three heads that read KV head 1
    scores = window_scores(q, k, window=1, kernel=1)
    torch.testing.assert_close(scores[0], torch.full((8,), 1 / 9, dtype=torch.float64))
    torch.testing.assert_close(scores[1, 5].item(), (1 + 2 / 9) / 3)


def test_per_head_and_window() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.3], [0.9, 0.2, 0.5]], dtype=torch.float64)
    choice = keep_per_head(scores, window=2, capacity=3)
    assert choice.kept.tolist() == [[False, True, False, True, True], [True, False, False, True, True]]
    torch.testing.assert_close(choice.margin[0, :3], torch.tensor([0.25, 0.05, 0.05], dtype=torch.float64))
    assert choice.margin[:, 3:].isinf().all()


@pytest.mark.parametrize(("floor", "counts"), [(0.0, [3, 1]), (0.5, [3, 1]), (1.0, [2, 2])])
def test_heads_compete_above_their_floor(floor: float, counts: list[int]) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.9, 0.05, 0.03, 0.02]], dtype=torch.float64)
    assert keep_across_heads(scores, window=0, capacity=2, floor=floor).kept.sum(dim=1).tolist() == counts


def test_the_window_counts_towards_the_floor() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    assert keep_across_heads(scores, window=2, capacity=4, floor=0.5).kept.sum(dim=1).tolist() == [6, 2]
    assert keep_across_heads(scores, window=2, capacity=4, floor=0.75).kept.sum(dim=1).tolist() == [5, 3]
    assert torch.equal(keep_across_heads(scores, 2, 4, 1.0).kept, keep_per_head(scores, 2, 4).kept)


def test_first_and_last() -> None:
    assert keep_first_and_last(8, first=2, capacity=5).nonzero().flatten().tolist() == [0, 1, 5, 6, 7]
    assert keep_first_and_last(4, first=2, capacity=4).all()


@pytest.mark.parametrize(("start", "seen"), [(1, 5), (4, 6)])
def test_a_replay_sees_sinks_chunk_and_itself(start: int, seen: int) -> None:
    scores = replay_scores(torch.zeros(4, 4, 6), torch.randn(14, 2, 6), start, start + 3, sinks=2)
    torch.testing.assert_close(scores, torch.full((2, 3), 1 / seen, dtype=torch.float64))  # the first id sees the fewest keys


def test_a_perfect_copy_scores_one() -> None:
    eye = torch.eye(5)[:, None] * 90
    k = torch.cat([eye, torch.zeros(5, 1, 5)])
    torch.testing.assert_close(replay_scores(eye, k, 0, 5, sinks=4), torch.ones(1, 5, dtype=torch.float64))


def test_layers_compete_or_not() -> None:
    scores = torch.tensor([[[0.0, 0.9, 0.8, 0.7]], [[0.0, 0.1, 0.2, 0.3]]])
    assert keep_across_model(scores, 1, 2, layerwise=False).kept.sum(dim=2).flatten().tolist() == [3, 1]
    assert keep_across_model(scores, 1, 2, layerwise=True).kept.sum(dim=2).flatten().tolist() == [2, 2]


def test_agreement_tells_a_tie_from_an_error() -> None:
    choice = Choice(torch.tensor([True, True, False, False]), torch.tensor([0.5, 1e-9, 1e-9, 0.5], dtype=torch.float64))
    tie = agreement(choice, torch.tensor([True, False, True, False]), 1e-6)
    assert (tie.clear, tie.clear_same, tie.differing, tie.widest) == (2, 2, 2, 1e-9)
    error = agreement(choice, torch.tensor([False, True, False, True]), 1e-6)
    assert (error.clear_same, error.differing, error.widest) == (0, 2, 0.5)


def test_everything_fits() -> None:
    scores = torch.rand(2, 5, dtype=torch.float64)
    for choice in (keep_per_head(scores, 1, 6), keep_across_heads(scores, 1, 6, 0.2)):
        assert choice.kept.all()
        assert (choice.margin == math.inf).all()
