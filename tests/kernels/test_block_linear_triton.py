"""Block-FP8 linear maps of few rows, against the matrix in float64; the kernel in Triton's interpreter or on a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from coded_weights import coded, drawn, error
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted

pytest.importorskip("triton")
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, id="interpreter", marks=only_interpreted),
    pytest.param("cuda", torch.bfloat16, 6e-3, marks=pytest.mark.gpu),
]
TILES = {
    "held": (8, 16, 4, 0, 4),
    "held, in shares": (8, 32, 2, 0, 4, 3),
    "ways": (8, 32, 2, 3, 2),
    "ways, in shares": (8, 64, 4, 3, 4, 2),
    "turns": (8, 64, 1, 3, 4, 1, 5),
    "turns, in shares": (8, 64, 1, 2, 4, 2),
    "terms": (8, 64, 1, 3, 4, 1, 1, True),
    "terms, in shares": (16, 32, 1, 3, 4, 4, 1, True),
}
"""rows, outs, ways, stages, warps, split, turn, terms."""


@pytest.fixture(autouse=True)
def interpreter_takes_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_scalars(monkeypatch)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("rows", "biased"), [(1, True), (11, False)])
def test_product(device: str, dtype: torch.dtype, tolerance: float, name: str, rows: int, biased: bool) -> None:
    """Five blocks of inputs, which neither shares nor ways divide, in rows that are not dense."""
    from agentkv.kernels.block_linear_triton import Tile, few_rows

    weight, scale, matrix = coded(192, 640)
    x = drawn(rows, 1280).to(device, dtype)[:, 640:]
    bias = drawn(192, seed=3).to(device, dtype) if biased else None
    want = x.double().cpu() @ matrix.T + (0 if bias is None else bias.double().cpu())
    tile = Tile(*TILES[name])
    got = few_rows(x, weight.to(device), scale.to(device), bias, tile)
    assert error(got, want) < max(tolerance, 2**-9 * tile.terms)  # values of terms are within 2**-8, half of it on average


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILES)
def test_a_row_is_the_same_whatever_the_others(name: str) -> None:
    """Up to 16 of them; and in each run."""
    from agentkv.kernels.block_linear_triton import Tile, few_rows

    weight, scale, _ = coded(640, 2560)  # 20 blocks of inputs
    weight, scale, x = weight.cuda(), scale.cuda(), drawn(16, 2560).to("cuda", torch.bfloat16)
    whole = few_rows(x, weight, scale, None, Tile(*TILES[name]))
    for first, count in ((0, 1), (3, 1), (7, 2), (2, 8), (1, 15), (0, 16)):
        part = few_rows(x[first : first + count], weight, scale, None, Tile(*TILES[name]))
        assert torch.equal(part, whole[first : first + count])


@pytest.mark.gpu
def test_the_tiles_of_this_gpu() -> None:
    """Each that the table has, with as many rows as it is for; up to 16, rows are the same alone."""
    from agentkv.kernels.block_fp8 import dequantize_blocks
    from agentkv.kernels.block_linear_triton import ALIKE, _tiles, few_rows

    for shape, tiles in _tiles(torch.device("cuda", 0)).items():
        outs, ins = (int(size) for size in shape.split("x"))
        weight = (torch.randn(outs, ins, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.rand(outs // 128, ins // 128, device="cuda") + 1e-3
        matrix = dequantize_blocks(weight, scale, torch.float64)
        for most in tiles:
            x = torch.randn(most, ins, device="cuda").to(torch.bfloat16)
            got = few_rows(x, weight, scale)
            assert error(got, (x.double() @ matrix.T).cpu()) < 6e-3
            if most <= ALIKE:
                assert torch.equal(few_rows(x[3:4], weight, scale), got[3:4])


def test_the_table_names_tiles_that_fit_their_shapes() -> None:
    from agentkv.kernels.block_linear_triton import ALIKE, BLOCK, TABLE, Tile

    for shapes in json.loads(TABLE.read_text()).values():
        for shape, tiles in shapes.items():
            out_size, in_size = (int(size) for size in shape.split("x"))
            limits = [int(most) for most in tiles]
            assert limits == sorted(limits)
            assert limits[0] == ALIKE  # or one tile would not serve all that are alike
            for fields in tiles.values():
                tile = Tile(**fields)
                shares = in_size // BLOCK / tile.split
                assert out_size % tile.outs == 0
                assert tile.outs <= BLOCK
                assert tile.turn == 1 or (tile.ways == 1 and tile.stages > 0 and shares % tile.turn == 0)
                assert tile.ways == 1 or not tile.terms


def test_the_tile_of_the_fewest_rows_that_covers_them_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentkv.kernels import block_linear_triton as fused

    few, many = fused.Tile(8, 16, 4, 0, 4), fused.Tile(64, 64, 1, 3, 4)
    monkeypatch.setattr(fused, "_tiles", lambda device: {"256x128": {16: few, 64: many}})
    x, weight = torch.empty(65, 128, dtype=torch.bfloat16), torch.empty(256, 128, dtype=torch.float8_e4m3fn)
    assert [fused.tile_for(x[:rows], weight) for rows in (1, 16, 17, 64)] == [few, few, many, many]
    assert fused.tile_for(x, weight) == fused.usual(x, 256)
    assert fused.tile_for(x[:8], weight[:128]) == fused.usual(x[:8], 128)
    assert fused.tile_for(x[:8].float(), weight) == fused.usual(x[:8].float(), 256)  # wider than what was measured


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 16)
