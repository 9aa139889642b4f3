"""The examples run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, home: Path, *arguments: str) -> str:
    environment = {**os.environ, "AGENTKV_HOME": str(home)}
    command = [sys.executable, str(FOLDER / name), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=200).stdout


def test_session(tmp_path: Path) -> None:
    out = run("session.py", tmp_path)
    assert "solved: True" in out
    assert "pruned" in out
    assert "the fork says: 2573" in out


def test_http_session(tmp_path: Path, base_url: str) -> None:
    assert "prompt_tokens=" in run("http_session.py", tmp_path, base_url)


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in FOLDER.glob("*.py") if f'"{path.name}"' not in text] == []
