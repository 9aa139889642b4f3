"""Routing, grouping and the MLPs of experts against float64 loops over tokens; kernels interpreted, or on a GPU."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from coded_weights import coded, drawn, error
from devices import INTERPRETED, NoWaiting, numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

from agentkv.kernels.experts import Stacked, expert_mlp, route

pytest.importorskip("triton")
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, id="interpreter", marks=only_interpreted),
    pytest.param("cpu", torch.bfloat16, 1e-2, id="interpreter-half", marks=only_interpreted),
    pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
]
COUNT, ACTIVE, HIDDEN, INNER = 6, 3, 256, 128


@pytest.fixture(autouse=True)
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        numpy_scalars(monkeypatch)


def stacked(kind: str, *shape: int, seed: int) -> tuple[Stacked, Tensor]:
    """(weights of all experts, plain or e4m3 with scales; what they stand for in float64)."""
    weight, scale, matrix = coded(*shape, seed=seed)
    return (Stacked(weight, scale), matrix) if kind == "blocks" else (Stacked(matrix.float()), matrix.float().double())


def moved(maps: Stacked, device: str, dtype: torch.dtype) -> Stacked:
    if maps.scale is None:
        return Stacked(maps.weight.to(device, dtype))
    return Stacked(maps.weight.to(device), maps.scale.to(device))


def drawn_routes(num_tokens: int, spread: str) -> tuple[Tensor, Tensor]:
    """(experts int32, weights) of each token: drawn, or the same ones for all, which leaves the others without rows."""
    drawing = torch.rand(num_tokens, COUNT, generator=torch.Generator().manual_seed(5))
    if spread == "same":
        drawing = drawing[:1].expand(num_tokens, -1)
    return drawing.argsort(1)[:, :ACTIVE].int(), drawn(num_tokens, ACTIVE, seed=6).softmax(-1)


def by_token(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert of one token at a time, in float64."""
    out = torch.zeros_like(x)
    for token, experts in enumerate(chosen.tolist()):
        for slot, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weights[token, slot] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    return out


@pytest.mark.parametrize("kind", ["plain", "blocks"])
@pytest.mark.parametrize("spread", ["drawn", "same"])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_the_twin(kind: str, spread: str, num_tokens: int) -> None:
    gate_up, gate_up_matrix = stacked(kind, COUNT, 2 * 40, 24, seed=1)
    down, down_matrix = stacked(kind, COUNT, 24, 40, seed=3)
    chosen, weights = drawn_routes(num_tokens, spread)
    x = drawn(num_tokens, 24).double() / 4
    want = by_token(x, chosen, weights.double(), gate_up_matrix, down_matrix)
    wide = [moved(maps, "cpu", torch.float64) for maps in (gate_up, down)]
    assert error(expert_mlp(x, chosen, weights.double(), *wide), want) < 1e-13
    assert error(expert_mlp(x.float(), chosen, weights, gate_up, down), want) < 1e-5


def test_no_token_at_all() -> None:
    gate_up, down = Stacked(drawn(COUNT, 80, 24)), Stacked(drawn(COUNT, 24, 40))
    nobody = torch.zeros(0, ACTIVE)
    assert expert_mlp(torch.zeros(0, 24), nobody.int(), nobody, gate_up, down).shape == (0, 24)


@pytest.mark.parametrize("normed", [False, True])
def test_routes_are_the_largest_shares(normed: bool) -> None:
    logits = drawn(7, COUNT) * 3
    chosen, weights = route(logits, ACTIVE, normed)
    for token, row in enumerate(logits.double()):
        order = sorted(range(COUNT), key=lambda expert: -row[expert])[:ACTIVE]
        share = row.exp()[order] / (row[order].exp().sum() if normed else row.exp().sum())
        assert chosen[token].tolist() == order
        assert (weights[token] - share).abs().max() < 1e-6


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("normed", [False, True])
def test_routes_in_one_launch(device: str, dtype: torch.dtype, tolerance: float, normed: bool) -> None:
    from agentkv.kernels.experts_triton import route as fused

    logits = (drawn(7, 2 * 9) * 3).to(device, dtype)[:, 9:]
    logits[2] = logits[2, 0]  # all alike: the first ones
    chosen, weights = fused(logits, 4, normed)
    twin, want = route(logits.cpu().double(), 4, normed)
    assert chosen[2].tolist() == [0, 1, 2, 3]
    same = [token for token in range(7) if token != 2]
    assert torch.equal(chosen.cpu()[same], twin[same])
    assert (weights.cpu() - want).abs().max() < 1e-6


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES[::2])
@pytest.mark.parametrize("num_tokens", [1, 7, 1500])
def test_rows_are_grouped_in_order(device: str, dtype: torch.dtype, tolerance: float, num_tokens: int) -> None:
    from agentkv.kernels.experts_triton import group

    chosen = torch.randint(0, COUNT, (num_tokens, ACTIVE), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    chosen[chosen == 2] = 4  # nobody goes to this one
    with NoWaiting():
        order, starts = group(chosen.to(device), COUNT)
    flat = chosen.flatten().tolist()
    want = [[row for row, expert in enumerate(flat) if expert == each] for each in range(COUNT)]
    assert order.tolist() == [*chain(*want)]
    assert starts.tolist() == [sum(map(len, want[:each])) for each in range(COUNT + 1)]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("kind", ["plain", "blocks"])
@pytest.mark.parametrize(("num_tokens", "spread"), [(1, "drawn"), (9, "drawn"), (40, "same")])
def test_grouped_products(device: str, dtype: torch.dtype, tolerance: float, kind: str, num_tokens: int, spread: str) -> None:
    """Up to 40 rows of an expert where a tile has 16, in two parts; nothing waits for the host; no slot is left unwritten."""
    from agentkv.kernels import experts_triton as fused
    from agentkv.kernels.block_fp8_triton import Tile

    if kind == "plain" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no product of bfloat16")
    gate_up, gate_up_matrix = stacked(kind, COUNT, 2 * INNER, HIDDEN, seed=1)
    down, down_matrix = stacked(kind, COUNT, HIDDEN, INNER, seed=3)
    gate_up, down = moved(gate_up, device, dtype), moved(down, device, dtype)
    if kind == "plain":
        gate_up_matrix, down_matrix = gate_up.weight.double().cpu(), down.weight.double().cpu()
    chosen, weights = (each.to(device) for each in drawn_routes(num_tokens, spread))
    x = (drawn(num_tokens, 2 * HIDDEN) / 16).to(device, dtype)[:, HIDDEN:]
    want = by_token(x.double().cpu(), chosen, weights.double().cpu(), gate_up_matrix, down_matrix)
    tile = Tile(16, 64, 4, 2, parts=2)
    with NoWaiting():
        order, starts = fused.group(chosen, COUNT)
        inner = fused.gate_up(x, order, starts, *gate_up, tile)
        out = fused.down(inner, order, starts, weights, *down, tile)
    assert error(out.sum(1), want) < tolerance


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 16)
