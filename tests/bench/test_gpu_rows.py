"""The rows and the settings of GPU benchmarks, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted

from agentkv.bench import gpu
from agentkv.bench.paged_shapes import SHAPES
from agentkv.bench.tune import tune


@only_interpreted
def test_real_rows_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numpy_scalars(monkeypatch)
    rows = "1x32K 32/8;per-head;chunked;4-bit;FP8"
    result = gpu.run_gpu(out=tmp_path, device="cpu", tiny=True, repeats=1, rows=rows)
    assert [row.get("error") for row in result["rows"]] == [None] * 5
    assert {row["name"].split(",")[0].split(" 1x")[0] for row in result["rows"]} == {
        "paged decode attention", "per-head tables", "chunked prefill attention",
        "4-bit decode attention", "FP8 decode attention",
    }  # fmt: skip
    for row in result["rows"]:
        assert {"us", "median_us", "value", "target", "met", "ceiling", "seconds", "date", "commit"} <= row.keys()


@only_interpreted
def test_settings_are_ranked_by_their_times_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numpy_scalars(monkeypatch)
    said: list[str] = []
    shapes = (SHAPES[3], SHAPES[4])
    result = tune(out=tmp_path, repeats=1, device="cpu", tiny=True, shapes=shapes, tell=said.append)
    assert json.loads((tmp_path / "tune.json").read_text()) == result
    for shape in result["shapes"]:
        us = [row["us"] for row in shape["scheduled"]]
        assert us == sorted(us)
        assert len(us) == 2
    assert said[-1].count("programs, few, most, long, merge") == 2


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 2)
