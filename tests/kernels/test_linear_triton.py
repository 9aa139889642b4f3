"""Linear maps of a few tokens on a GPU, against float64, here in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

pytest.importorskip("triton")
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-6, id="interpreter", marks=only_interpreted),
    pytest.param("cuda", torch.bfloat16, 4e-3, marks=pytest.mark.gpu),
]
TILES = {
    "flat": (32, 64, 1, 3, 2),
    "ways": (16, 32, 4, 3, 4),
    "split": (16, 32, 2, 3, 2, 2),
    "ahead": (64, 128, 1, 2, 4, 1, 4),
}
"""outs, ins, ways, stages, warps, split, ahead."""


@pytest.fixture(autouse=True)
def interpreter_takes_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_scalars(monkeypatch)


def drawn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("num_tokens", "biased"), [(1, False), (5, True), (16, True)])
def test_product(device: str, dtype: torch.dtype, tolerance: float, name: str, num_tokens: int, biased: bool) -> None:
    """A row of x that is not dense, and a number of results that no tile divides."""
    from agentkv.kernels.linear_triton import Tile, stream

    x = drawn(device, dtype, num_tokens, 512)[:, 128:384]
    weight, bias = drawn(device, dtype, 200, 256, seed=1), drawn(device, dtype, 200, seed=2)
    got = stream(x, weight, bias if biased else None, Tile(*TILES[name])).cpu().double()
    want = (x.double() @ weight.double().T).cpu() + (bias.double().cpu() if biased else 0)
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("name", ["flat", "ways", "ahead"])
@pytest.mark.parametrize("biased", [False, True])
def test_gated(device: str, dtype: torch.dtype, tolerance: float, name: str, biased: bool) -> None:
    from agentkv.kernels.linear_triton import Tile, stream

    x, weight = drawn(device, dtype, 3, 256), drawn(device, dtype, 152, 256, seed=1) / 8
    bias = drawn(device, dtype, 152, seed=2) if biased else None
    wide = (x.double() @ weight.double().T).cpu() + (0 if bias is None else bias.double().cpu())
    first, second = wide.chunk(2, dim=1)
    got = stream(x, weight, bias, Tile(*TILES[name]), gated=True).cpu().double()
    want = first / (1 + (-first).exp()) * second
    assert got.shape == want.shape
    assert (got - want).norm() <= 3 * tolerance * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILES)
def test_a_token_is_the_same_whatever_the_batch(name: str) -> None:
    from agentkv.kernels.linear_triton import Tile, stream

    x, weight = drawn("cuda", torch.bfloat16, 16, 2560), drawn("cuda", torch.bfloat16, 320, 2560, seed=1)
    whole = stream(x, weight, None, Tile(*TILES[name]))
    for first, count in ((0, 1), (3, 1), (7, 2), (2, 8), (1, 15)):
        part = stream(x[first : first + count], weight, None, Tile(*TILES[name]))
        assert torch.equal(part, whole[first : first + count])


def test_the_table_names_tiles_that_fit_their_shapes() -> None:
    import json

    from agentkv.kernels.linear_triton import TABLE, Tile

    for tiles in json.loads(TABLE.read_text()).values():
        for shape, fields in tiles.items():
            _, in_size = (int(size) for size in shape.removesuffix(" gated").split("x"))
            tile = Tile(**fields)
            share, rest = divmod(in_size, tile.split)
            assert rest == 0
            assert share % (tile.ins * tile.ways) == 0
            assert tile.ahead * 64 <= share


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 18)


@pytest.mark.gpu
def test_the_table_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentkv.kernels import linear_triton
    from agentkv.kernels.gated_linear import gated_linear
    from agentkv.kernels.linear import linear

    called: list[Any] = []
    original = linear_triton.stream
    monkeypatch.setattr(linear_triton, "stream", lambda *given, **how: (called.append(given[3]), original(*given, **how))[1])
    flat, ways = linear_triton.Tile(*TILES["flat"]), linear_triton.Tile(*TILES["ways"])
    monkeypatch.setattr(linear_triton, "_tiles", lambda device: {"200x256": flat, "200x256 gated": ways})
    x, weight = drawn("cuda", torch.bfloat16, 17, 256), drawn("cuda", torch.bfloat16, 200, 256, seed=1)
    linear(x[:16], weight)
    linear(x, weight)  # too many tokens
    linear(x[:3].float(), weight.float())
    linear(x[:3], weight[:100])
    gated_linear(x[:3], weight)
    gated_linear(x, weight)
    gated_linear(x[:3], weight, None, torch.nn.functional.gelu)
    assert called == [flat, ways, flat]
