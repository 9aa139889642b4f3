"""Warming up: rounds by method and rows, and nothing that stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentkv import Runtime
from agentkv.cli import app
from agentkv.engine.core import Batch
from agentkv.engine.runner import ModelRunner
from agentkv.errors import BadRequest


def test_rounds_by_method_and_rows_and_nothing_stays() -> None:
    with Runtime("micro", db=None, memory="64MiB", methods=["streamingllm:recent=64"]) as runtime:
        took = runtime.warm_up(rows=(1, 3), tokens=100)
        assert [(each["method"], each["rows"]) for each in took] == [
            ("dense", 1),
            ("dense", 3),
            ("streamingllm:recent=64", 1),
            ("streamingllm:recent=64", 3),
        ]
        stats = runtime.stats()
        assert stats["arena"]["free"] == stats["arena"]["total"]
        assert stats["queue"] == {"running": 0, "waiting": 0, "finished": 0}
        runtime.check()
        session = runtime.session()
        session.add_user("hello")
        assert session.generate(max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("window", [2, 20, 26])
def test_a_window_may_be_shorter_than_what_is_read(window: int) -> None:
    with Runtime("micro", db=None, memory="16MiB", window=window) as runtime:
        (took,) = runtime.warm_up(rows=[2], tokens=100)
        assert took["rows"] == 2
        runtime.check()


def test_prompts_are_read_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = set[tuple[int, int]]()
    launch = ModelRunner.launch

    def watched(self: ModelRunner, batch: Batch, *given: Any) -> Any:
        decodes = sum(work.decodes for work in batch.rows)
        if decodes < len(batch.rows):
            mixed.add((decodes, sum(len(work.tokens) for work in batch.rows if not work.decodes)))
        return launch(self, batch, *given)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    with Runtime("micro", db=None, memory="64MiB") as runtime:
        runtime.warm_up(rows=[1], tokens=64)
    assert {(1, 4), (2, 64)} <= mixed


def test_what_does_not_fit_is_less() -> None:
    with Runtime("micro", db=None, memory="16MiB", window=300) as runtime:
        (took,) = runtime.warm_up(rows=[500], tokens=10_000)
        assert 0 < took["rows"] <= 32
        runtime.check()


@pytest.mark.parametrize(("rows", "tokens"), [((0,), 5), ((1,), 0), ((True,), 5), (("a",), 5)])
def test_numbers(rows: tuple[object, ...], tokens: int) -> None:
    with Runtime("micro", db=None, memory="16MiB") as runtime, pytest.raises(BadRequest):
        runtime.warm_up(rows, tokens)  # type: ignore[arg-type]


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # other tests compile into the one that all share
    found = CliRunner().invoke(app, ["warmup", "micro", "--rows", "1,2", "--tokens", "40", "--memory", "16MiB", "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.output.splitlines()[-1])
    assert [each["rows"] for each in report["rounds"]] == [1, 2]
    assert report["graphs"] is None
    assert report["compiled"] == 0  # a CPU's kernels are built when the engine starts


def test_a_server_is_warm_before_it_is_told_where_it_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = list[str]()
    monkeypatch.setattr("uvicorn.run", lambda app, **options: served.append(options["host"]))
    arguments = ["serve", "--warmup", "--memory", "16MiB", "--port", "0", "--db", str(tmp_path / "sessions.db")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert served == ["127.0.0.1"]
    assert result.output.index("warm after") < result.output.index("http://127.0.0.1")
