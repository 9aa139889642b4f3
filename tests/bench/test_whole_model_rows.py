"""The rows of whole models in sizes for a CPU: every one runs, and its figure follows from what it keeps beside it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from agentkv.bench import gpu


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = "4x128K;8x32K, kivi;8x32K, fp8;64x8K;added to;chain;crossover;batch sweep"
    folder: Path = tmp_path_factory.mktemp("rows")
    told: list[str] = []
    result = gpu.run_gpu(out=folder, device="cpu", tiny=True, repeats=2, peers=False, rows=names, tell=told.append)
    assert [row["name"] in text for row, text in zip(result["rows"], told[1:], strict=True)] == [True] * len(result["rows"])
    assert [row.get("error") for row in result["rows"]] == [None] * len(result["rows"])
    assert (folder / "crossover.json").exists()
    return {row["name"]: row for row in result["rows"]}


def test_speed_and_share_of_the_gain_are_of_one_measurement(rows: dict[str, dict[str, Any]]) -> None:
    name = "decode step, qwen3-4b, 4x128K, omnikv, budget 4,096, "
    speed, share = rows[name + "against dense"], rows[name + "of the gain that the bytes allow"]
    assert speed["us"] == share["us"]
    assert speed["value"] == pytest.approx(speed["dense"]["median_us"] / speed["median_us"])
    allowed = sum(speed["dense"]["bytes"].values()) / sum(speed["bytes"].values())
    assert share["value"] == pytest.approx(speed["value"] / allowed)
    assert speed["full_layers"] == [0]


def test_a_method_that_reads_less_allows_a_gain(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        if name.endswith("against dense") and "bytes_allow" in row:
            assert row["bytes_allow"] > 1, name


def test_what_is_added_is_told_by_the_medians_of_steps(rows: dict[str, dict[str, Any]]) -> None:
    """One slow chunk of one prompt does not count."""
    found = [row for name, row in rows.items() if name.startswith("added")]
    assert [len(row["us"]) for row in found] == [2, 2, 2, 1]
    for row in found:
        both = [row["steps_us"], row["dense"]["steps_us"]]
        assert all(len(steps) >= 3 for prompts in both for steps in prompts)  # 160 tokens in chunks of 64
        assert [sum(steps) for steps in both[0]] == pytest.approx(row["us"])
        mine, dense = (sum(median(step) for step in zip(*prompts, strict=True)) for prompts in both)
        assert row["value"] == pytest.approx(mine / dense - 1)
    assert found[-1]["target"] is None
    assert found[-1]["met"]


def test_a_chain_forwards_its_new_tokens_alone(rows: dict[str, dict[str, Any]]) -> None:
    (row,) = (row for name, row in rows.items() if name.startswith("chain"))
    assert set(row["prefilled"]) == {16}
    assert row["value"] == pytest.approx(row["median_us"] / median(row["cold_us"]))


def test_served_steps_are_compared_with_the_device_and_with_dense(rows: dict[str, dict[str, Any]]) -> None:
    host, mixed = (
        rows[f"decode step, qwen3-4b, 64x8K, {name}"] for name in ("unhidden host time", "eight methods against dense")
    )
    assert host["value"] == pytest.approx(fmean(host["us"]) / host["device"]["median_us"] - 1)
    assert mixed["value"] == pytest.approx(fmean(mixed["us"]) / fmean(host["us"]))
    assert len(mixed["methods"]) == 8


def test_cells_say_where_a_method_pays(rows: dict[str, dict[str, Any]]) -> None:
    found = [row for name, row in rows.items() if name.startswith("crossover")]
    assert len(found) == 10
    for row in found:
        assert set(row["faster_from"]) == {"1", "2"}
        assert row["value"] == pytest.approx(max(cell["dense_us"] / cell["us"] for cell in row["cells"]))


def test_larger_batches_are_for_those_that_hold_less(rows: dict[str, dict[str, Any]]) -> None:
    (row,) = (row for name, row in rows.items() if name.startswith("batch sweep"))
    assert [each["rows"] for each in row["sweep"]] == [1, 2]
    assert row["largest"]["snapkv"]["256"] > row["largest"]["dense"]["256"] > row["largest"]["quest"]["256"]
