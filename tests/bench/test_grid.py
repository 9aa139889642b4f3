"""Grids, the lag study's page and its chart, with made-up results instead of a model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentkv.bench import acting, grid, pruning, pruning_page
from agentkv.bench.world import Condition, lags_of, plot_of, sizes_of, totals
from agentkv.errors import BadRequest
from agentkv.world.suite import summary
from agentkv.world.task import EVALUATION_SEEDS, FAMILIES


class Model:
    """What `about` asks of a runtime."""

    model_name, device, method = "micro", "cpu", "dense"


def made_up(runtime: Any, condition: Condition, concurrency: int) -> dict[str, Any]:
    """A world in which a task is solved when its lag is above 2; two of three results of 1,000 tokens are freed."""
    results = []
    for family in condition.families or FAMILIES:
        for seed in condition.seeds:
            solved = condition.lag is None or condition.lag > 2
            freed = 0 if condition.lag is None else 2000
            row = {"seed": seed, "family": family, "solved": solved, "rereads": 1, "freed": freed, "tokens": 4000, "lag": 3}
            results.append({**row, "prefilled": 3000 + seed % 2 * 200, "bytes": condition.max_bytes})
    return {**summary(results), "seconds": 0.1}


@pytest.mark.parametrize("part", grid.PARTS)
def test_cells_have_fresh_seeds_once_and_fit(part: str) -> None:
    cells = grid.cells(part, 200, 60)
    assert len({cell.name for cell in cells}) == len(cells)
    by_condition: dict[Condition, list[int]] = {}
    for cell in cells:
        condition = cell.condition
        assert 0 < len(condition.seeds) * len(condition.families or ()) <= 60
        assert all(grid.FIRST <= seed < EVALUATION_SEEDS for seed in condition.seeds)
        by_condition.setdefault(replace(condition, seeds=()), []).extend(condition.seeds)
    assert all(len(set(seeds)) == len(seeds) for seeds in by_condition.values())
    if part == "dense":
        assert len(by_condition) == 18
        assert all(len(seeds) == 200 for seeds in by_condition.values())


def test_the_lag_study_has_every_lag_in_every_way() -> None:
    found = {(cell.condition.lag, cell.condition.keep, cell.condition.mode) for cell in grid.cells("pruning", 6, 10)}
    ways = [("drop", "in_place"), ("edges:128", "in_place"), ("drop", "rebuild")]
    assert found == {(None, "drop", "in_place"), *((lag, *way) for lag in (0, 1, 2, 4, 8) for way in ways)}


def test_a_grid_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def counted(*args: Any) -> dict[str, Any]:
        played.append(args[1])
        return made_up(*args)

    monkeypatch.setattr(grid, "play", counted)
    cells = grid.cells("once", 4, 10)
    assert grid.run_cells(Model(), cells[:2], tmp_path, 1, 1e9, print) == {"done": 2, "left": 0}  # type: ignore[arg-type]
    assert grid.run_cells(Model(), cells, tmp_path, 1, 0.0, print) == {"done": 2, "left": len(cells) - 2}  # type: ignore[arg-type]
    assert grid.run_cells(Model(), cells, tmp_path, 1, 1e9, print) == {"done": len(cells), "left": 0}  # type: ignore[arg-type]
    assert len(played) == len(cells)
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(BadRequest, match="unknown part"):
        grid.cells("x", 1, 1)


def test_the_page_says_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "play", made_up)
    with pytest.raises(BadRequest, match="no cells"):
        pruning.report(tmp_path)
    cells = [cell for part in ("pruning", "once") for cell in grid.cells(part, 60, 12)]
    grid.run_cells(Model(), cells, tmp_path / "cells", 1, 1e9, lambda line: None)  # type: ignore[arg-type]
    made = pruning.write(tmp_path / "cells", tmp_path / "docs" / "pruning.md")
    assert made["conditions"]["rebuild-4"]["join"]["n"] == 10
    assert made["conditions"]["rebuild-4"]["all"]["success"] == 1
    assert made["conditions"]["in_place_drop-1"]["again"]["success"] == 0
    assert made["conditions"]["in_place_drop-1"]["again"]["freed"] == 2000
    once = {row["prune_after"]: row for row in made["once"]["rows"]}
    assert once[2]["gone"]["n"] == 30
    assert once[2]["kept"]["n"] == 0
    assert once[4]["gone"]["n"] == 0
    assert once[None]["kept"]["success"] == 1
    assert (once["all"]["gone"]["solved"], once["all"]["gone"]["n"]) == (0, 90)
    assert all(row["met"] for row in once.values())
    page = (tmp_path / "docs" / "pruning.md").read_text()
    assert "| rebuild | 8 | 100.0 % (" in page
    assert "| 2000 ± 0 | 1.00 ± 0.00 | 3100 ± " in page
    # ten seeds, half of them 3,000 and half 3,200: a deviation of 100 * sqrt(10 / 9), over sqrt(10), times 1.96
    assert made["conditions"]["none"]["once"]["plus_minus"]["prefilled"] == pytest.approx(1.96 * 100 / 3)
    assert made["view"]["rebuild"]["join"]["gone"] | {"interval": None} == {
        "solved": 0, "n": 30, "success": 0.0, "interval": None,
    }  # fmt: skip
    assert made["view"]["rebuild"]["join"]["kept"]["solved"] == 20
    assert "| once | an old result that cannot be had again | 4 (freed 2000, re-reads 1.00) |" in page
    assert json.loads((tmp_path / "docs" / "pruning.json").read_text()) == json.loads(json.dumps(made))
    chart = ET.fromstring((tmp_path / "docs" / "pruning.svg").read_text())
    lines = chart.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 * len(FAMILIES)
    assert all(len(line.attrib["points"].split()) == 6 for line in lines)


def test_bounds_that_are_missed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once solved although its result is gone, and not solved although it is in view: the verdicts turn."""

    def wrong(runtime: Any, condition: Condition, concurrency: int) -> dict[str, Any]:
        made = made_up(runtime, condition, concurrency)
        for row in made["results"]:
            row["solved"] = condition.lag in (None, 2)
        return made

    monkeypatch.setattr(grid, "play", wrong)
    cells = [cell for part in ("pruning", "once", "dense", "blank") for cell in grid.cells(part, 60, 60)]
    grid.run_cells(Model(), cells, tmp_path, 1, 1e9, lambda line: None)  # type: ignore[arg-type]
    made = pruning.report(tmp_path)
    met = {row["prune_after"]: row["met"] for row in made["once"]["rows"]}
    assert met == {None: True, 0: True, 1: True, 2: False, 4: False, 8: False, 10: False, "all": False}
    assert "more than 8 | more than 8 | more than 8 |" in pruning_page.markdown(made, "x.svg")
    assert "5 %: NOT met" in acting.markdown(acting.report(tmp_path))


