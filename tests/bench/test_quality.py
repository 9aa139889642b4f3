"""The retrieval study: its texts, its cells, its tables with made-up results, and a small one with `micro`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from agentkv import methods
from agentkv.bench import budgets, quality, quality_page, retrieval
from agentkv.bench.grid import Engine
from agentkv.errors import BadRequest
from agentkv.runtime import Runtime
from agentkv.world import trajectory
from agentkv.world.task import EVALUATION_SEEDS
from agentkv.world.trajectory import Event

SMALL = Engine(device="cpu", memory="400MiB")
CONDITIONS = {"date": "2030-01-02T03:04:05+00:00", "device": "a device", "commit": None}


def test_each_question_is_about_a_record_of_its_own_that_stands_once() -> None:
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(retrieval.FIRST, retrieval.FIRST + 36):
        given = retrieval.reading(seed)
        places = []
        for fact in given.asked:
            found = [i for i, (_, body) in enumerate(given.files) if f"{fact.name} {fact.value}" in body.split("\n")]
            assert len(found) == 1
            assert sum(body.split("\n").count(f"{fact.name} {fact.value}") for _, body in given.files) == 1
            assert sum(line.startswith(f"{fact.name} ") for _, body in given.files for line in body.split("\n")) == 1
            places += found
        assert sorted(places) == [0, 1, 2, 3]
        pairs[tuple(places[:2])] += 1
    assert len(pairs) == 12
    firsts = Counter(first for first, _ in pairs.elements())
    assert set(firsts.values()) == {9}
    assert retrieval.reading(7) == retrieval.reading(7)
    for seed in (-1, EVALUATION_SEEDS):
        with pytest.raises(BadRequest, match="evaluation seeds"):
            retrieval.reading(seed)


def test_a_session_says_what_a_drill_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the first prompt are those of the training renderer's text."""
    monkeypatch.setattr(retrieval, "BODY", 200)
    given = retrieval.reading(retrieval.FIRST)
    events = [Event("user", "Read " + ", ".join(f"{name}.txt" for name, _ in given.files) + ".")]
    for name, body in given.files:
        events += [Event("call", f"cat {name}.txt"), Event("result", body)]
    events += [Event("text", "done"), Event("user", f"code of {given.asked[0].name}?")]
    with Runtime("micro", db=None, device="cpu", memory="64MiB", lookup=0) as runtime:
        result = retrieval.ask(runtime, given)
    assert result["tokens"] == len(trajectory.encode(events).ids) + len("?assistant\n")  # <|im_start|> is one token
    assert result["right"] == [answer == fact.value for answer, fact in zip(result["answers"], given.asked, strict=True)]
    assert all(result["right"])


