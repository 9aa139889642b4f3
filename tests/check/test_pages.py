"""docs/adding-a-method.md and docs/methods.md: what they show runs, and what they list is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agentkv import cli
from agentkv.check.kit import CHECKS, check
from agentkv.check.models import tiny
from agentkv.check.subject import subjects
from agentkv.cli_methods import MARK, MARK_END, markdown
from agentkv.runtime import list_methods

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
GUIDE = (DOCS / "adding-a-method.md").read_text()
SECTIONS = {"small_keys.py": "## A method that evicts", "top_keys.py": "## A method that selects"}


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def section(heading: str) -> str:
    return GUIDE.split(heading)[1].split("\n## ")[0]


def write_files(folder: Path) -> None:
    """The blocks of each section, one after another, are a file."""
    for name, heading in SECTIONS.items():
        (folder / name).write_text("\n".join(blocks("python", section(heading))))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_guides_methods_pass_the_kit(name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    (method,) = subjects(str(tmp_path / name), {})
    outcomes = check(method, tiny("Qwen3ForCausalLM"))
    assert [each for each in outcomes if each.result == "failed"] == []
    assert {each.check for each in outcomes if each.result == "skipped"} <= {"append", "counts", "uneven"}


def test_every_block_of_the_guide_is_run() -> None:
    shown = [block for heading in SECTIONS.values() for kind in ("python", "sh") for block in blocks(kind, section(heading))]
    assert GUIDE.count("```") == 2 * len(shown)


@pytest.mark.parametrize("line", [line for block in blocks("sh", GUIDE) for line in block.splitlines()])
def test_the_guides_commands_are_right(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", shlex.split(line))
    monkeypatch.setattr("agentkv.check.kit.CHECKS", {"evicts": CHECKS["evicts"]})
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None)
    assert "passed" in capsys.readouterr().out


def test_the_guide_lists_the_checks() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("## What the kit checks"), re.MULTILINE) == list(CHECKS)


def test_the_table_of_methods_is_true() -> None:
    table = (DOCS / "methods.md").read_text().split(f"{MARK}\n")[1].split(MARK_END)[0]
    assert table == markdown(list_methods()) + "\n", "run: agentkv methods ls --doc docs/methods.md"
