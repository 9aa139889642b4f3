"""Options of `agentkv bench` that cannot work are refused before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentkv.bench import world
from agentkv.bench.grid import run_cells
from agentkv.cli import app
from agentkv.errors import BadRequest


@pytest.fixture(autouse=True)
def nothing_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(world, "Runtime", refuse)


@pytest.mark.parametrize("options", [["--keep", "bad"], ["--mode", "bad"], ["--window", "0"], ["--lags", "-1"]])
def test_conditions_that_do_not_exist(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "world", "--seeds", "0", *options])
    assert isinstance(done.exception, BadRequest), done.output


@pytest.mark.parametrize("options", [["--batches", "0"], ["--steps", "1"], ["--rounds", "0"]])
def test_constrained_needs_something_to_measure(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "constrained", *options])
    assert isinstance(done.exception, BadRequest), done.output


@pytest.mark.parametrize("name", ["missing/x.json", "."])
def test_a_result_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    for command in (["world", "--out"], ["world", "--plot"], ["engine", "--out"], ["lookup", "--out"]):
        done = CliRunner().invoke(app, ["bench", *command, str(tmp_path / name)])
        assert done.exit_code == 2
        assert "no file can be written" in done.output


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot be made"):
        run_cells(None, [], tmp_path / "file", 1, 1.0, print)  # type: ignore[arg-type]