def test_every_method_that_ships_is_compared_and_its_options_follow_the_budget() -> None:
    assert {budgets.methods_name(column) for column in budgets.COLUMNS} == set(methods.NAMES)
    for column, budget in budgets.pairs(budgets.COLUMNS, budgets.BUDGETS):
        made = column.made(budget, None)
        assert column.bounded == (budget is not None)
        numbers = [value for value in vars(made).values() if isinstance(value, int | float) and not isinstance(value, bool)]
        if budget is not None:  # as one option, as two halves, beside four sinks, or as a share
            assert {budget, budget // 2, budget - 4, budget / 8192} & set(numbers)
    assert {column.name for column in budgets.COLUMNS} >= {budgets.DENSE, *budgets.NEAR, *budgets.RECENT, *budgets.TWICE}


def test_the_most_telling_conditions_come_first_and_seeds_are_shared() -> None:
    every = quality.cells(budgets.COLUMNS, budgets.BUDGETS, 70, 50)
    assert len({cell.name for some in every for cell in some}) == sum(map(len, every))
    assert every[0][0].column.name == "dense"
    assert [some[0].budget for some in every if some[0].budget] == sorted(
        (some[0].budget for some in every if some[0].budget), key=budgets.BUDGETS.index
    )
    for some in every:
        assert [seed for cell in some for seed in cell.seeds] == [*range(retrieval.FIRST, retrieval.FIRST + 70)]
        assert max(len(cell.seeds) for cell in some) == 50


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: budgets.chosen("quest,x"), "unknown method 'x'"),
        (lambda: budgets.budgets_of("2048,x"), "tokens, 64 to 8191"),
        (lambda: budgets.budgets_of("9000"), "tokens, 64 to 8191"),
        (lambda: quality.run_quality(out=Path("x"), engine=Engine(), seeds=0, tell=print), "at least 1"),
        (lambda: quality_page.report(Path("nowhere")), "has no cells"),
    ],
)
def test_bad_input_is_refused(call: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        call()


def made_up(hits: dict[str, Sequence[int]]) -> Any:
    """`ask_all` without a model: so many of four sessions answer the first and the second question, none all four; a method
    that is not there fails."""

    def answers(runtime: Any, seeds: Sequence[int], concurrency: int = 1) -> dict[str, Any]:
        first, second = hits[runtime.name]
        rows = [
            {"seed": s, "tokens": 8100 + s % 2, "right": [i < first, i < second, False, i < 0]} for i, s in enumerate(seeds)
        ]
        return {"results": rows, "seconds": 0.1}

    return answers


class Stub:
    """A runtime that knows its method's name."""

    device, model_name = "cpu", "micro"

    def __init__(self, model: str, *, method: Any, **options: Any) -> None:
        self.name = type(method).__name__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def study(folder: Path, monkeypatch: pytest.MonkeyPatch, hits: dict[str, Sequence[int]], **options: Any) -> dict[str, int]:
    monkeypatch.setattr(quality, "Runtime", Stub)
    monkeypatch.setattr(quality, "machine", lambda device: dict(CONDITIONS))
    monkeypatch.setattr(quality, "ask_all", made_up(hits))
    given = {"methods": "dense,quest,streamingllm,snapkv", "budgets": "2048,512", "seeds": 4, "chunk": 4, **options}
    return quality.run_quality(out=folder, engine=SMALL, tell=lambda line: None, **given)


def test_a_study_goes_on_where_it_stopped_and_a_failure_costs_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = {"Dense": (4, 4), "StreamingLLM": (1, 3), "SnapKV": (4, 1)}
    assert study(tmp_path, monkeypatch, hits, seconds=0.0) == {"done": 0, "failed": 0, "left": 9}
    assert study(tmp_path, monkeypatch, hits) == {"done": 7, "failed": 2, "left": 0}
    made = quality_page.report(tmp_path)
    assert set(made["errors"]) == {"quest-2048-20000", "quest-512-20000"}
    assert "KeyError" in made["errors"]["quest-512-20000"]
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("dense-*")}
    assert study(tmp_path, monkeypatch, hits | {"Quest": (4, 4)}) == {"done": 9, "failed": 0, "left": 0}
    assert before == {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("dense-*")}
    assert not list(tmp_path.glob("*.part"))


