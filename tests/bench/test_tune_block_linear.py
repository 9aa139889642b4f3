"""Tuning of block-FP8 linear maps, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

from agentkv.bench import tune_block_linear
from agentkv.bench.tune_block_linear import tune

pytest.importorskip("triton")


@only_interpreted
def test_tiles_are_right_before_they_are_ranked_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from agentkv.kernels import block_linear_triton
    from agentkv.kernels.block_linear_triton import Tile

    numpy_scalars(monkeypatch)
    few, wrong, many = Tile(8, 64, 2, 0, 4), Tile(8, 32, 2, 3, 2), Tile(32, 64, 1, 3, 4, 2)
    product = block_linear_triton.few_rows

    def few_rows(x: Tensor, weight: Tensor, scale: Tensor, bias: None, tile: Tile) -> Tensor:
        return product(x, weight, scale, bias, tile) * (1 + (tile.outs == wrong.outs))

    monkeypatch.setattr(block_linear_triton, "few_rows", few_rows)
    monkeypatch.setattr(tune_block_linear, "MEASURED", {16: (1, 8), 32: (32,)})
    monkeypatch.setattr(tune_block_linear, "_PROGRAMS", (1, 8))
    monkeypatch.setattr(tune_block_linear, "few_tiles", lambda: iter([few, wrong]))
    monkeypatch.setattr(
        tune_block_linear, "many_tiles", lambda most: iter([many, many._replace(outs=48), many._replace(turn=4)])
    )
    told: list[str] = []
    result: dict[str, Any] = tune(out=tmp_path, repeats=1, device="cpu", tiny=True, maps=((128, 512),), tell=told.append)
    assert json.loads((tmp_path / "tune-block-linear.json").read_text()) == result
    first, second = result["shapes"]
    assert first["best"] == few._asdict()
    assert {row.get("why_not") for row in first["rows"] if row["tile"]["outs"] == wrong.outs} == {"wrong"}
    assert [row["tile"] for row in second["rows"]] == [many._asdict()]  # neither 48 outputs nor four blocks of a share of two
    (table,) = json.loads((tmp_path / "linear_block_fp8.json").read_text()).values()
    assert table == {"128x512": {"16": first["best"], "32": second["best"]}}
    assert len(told) == 2


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 1)
