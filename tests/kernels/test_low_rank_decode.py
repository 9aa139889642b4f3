"""Attention over latents, plain torch: against keys and values rebuilt slot by slot in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from devices import NoWaiting
from quantised_oracle import attention
from torch import Tensor

from agentkv.kernels.low_rank_decode import LowRankPages, gather_low_rank, low_rank_bytes_per_token, low_rank_decode

HEADS, GROUPS, DIM, PAGE = 4, 2, 8, 4
LENS = (9, 0, 8, 2)
COUNTS = (1, 1, 3, 2)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def payload(rank_k: int = 6, rank_v: int = 5, *, rotated: int = DIM, extras: bool = False) -> LowRankPages:
    k, v = noise(12, PAGE, GROUPS, rank_k, seed=1), noise(12, PAGE, GROUPS, rank_v, seed=2)
    k[0], v[0] = torch.nan, torch.nan  # nobody's page
    more = {"k_bias": noise(HEADS, DIM, seed=5), "v_bias": noise(HEADS, DIM, seed=6), "k_norm": noise(HEADS, DIM, seed=7)}
    frequency = 0.7 ** torch.arange(rotated // 2).float()
    factors = noise(HEADS, rank_k, DIM, seed=3), noise(HEADS, rank_v, DIM, seed=4)
    return LowRankPages(k, v, *factors, frequency, **(more if extras else {}))


TABLE = torch.tensor([[-1, -1, -1, -1], [5, 2, 9, -1], [-1, -1, -1, -1], [7, 3, -1, -1], [4, -1, -1, -1]], dtype=torch.int32)
ROWS = torch.tensor([1, 2, 3, 4])
POSITIONS = torch.stack([torch.arange(9) * 3 + row for row in range(4)])


def rebuilt(given: LowRankPages, row: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """K (turned) and V `[HEADS, length, DIM]`, slot by slot, head by head."""
    k = torch.zeros(HEADS, LENS[row], DIM, dtype=torch.float64)
    v = torch.zeros_like(k)
    for slot in range(LENS[row]):
        page = int(TABLE[ROWS[row], slot // PAGE])
        for head in range(HEADS):
            key = given.k[page, slot % PAGE, head // (HEADS // GROUPS)] @ given.k_factor[head]
            value = given.v[page, slot % PAGE, head // (HEADS // GROUPS)] @ given.v_factor[head]
            if given.k_bias is not None and given.v_bias is not None and given.k_norm is not None:
                key, value = key + given.k_bias[head], value + given.v_bias[head]
                key = key / math.sqrt(float(key @ key) / DIM + given.eps) * given.k_norm[head]
            half, turned = len(given.frequency), key.clone()
            for i in range(half):
                angle = float(torch.tensor(float(places[slot]), dtype=torch.float32) * given.frequency[i])
                turned[i] = key[i] * math.cos(angle) - key[i + half] * math.sin(angle)
                turned[i + half] = key[i + half] * math.cos(angle) + key[i] * math.sin(angle)
            k[head, slot], v[head, slot] = turned, value
    return k, v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("rotated", [DIM, 4])
def test_equals_rebuilt_keys_and_values(rotated: int, extras: bool, causal: bool) -> None:
    """GQA of two and groups of two heads, page edges, an empty row, positions with gaps, hidden slots, partial rotation."""
    given = payload(rotated=rotated, extras=extras)
    q, bias = noise(sum(COUNTS), HEADS * 2, DIM, seed=8), noise(4, 9, seed=9).float()
    bias[0, 3:5] = bias[3, 0] = -torch.inf
    starts = torch.tensor([1, 0, 0, 0, 3, 0, 0], dtype=torch.int32)
    out, lse = low_rank_decode(
        q, given, TABLE, ROWS, torch.tensor(LENS, dtype=torch.int32), 0.2,
        positions=POSITIONS, counts=COUNTS, starts=starts, bias=bias, causal=causal,
    )  # fmt: skip
    first = 0
    for row, (length, count) in enumerate(zip(LENS, COUNTS, strict=True)):
        span = slice(first, first + count)
        ends = torch.tensor([length - count + 1 + token if causal else length for token in range(count)])
        seen = (torch.arange(length) >= starts[span].unsqueeze(1)) & (torch.arange(length) < ends.unsqueeze(1))
        k, v = rebuilt(given, row, POSITIONS[row])
        want, want_lse = attention(q[span], k, v, 0.2, seen, bias[row])
        assert torch.allclose(out[span], want, atol=1e-6)  # cos and sin are float32
        assert torch.allclose(lse[span], want_lse, atol=1e-5)
        first += count
    assert not out[1].any()
    assert lse[1].eq(-torch.inf).all()


def test_full_rank_is_dense() -> None:
    """Factors that invert each other: latents of a group's width hold its heads as they are."""
    width = HEADS // GROUPS * DIM
    given = payload(width, width)
    identity = torch.eye(width, dtype=torch.float64).view(width, HEADS // GROUPS, DIM).transpose(0, 1).repeat(GROUPS, 1, 1)
    given = dataclasses.replace(given, k_factor=identity, v_factor=identity)
    k, v = gather_low_rank(given, TABLE[1], 9, dtype=torch.float64)
    pages = TABLE[1, :3].long()
    assert torch.equal(v, given.v[pages].flatten(0, 1)[:9].view(9, HEADS, DIM).transpose(0, 1))
    raw = given.k[pages].flatten(0, 1)[:9].view(9, HEADS, DIM).transpose(0, 1)
    assert torch.equal(k[:, 0], raw[:, 0])  # at position 0
    assert torch.allclose(k.norm(dim=-1), raw.norm(dim=-1), atol=1e-6)
    q = noise(1, HEADS, DIM, seed=3)
    out, _ = low_rank_decode(q, given, TABLE, ROWS[:1], torch.tensor([9], dtype=torch.int32), 0.2)
    want, _ = attention(q, k, v, 0.2, torch.ones(1, 9, dtype=torch.bool))
    assert torch.allclose(out, want, atol=1e-10)


@pytest.mark.parametrize("positions", [None, POSITIONS[0]])
def test_gathered_rows_are_the_rebuilt_ones(positions: Tensor | None) -> None:
    given = payload(extras=True)
    k, v = gather_low_rank(given, TABLE[1], 9, positions, torch.float64)
    want_k, want_v = rebuilt(given, 0, torch.arange(9) if positions is None else positions)
    assert torch.allclose(k, want_k, atol=1e-6)
    assert torch.allclose(v, want_v, atol=1e-12)


def test_float32_and_half_are_near() -> None:
    given, lens = payload(extras=True), torch.tensor(LENS, dtype=torch.int32)
    q = noise(4, HEADS * 2, DIM, seed=8)
    want, want_lse = low_rank_decode(q, given, TABLE, ROWS, lens, 0.2)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        out, lse = low_rank_decode(q.to(dtype), given, TABLE, ROWS, lens, 0.2)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert torch.allclose(out.double(), want, atol=tolerance)
        assert torch.allclose(lse.double(), want_lse, atol=tolerance)


def test_bytes_refusals_and_no_host_reads() -> None:
    given = payload(extras=True)
    token = [part[0, 0] for part in (given.k, given.v)]
    assert sum(part.numel() for part in token) * 2 == low_rank_bytes_per_token(6, 5, GROUPS)
    for change in (
        {"v": given.v[:, :, :1]},
        {"k_factor": given.k_factor[:3]},
        {"k_factor": given.k_factor[:, :2]},
        {"frequency": torch.ones(DIM)},
    ):
        with pytest.raises(ValueError, match=r"groups|rank|frequencies"):
            dataclasses.replace(given, **change)
    q = noise(4, HEADS, DIM, seed=1)
    with NoWaiting():
        low_rank_decode(q, given, TABLE, ROWS, torch.tensor(LENS), 1.0, positions=POSITIONS, bias=torch.zeros(4, 9))
        gather_low_rank(given, TABLE[1], 9)
