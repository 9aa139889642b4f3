"""`agentkv methods ls` and `agentkv methods check`: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentkv import cli, methods
from agentkv.check import kit
from agentkv.check.outcome import Failed
from agentkv.runtime import list_methods

FOLDER = Path(__file__).parent


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """argv -> (exit code, last line of stdout as JSON)."""

    def run(*argv: str) -> tuple[int, Any]:
        monkeypatch.setattr("sys.argv", ["agentkv", *argv])
        try:
            code = cli.guarded(cli.app)
        except SystemExit as left:
            code = int(left.code or 0)
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checks instead of all."""
    monkeypatch.setattr(kit, "CHECKS", {name: kit.CHECKS[name] for name in ("evicts", "counts")})


def test_a_name_is_checked_on_both_tiny_models(command: Any, quick: None) -> None:
    code, said = command("methods", "check", "dense", "--json")
    assert (code, said["passed"], len(said["reports"])) == (0, True, 2)
    assert [each["result"] for each in said["reports"][0]["checks"]] == ["passed", "skipped"]


def test_every_method_of_a_file_is_checked(command: Any, quick: None) -> None:
    code, said = command("methods", "check", str(FOLDER / "toys.py"), "--option", "budget=40", "--json")
    assert code == 0
    assert [each["method"] for each in said["reports"]] == ["Edges(budget=40, first=20)"] * 2 + ["Newest(budget=40)"] * 2


def test_a_failed_check_is_exit_code_1(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(case: Any) -> str:
        raise Failed("of course")

    monkeypatch.setattr(kit, "CHECKS", {"never": never})
    code, said = command("methods", "check", "dense", "--json")
    assert (code, said["passed"]) == (1, False)
    assert said["reports"][0]["checks"] == [{"check": "never", "result": "failed", "detail": "of course"}]


@pytest.mark.parametrize(
    "argv",
    [
        ("nobody",),
        ("nowhere.py",),
        (__file__,),
        ("dense", "--option", "budget=3"),
        ("dense", "--option", "budget"),
        (str(FOLDER / "toys.py"), "--option", "budget=0"),
        (str(FOLDER / "toys.py"), "--option", "first=3"),
        ("dense", "--model", "nowhere"),
        ("dense", "--device", "abacus"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(command: Any, argv: tuple[str, ...], quick: None) -> None:
    code, said = command("methods", "check", *argv, "--json")
    assert code in (1, 2)
    assert said["error"]["message"]


def test_a_file_that_raises_is_bad_input(command: Any, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("1 / 0\n")
    code, said = command("methods", "check", str(tmp_path / "raises.py"), "--json")
    assert code == 2
    assert "ZeroDivisionError" in said["error"]["message"]


def test_the_listing_is_one_object(command: Any) -> None:
    code, said = command("methods", "--json")
    assert (code, said) == command("methods", "ls", "--json")
    assert [row["name"] for row in said["methods"]] == list(methods.NAMES)
    keys = {"name", "family", "paper", "exactness", "reuse", "options", "bytes_per_token", "models", "preparation"}
    assert all(keys <= row.keys() for row in said["methods"])


def test_bytes_per_token_in_closed_form() -> None:
    (dense,) = (row for row in list_methods() if row["name"] == "dense")
    assert dense["bytes_per_token"] == 36 * 8 * 128 * 2 * 2
