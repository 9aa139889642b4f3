"""Attention with its log-sum-exp over contiguous keys: each way of computing it against one query at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentkv.kernels import chunk_attention
from agentkv.kernels.chunk_attention import causal_attention
from agentkv.kernels.dense_attention import dense_attention, plain_attention
from agentkv.kernels.merge_parts import merge_parts
from agentkv.kernels.span_attention import span_attention

SCALE = 0.3


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def each(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """q `[T, H, D]`, k and v `[KV, n, D]`, added `[T, H, n]`: out and lse; 0 and -inf where nothing is seen."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for token in range(q.shape[0]):
        for head in range(q.shape[1]):
            line = head * len(k) // q.shape[1]
            scores = k[line] @ q[token, head] * SCALE + added[token, head]
            if bool((scores > -torch.inf).any()):
                lse[token, head] = scores.exp().sum().log()
                out[token, head] = (scores - lse[token, head]).exp() @ v[line]
    return out, lse


def masks(count: int, length: int, kind: str) -> Tensor:
    added = torch.zeros(count, 6, length, dtype=torch.float64)
    if kind == "causal":
        added.masked_fill_(torch.arange(length) > torch.arange(count)[:, None, None], -torch.inf)
    if kind == "shared":
        added += noise(1, 1, length, seed=4)
        added[:, :, 3] = -torch.inf
    if kind == "full":
        added += noise(count, 6, length, seed=5)
    return added


def run(function: object, kind: str, device: str, dtype: torch.dtype, count: int, length: int, tolerance: float) -> None:
    q, k, v = noise(count, 6, 8, seed=1), noise(2, length, 8, seed=2), noise(2, length, 8, seed=3)
    added = masks(count, length, kind)
    given = None if kind in ("none", "causal") else added.transpose(0, 1)[None, :, : 1 if kind == "shared" else count]
    queries, keys, values = (x.to(device, dtype)[None] for x in (q.transpose(0, 1), k, v))
    mask = None if given is None else given.to(device)
    out, lse = function(queries, keys, values, SCALE, causal=kind == "causal", mask=mask)  # type: ignore[operator]
    want = each(q, k, v, added)
    assert (out[0].transpose(0, 1).cpu().double() - want[0]).abs().max() <= tolerance
    assert (lse[0].transpose(0, 1).cpu() - want[1]).abs().max() <= tolerance


@pytest.mark.parametrize("function", [dense_attention, plain_attention])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("kind", "count", "length"), [("none", 5, 37), ("causal", 300, 300), ("shared", 5, 37), ("full", 270, 9)]
)
def test_on_the_cpu(function: object, kind: str, count: int, length: int, dtype: torch.dtype, tolerance: float) -> None:
    run(function, kind, "cpu", dtype, count, length, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3), (torch.bfloat16, 0.03), (torch.float16, 0.01)]
)
@pytest.mark.parametrize(
    ("kind", "count", "length"), [("none", 5, 37), ("causal", 300, 300), ("shared", 5, 37), ("full", 270, 9)]
)
def test_on_a_gpu(kind: str, count: int, length: int, dtype: torch.dtype, tolerance: float) -> None:
    run(dense_attention, kind, "cuda", dtype, count, length, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, [max(0, 20 + i - 12) for i in range(30)]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3), (torch.bfloat16, 0.03)])
def test_a_chunk_gives_its_lse_on_a_gpu(starts: list[int] | None, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = noise(30, 6, 8, seed=1), noise(2, 50, 8, seed=2), noise(2, 50, 8, seed=3)
    slots, token = torch.arange(50), torch.arange(30)
    first = torch.tensor(starts or [0] * 30)
    hidden = (slots > token[:, None] + 20) | (slots < first[:, None])
    want = each(q, k, v, torch.zeros(30, 6, 50, dtype=torch.float64).masked_fill_(hidden[:, None], -torch.inf))
    out, lse = causal_attention(*(x.to("cuda", dtype) for x in (q, k, v)), SCALE, starts, lse=True)
    assert lse is not None
    assert (out.cpu().double() - want[0]).abs().max() <= tolerance
    assert (lse.cpu() - want[1]).abs().max() <= tolerance


def test_what_a_chunk_merges_has_the_shapes_that_merging_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another kernel merges two parts, and takes no others."""
    shapes = []

    def noting(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        shapes.extend(tuple(each.shape) for each in (*outs, *lses))
        return merge_parts(outs, lses)

    monkeypatch.setattr(chunk_attention, "merge_parts", noting)
    q, k, v = noise(30, 6, 8, seed=1), noise(2, 50, 8, seed=2), noise(2, 50, 8, seed=3)
    hidden = torch.arange(50) > torch.arange(30)[:, None] + 20
    want = each(q, k, v, torch.zeros(30, 6, 50, dtype=torch.float64).masked_fill_(hidden[:, None], -torch.inf))
    for got, exact in zip(causal_attention(q, k, v, SCALE, lse=True), want, strict=True):
        assert got is not None
        assert (got - exact).abs().max() <= 1e-11
    assert shapes == [(30, 6, 8), (30, 6, 8), (30, 6), (30, 6)]


@pytest.mark.parametrize("lens", [(7, 3), (0, 7), (0, 0)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_span_that_heads_hold_in_part(lens: tuple[int, int], biased: bool) -> None:
    q, k, v = noise(4, 6, 8, seed=1), noise(2, 7, 8, seed=2), noise(2, 7, 8, seed=3)
    bias = noise(2, 9, seed=4).float()
    bias[0, :] = -torch.inf  # one head sees nothing, whatever it holds
    hidden = torch.arange(7) >= torch.tensor(lens).unsqueeze(1)
    added = (bias[:, :7].double() if biased else torch.zeros(2, 7, dtype=torch.float64)).masked_fill(hidden, -torch.inf)
    want = each(q, k, v, added.repeat_interleave(3, 0).expand(4, 6, 7))
    held = torch.tensor(lens, dtype=torch.int32)
    got = span_attention(q, k, v, held, SCALE, bias if biased else None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_span_of_no_slots() -> None:
    out, lse = span_attention(
        noise(2, 6, 8, seed=1).float(), torch.zeros(2, 0, 8), torch.zeros(2, 0, 8), torch.zeros(2, dtype=torch.int32), SCALE
    )
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())
