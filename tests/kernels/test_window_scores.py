"""Scores that queries give to keys, against loops in float64 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from devices import NoWaiting
from hypothesis import given
from hypothesis import strategies as st

from agentkv.kernels.received_mass import received_mass
from agentkv.kernels.window_scores import pool_scores, window_scores


def made(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def slow_window(q: torch.Tensor, k: torch.Tensor, scale: float, lens: list[int]) -> torch.Tensor:
    """`[num_heads, window, n]`, one probability after another."""
    window, num_heads, _ = q.shape
    group = num_heads // len(k)
    given = torch.zeros(num_heads, window, k.shape[1], dtype=torch.float64)
    for head in range(num_heads):
        for i in range(window):
            end = lens[head // group] - window + i + 1
            if end > 0:
                scores = [float(q[i, head].double() @ k[head // group, j].double()) * scale for j in range(end)]
                given[head, i, :end] = torch.tensor(softmax(scores), dtype=torch.float64)
    return given


def test_equal_scores_give_each_seen_key_the_same_share() -> None:
    given = window_scores(torch.zeros(2, 2, 4), torch.zeros(1, 8, 4), 0.5)
    assert given.shape == (2, 2, 8)
    assert torch.allclose(given[:, 0], torch.tensor([1 / 7] * 7 + [0]))
    assert torch.allclose(given[:, 1], torch.tensor([1 / 8] * 8))
    summed = window_scores(torch.zeros(2, 2, 4), torch.zeros(1, 8, 4), 0.5, reduce="sum")
    assert torch.allclose(summed[:, :6], torch.tensor(0.2678571))
    pooled = pool_scores(summed[:, :6], 5)
    assert torch.allclose(pooled / summed[:, :6], torch.tensor([0.6, 0.8, 1, 1, 0.8, 0.6]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("lens", [None, [11, 9], [4, 2]])
def test_equals_loops(dtype: torch.dtype, tolerance: float, lens: list[int] | None) -> None:
    q, k = made(4, 6, 8, dtype=dtype), made(2, 11, 8, dtype=dtype)
    want = slow_window(q, k, 0.3, lens or [11, 11])
    held = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    assert (window_scores(q, k, 0.3, lens=held) - want).abs().max() < tolerance
    assert (window_scores(q, k, 0.3, lens=held, reduce="sum") - want.sum(1)).abs().max() < 4 * tolerance


def test_a_planted_key_has_the_most() -> None:
    q, k = made(3, 2, 16), made(2, 40, 16)
    k[:, 17] = 9 * q.mean(0)
    assert (window_scores(q, k, 1.0, reduce="sum").argmax(-1) == 17).all()


@given(scores=st.lists(st.floats(-5, 5), min_size=1, max_size=12), half=st.integers(0, 4))
def test_pools_equal_loops(scores: list[float], half: int) -> None:
    kernel, n = 2 * half + 1, len(scores)
    near = [scores[max(0, j - half) : j + half + 1] for j in range(n)]
    mean, most = [torch.tensor([f(part) for part in near], dtype=torch.float64) for f in (lambda p: sum(p) / kernel, max)]
    rows = torch.tensor([[scores, scores]], dtype=torch.float64)
    assert torch.allclose(pool_scores(rows, kernel)[0, 1], mean, atol=1e-12)
    assert torch.equal(pool_scores(rows, kernel, "max")[0, 0], most)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        pool_scores(torch.zeros(4), 2)
    with pytest.raises(ValueError, match="window of 5"):
        window_scores(made(5, 2, 4), made(2, 4, 4), 1.0)


def slow_mass(q: torch.Tensor, k: torch.Tensor, ends: list[list[int]], bias: torch.Tensor, op: str) -> tuple[torch.Tensor, ...]:
    """Received mass `[num_kv_heads, n]` and lse `[num_queries, num_heads]`, scale 0.3. ends by KV head and query."""
    num_queries, num_heads, _ = q.shape
    group = num_heads // len(k)
    received = torch.zeros(k.shape[:2], dtype=torch.float64)
    lses = torch.full((num_queries, num_heads), -torch.inf, dtype=torch.float64)
    for i in range(num_queries):
        for head in range(num_heads):
            line = head // group
            end = ends[line][i]
            if end:
                scores = [float(q[i, head].double() @ k[line, j].double()) * 0.3 + float(bias[line, j]) for j in range(end)]
                lses[i, head] = math.log(sum(math.exp(score) for score in scores))
                for j, share in enumerate(softmax(scores)):
                    received[line, j] = received[line, j] + share if op == "sum" else max(float(received[line, j]), share)
    return received, lses


def test_equal_scores_of_a_causal_row() -> None:
    lse = torch.arange(1, 7.0).log().view(6, 1)
    ends = torch.arange(1, 7, dtype=torch.int32)
    received = received_mass(torch.zeros(6, 1, 4), torch.zeros(1, 6, 4), lse, ends, 1.0)
    assert torch.allclose(received, torch.tensor([2.45, 1.45, 0.95, 0.616667, 0.366667, 0.166667]))
    seen_by = torch.arange(6, 0, -1)
    assert torch.allclose(received / seen_by, torch.tensor([0.40833, 0.29, 0.2375, 0.20556, 0.18333, 0.16667]), atol=5e-6)
    most = received_mass(torch.zeros(6, 1, 4), torch.zeros(1, 6, 4), lse, ends, 1.0, reduce="max")
    assert torch.allclose(most, 1 / torch.arange(1, 7.0))


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 5e-6)])
def test_mass_equals_loops(
    op: str, biased: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentkv.kernels.received_mass._TILE", 4 * 11 * 3)  # blocks of three queries
    q, k = made(7, 4, 8, dtype=dtype), made(2, 11, 8, dtype=dtype)
    bias = made(2, 11) if biased else torch.zeros(2, 11)
    ends = [5, 6, 7, 0, 9, 10, 11]
    want, lse = slow_mass(q, k, [ends, [min(end, 8) for end in ends]], bias, op)
    mine = received_mass(
        q, k, lse.float() if dtype != torch.float64 else lse, torch.tensor(ends, dtype=torch.int32), 0.3,
        lens=torch.tensor([11, 8], dtype=torch.int32), bias=bias if biased else None, reduce=op,
    )  # fmt: skip
    assert (mine - want).abs().max() < tolerance
    if op == "sum":
        assert torch.allclose(mine.sum(1).double(), torch.full((2,), 2 * 6.0).double())  # a query gives each head 1 in all


def test_ends_by_head_and_chunks_add_up() -> None:
    q, k = made(9, 4, 8), made(2, 12, 8)
    ends = torch.arange(4, 13, dtype=torch.int32)
    by_head = torch.stack((ends, (ends - 3).clamp(min=0)))
    _, lse = slow_mass(q, k, by_head.tolist(), torch.zeros(2, 12), "sum")
    whole = received_mass(q, k, lse, by_head, 0.3)
    parts = [received_mass(q[s], k, lse[s], by_head[:, s], 0.3) for s in (slice(0, 1), slice(1, 8), slice(8, 9))]
    assert torch.allclose(whole, sum(parts), rtol=1e-12)


def test_nothing_waits() -> None:
    lens, ends = torch.tensor([11, 8], dtype=torch.int32), torch.arange(8, 12, dtype=torch.int32)
    with NoWaiting():
        summed = window_scores(made(4, 4, 8), made(2, 11, 8), 1.0, lens=lens, reduce="sum")
        pool_scores(summed, 3, "max")
        received_mass(made(4, 4, 8), made(2, 11, 8), made(4, 4), ends, 1.0, lens=lens)
