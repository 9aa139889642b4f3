"""Scores by the last queries: closed forms, and brute force over keys of which some are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv.kernels.observed_scores import observed_columns, observed_scores
from agentkv.kernels.reference import observe
from agentkv.kernels.window_scores import window_scores


def all_of(num_kv_heads: int, length: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    held = torch.ones(num_kv_heads, length, dtype=torch.bool)
    return held, held & (torch.arange(length) < length - window)


def test_equal_attention_is_spread_evenly() -> None:
    """Eight keys, two queries, no preference: each column gets 1/7 + 1/8; a pool of five has zeros beyond the edges."""
    q, k = torch.zeros(2, 1, 4), torch.randn(1, 8, 4)
    held, older = all_of(1, 8, 2)
    plain = observed_scores(q, k, held, older, 1.0, kernel=1, pool="avg").scores[0]
    torch.testing.assert_close(plain[:6], torch.full((6,), 1 / 7 + 1 / 8))
    assert plain[6:].tolist() == [-torch.inf] * 2
    pooled = observed_scores(q, k, held, older, 1.0, kernel=5, pool="avg").scores[0, :6]
    torch.testing.assert_close(pooled / (1 / 7 + 1 / 8), torch.tensor([0.6, 0.8, 1, 1, 0.8, 0.6]))


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("reduce_first", [False, True])
def test_several_layers_at_once_are_each_alone(pool: Any, reduce: Any, reduce_first: bool) -> None:
    q, k = torch.randn(3, 4, 4, 8, dtype=torch.float64), torch.randn(3, 2, 30, 8, dtype=torch.float64)
    how = {"kernel": 3, "pool": pool, "reduce": reduce, "reduce_first": reduce_first}
    _, older = all_of(2, 30, 6)
    alone = [observed_scores(q[layer], k[layer], None, older, 0.4, **how) for layer in range(3)]
    given = torch.stack([window_scores(q[layer], k[layer], 0.4, reduce="sum") for layer in range(3)])
    together = observed_columns(given.view(6, 2, 30), 24, **how)
    for layer, mine in zip(alone, together.split(2), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(layer, mine, strict=True))


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("reduce_first", [False, True])
@pytest.mark.parametrize("missing", [0, 9])
def test_like_brute_force(pool: str, reduce: str, reduce_first: bool, missing: int) -> None:
    """Of 30 keys some are not there, other ones and other counts in each head; the window of 5 is."""
    torch.manual_seed(3)
    q, k = torch.randn(5, 6, 8).double(), torch.randn(3, 30, 8).double()
    held, older = all_of(3, 30, 5)
    for head in range(3):
        gone = torch.randperm(25)[: missing - head if missing else 0]
        held[head, gone] = older[head, gone] = False
    found = observed_scores(q, k, held, older, 0.4, kernel=3, pool=pool, reduce=reduce, reduce_first=reduce_first)  # type: ignore[arg-type]
    for head in range(3):
        there = held[head].nonzero().flatten()
        queries = torch.cat([torch.zeros(len(there) - 5, 2, 8).double(), q[:, 2 * head : 2 * head + 2]])
        (wanted,) = observe(queries, k[head, there].unsqueeze(1), 0.4, 5, 3, pool, reduce, reduce_first)
        assert found.lens[head] == len(wanted) == len(there) - 5
        torch.testing.assert_close(found.scores[head, : len(wanted)], torch.tensor(wanted, dtype=torch.float64))
        assert found.order[head, : len(there)].tolist() == there.tolist()
        best, counts = found.best(12, torch.full((3,), 11, dtype=torch.int32))
        order = sorted(range(len(wanted)), key=lambda at: (-wanted[at], at))[:11]
        assert best[head, : counts[head]].tolist() == sorted(there[order].tolist())


def test_the_order_matters_where_a_mean_is_pooled_by_maximum() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(4, 4, 8) * 3, torch.randn(1, 60, 8)
    held, older = all_of(1, 60, 4)
    mean = [observed_scores(q, k, held, older, 1.0, kernel=5, pool="max", reduce_first=first).scores for first in (False, True)]
    assert not torch.equal(*mean)
    most = [
        observed_scores(q, k, held, older, 1.0, kernel=5, pool="max", reduce="max", reduce_first=first).scores
        for first in (False, True)
    ]
    torch.testing.assert_close(*most)


def test_a_key_that_is_asked_for_is_kept() -> None:
    """A key along the mean query, made long, is among the best however few are kept."""
    torch.manual_seed(1)
    q, k = torch.randn(8, 2, 16) + 0.5, torch.randn(1, 200, 16)
    k[0, 77] = 20 * q.mean((0, 1))
    held, older = all_of(1, 200, 8)
    best, _ = observed_scores(q, k, held, older, 0.25, kernel=1, pool="avg").best(1, torch.ones(1, dtype=torch.int32))
    assert best.tolist() == [[77]]


def test_heads_that_change_places_keep_what_they_kept() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(4, 6, 8), torch.randn(3, 40, 8)
    held, older = all_of(3, 40, 4)
    turn = torch.tensor([2, 0, 1])
    plain = observed_scores(q, k, held, older, 0.3, kernel=3, pool="avg").scores
    turned_q = q.view(4, 3, 2, 8)[:, turn].reshape(4, 6, 8)
    turned = observed_scores(turned_q, k[turn], held, older, 0.3, kernel=3, pool="avg").scores
    torch.testing.assert_close(turned, plain[turn])


def test_no_queries_choose_by_position() -> None:
    held, older = all_of(1, 10, 2)
    best, counts = observed_scores(torch.zeros(0, 1, 4), torch.randn(1, 10, 4), held, older, 1.0, kernel=3, pool="avg").best(
        3, torch.tensor([3], dtype=torch.int32)
    )
    assert (best.tolist(), counts.tolist()) == ([[0, 1, 2]], [3])


def test_all_keys_are_there_where_nothing_is_said() -> None:
    torch.manual_seed(5)
    q, k = torch.randn(3, 4, 8), torch.randn(2, 20, 8)
    older = torch.arange(20).expand(2, -1) < 17
    told, untold = (
        observed_scores(q, k, held, older, 0.3, kernel=3, pool="avg") for held in (torch.ones(2, 20, dtype=torch.bool), None)
    )
    assert all(torch.equal(a, b) for a, b in zip(told, untold, strict=True))