def test_tables_say_what_the_cells_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(tmp_path, monkeypatch, {"Dense": (4, 4), "Quest": (4, 3), "StreamingLLM": (1, 3), "SnapKV": (4, 1)})
    made = quality_page.report(tmp_path)
    assert made["tokens"] == [8100, 8101]
    assert made["rows"]["single"]["quest"]["2048"]["solved"] == 4
    assert made["rows"]["second"]["quest"]["2048"]["solved"] == 3
    assert made["rows"]["multi"]["quest"]["2048"]["solved"] == 0
    assert made["rows"]["single"]["streamingllm"]["512"]["interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)
    verdicts = {(one["kind"], one["column"], one["budget"]): one["met"] for one in made["bounds"]}
    assert verdicts["single", "dense", "all"]
    assert verdicts["single", "quest", "2048"]
    assert not verdicts["second", "quest", "2048"]  # 75 % of dense
    assert verdicts["single", "streamingllm", "2048"]  # 25 %, at most 30 %
    assert not verdicts["single", "streamingllm", "512"]  # 25 %, at most 11.25 %
    page = quality_page.markdown(made)
    assert "| `streamingllm` |  | 25.0 % (4.6 to 69.9) |  | 25.0 % (4.6 to 69.9) |  |  |\n" in page
    assert "| `dense` |  |  |  |  |  | 100.0 % (51.0 to 100.0) |\n" in page
    assert "| `snapkv` | 512 | 4 of 4, 100.0 % (51.0 to 100.0) | 1 of 4, 25.0 % (4.6 to 69.9) |\n" in page
    assert "| second | `quest` | 2,048 | 75.0 % | at least 95.0 % | NOT met |\n" in page


def test_the_section_takes_its_place_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = "\nnew\n"
    marked = quality_page.placed("# A\n\n<!-- retrieval -->\nold\n<!-- /retrieval -->\n\n## B\n", section)
    assert marked == "# A\n\n<!-- retrieval -->\n\nnew\n<!-- /retrieval -->\n\n## B\n"
    titled = quality_page.placed("# A\n\n## Retrieval\n\nnot yet.\n\n## B\n\nb\n", section)
    assert titled == "# A\n\n## Retrieval\n\n<!-- retrieval -->\n\nnew\n<!-- /retrieval -->\n\n## B\n\nb\n"
    assert quality_page.placed(titled, section) == titled
    appended = quality_page.placed("# A\n", section)
    assert appended == "# A\n\n## Retrieval\n\n<!-- retrieval -->\n\nnew\n<!-- /retrieval -->\n"
    cells = tmp_path / "cells"
    study(cells, monkeypatch, {"Dense": (4, 4), "Quest": (4, 3), "StreamingLLM": (1, 3), "SnapKV": (4, 1)})
    made = quality_page.report(cells)
    quality_page.write(made, tmp_path / "methods.md")
    assert (tmp_path / "methods.md").read_text().startswith("# Attention methods\n")
    assert json.loads((tmp_path / "bench" / "quality.json").read_text()) == made


def test_a_process_that_dies_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "play", os._exit)  # called in a way that it refuses
    given = {"methods": "dense", "seeds": 2, "chunk": 1, "tell": lambda line: None}
    counts = quality.run_quality(out=tmp_path, engine=Engine(device="cpu", workers=2), **given)
    assert counts == {"done": 0, "failed": 1, "left": 1}
    assert "its process ended with 1" in (tmp_path / "dense-all-20000.json").read_text()


def small_study(folder: Path, names: str, budget: str, workers: int = 1) -> dict[str, Any]:
    engine = Engine(device="cpu", memory="400MiB", workers=workers)
    counts = quality.run_quality(out=folder, engine=engine, seeds=2, methods=names, budgets=budget, concurrency=2, tell=print)
    assert counts["failed"] == counts["left"] == 0
    return quality_page.report(folder)


def test_two_seeds_of_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the length, and a third of that as the budget."""
    monkeypatch.setattr(retrieval, "BODY", 250)
    names = "dense,quest,omnikv,kvzip,kivi,fp8_kv,snapkv,streamingllm,h2o,adakv"
    made = small_study(tmp_path, names, "512")
    assert made["tokens"][0] > 3 * 512
    for kind, columns in made["rows"].items():
        solved = {column: next(iter(by_budget.values()))["solved"] for column, by_budget in columns.items()}
        assert set(names.split(",")) <= {column.split("-")[0] for column in solved}
        assert all(solved[column] == 2 for column in ("dense", "quest", "omnikv", "kvzip", "fp8_kv")), (kind, solved)
        assert kind != "multi" or solved["streamingllm"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("names", ["dense,fp8_kv", "quest,omnikv", "kvzip", "kivi", "snapkv,streamingllm", "h2o,adakv", "palu"])
def test_each_method_at_one_budget(tmp_path: Path, names: str) -> None:
    """8K bytes, 2 seeds: dense and those that must be near it answer all; who reads the newest alone does not."""
    made = small_study(tmp_path, names, "2048", workers=2)
    assert made["tokens"][0] > 7500
    assert made["tokens"][1] <= 8192
    for kind, columns in made["rows"].items():
        for column, by_budget in columns.items():
            (row,) = by_budget.values()
            if column in ("dense", *budgets.NEAR):
                assert row["solved"] == row["n"] == 2
            if column in budgets.RECENT and kind == "multi":
                assert row["solved"] == 0