def test_what_is_solved_by_family_dialect_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "play", made_up)
    with pytest.raises(BadRequest, match="no dense cells"):
        acting.report(tmp_path)
    cells = [cell for part in ("dense", "long", "window") for cell in grid.cells(part, 40, 20)]
    grid.run_cells(Model(), cells, tmp_path / "cells", 1, 1e9, lambda line: None)  # type: ignore[arg-type]
    made = acting.write(tmp_path / "cells", tmp_path / "docs" / "micro.md")
    assert made["dense"]["openhands"]["join"] == {"solved": 40, "n": 40, "success": 1.0, "interval": summary_interval(40, 40)}
    assert [row["n"] for row in made["lengths"]["native"]["once"].values()] == [0, 0, 40, 5]
    assert made["window"]["join"]["n"] == 8
    page = (tmp_path / "docs" / "micro.md").read_text()
    assert page.count("in each: met") == 3
    assert "| window of 1,024 | once | 8 of 8, 100.0 % (67.6 to 100.0) | 20 %: NOT met |" in page
    assert json.loads((tmp_path / "docs" / "micro.json").read_text()) == made


def summary_interval(solved: int, n: int) -> list[float]:
    """By the suite's own summary of so many results."""
    rows = [{"family": "once", "solved": at < solved} for at in range(n)]
    return list(summary(rows)["interval"])


def test_each_missing_cell_is_in_one_share() -> None:
    cells = grid.cells("dense", 4, 2)
    for workers in (1, 2, 5, 99):
        parts = grid.shares(cells, workers)
        assert sorted(cell.name for part in parts for cell in part) == sorted(cell.name for cell in cells)
        assert len(parts) == min(workers, len(cells))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert grid.shares([], 3) == []


def test_two_processes_play_what_is_missing(tmp_path: Path) -> None:
    """Two real processes with a small task each; a cell that is there is counted, and no model is opened for it again."""
    small = [Condition((seed,), ("chase",), max_bytes=2200) for seed in (10, 11, 12)]
    cells = [grid.Cell(f"small-{one.seeds[0]}", one) for one in small]
    (tmp_path / "small-12.json").write_text("there")
    play = partial(grid.play_cells, cells, out=tmp_path, concurrency=1, seconds=1e9, tell=print)
    assert play(grid.Engine(device="cpu", workers=2)) == {"done": 3, "left": 0}
    assert (tmp_path / "small-12.json").read_text() == "there"
    for seed in (10, 11):
        made = json.loads((tmp_path / f"small-{seed}.json").read_text())
        assert [row["seed"] for row in made["results"]] == [seed]
        assert made["model"] == "micro"
    for workers in (1, 2):
        assert play(grid.Engine("no such model", workers=workers)) == {"done": 3, "left": 0}


def test_a_plot_of_runs() -> None:
    runs = [{**made_up(None, Condition((1, 2), ("once",), lag=lag), 1), "prune_after": lag} for lag in (None, 0, 4)]
    chart = ET.fromstring(plot_of(runs))
    texts = [node.text for node in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in ("none", "0", "4")] == ["none", "0", "4"]


def test_totals_of_results_that_failed_early() -> None:
    rows = [{"solved": True, "rereads": 0, "freed": 10, "tokens": 100}, {"solved": False, "rereads": 2, "error": "x"}]
    assert totals(rows) | {"interval": None} == {
        "success": 0.5, "n": 2, "interval": None, "rereads": 1.0, "freed": 10.0, "tokens": 100.0,
    }  # fmt: skip


def test_options_as_text() -> None:
    assert lags_of("none,0, 8") == [None, 0, 8]
    assert sizes_of("8K") == (7000, 8192)
    assert sizes_of("2048-16384") == (2048, 16384)
    for bad in ("1", "8192-2048", "x", "2048-99999"):
        with pytest.raises(BadRequest):
            sizes_of(bad)
    with pytest.raises(BadRequest):
        lags_of("a")
    with pytest.raises(BadRequest, match="unknown dialect"):
        _ = Condition((1,), dialect="x").setting
