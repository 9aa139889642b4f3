"""The main job, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FIELDS = {
    "solved", "turns", "prompt_tokens", "prefilled_tokens", "cached_tokens", "pruned_tokens", "kv_bytes_peak",
    "kv_bytes_unpruned", "resumed",
}  # fmt: skip


def demo(folder: Path, *options: str) -> tuple[dict[str, object], str]:
    environment = {**os.environ, "AGENTKV_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "agentkv", "demo", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


@pytest.mark.parametrize("options", [(), ("--seed", "12")])
def test_demo_solves_prunes_and_resumes(tmp_path: Path, options: tuple[str, ...]) -> None:
    result, shown = demo(tmp_path, *options)
    assert set(result) >= FIELDS
    assert result["solved"] is True
    assert result["resumed"] is True
    assert result["prompt_tokens"] == result["prefilled_tokens"] + result["cached_tokens"]
    assert result["pruned_tokens"] > 0
    assert 0 < result["kv_bytes_peak"] < result["kv_bytes_unpruned"]
    assert result["turns"] >= 4
    assert "pruned" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"home"}, "the demo left files behind"
