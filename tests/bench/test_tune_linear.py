"""Tuning of linear maps, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

from agentkv.bench import tune_linear
from agentkv.bench.tune_linear import Shape, tune

pytest.importorskip("triton")


@only_interpreted
def test_tiles_are_right_before_they_are_ranked_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from agentkv.kernels import linear_triton
    from agentkv.kernels.linear_triton import Tile

    numpy_scalars(monkeypatch)
    right, wrong, product = Tile(64, 128, 1, 3, 4), Tile(16, 64, 2, 3, 2), linear_triton.stream

    def stream(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, gated: bool) -> Tensor:
        return product(x, weight, bias, tile, gated=gated) * (1 + (tile.outs == wrong.outs))

    monkeypatch.setattr(linear_triton, "stream", stream)
    monkeypatch.setattr(tune_linear, "ROTATED", 1 << 16)
    monkeypatch.setattr(tune_linear, "tiles", lambda: [right, wrong])
    result = tune(
        out=tmp_path, repeats=1, device="cpu", tiny=True, shapes=(Shape(64, 256, "a"), Shape(104, 512, "b", gated=True))
    )
    assert json.loads((tmp_path / "tune-linear.json").read_text()) == result
    for shape in result["shapes"]:
        assert shape["best"]["outs"] == right.outs
        assert {row.get("why_not") for row in shape["rows"] if row["tile"]["outs"] == wrong.outs} == {"wrong"}
        timed = [row["us"] for row in shape["rows"] if row["tokens"] == 1 and "us" in row]
        assert timed == sorted(timed)
        in_size = int(shape["shape"].removesuffix(" gated").split("x")[1])
        assert 0 < max(row["tile"]["ahead"] for row in shape["rows"]) * 64 <= in_size
        assert max(row["tile"]["split"] for row in shape["rows"]) == (1 if "gated" in shape["shape"] else 2)
    (table,) = json.loads((tmp_path / "linear.json").read_text()).values()
    assert set(table) == {shape["shape"] for shape in result["shapes"] if shape["taken"]}


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 1)
