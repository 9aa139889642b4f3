"""Where a method begins to pay: from a grid to what people are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv import runtime_crossover
from agentkv.bench.crossover import Cell, smallest, summary

ROOT = Path(__file__).resolve().parent.parent.parent


def cells(rows: int, *times: float) -> list[Cell]:
    return [Cell(rows, 8192 * 4**i, 1.0, speed, "graph") for i, speed in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ((0.9, 1.1, 2.0), 32_768),
        ((1.1, 1.2, 1.3), 8192),
        ((1.1, 0.9, 1.3), 131_072),
        ((1.2, 0.8), None),
        ((1.0,), None),
        ((1.01, 1.03), 32_768),
    ],
)
def test_the_smallest_context_is_one_behind_which_it_stays_faster(times: tuple[float, ...], first: int | None) -> None:
    assert smallest(cells(8, *times)) == {"8": first}


def test_each_batch_has_its_own() -> None:
    assert smallest([*cells(32, 1.5), *cells(1, 0.5, 2.0)]) == {"1": 32_768, "32": 8192}


def test_people_are_told_of_what_does_not_pay() -> None:
    assert runtime_crossover.told({"faster_from": {"1": None, "8": 32_768}}) == "1 never, 8 from 32K"
    assert runtime_crossover.told(None) == "-"


def test_a_summary_has_the_rows_of_methods_alone() -> None:
    of = {"device": "H200", "date": "2026", "commit": "c"}
    row = {"method": "quest", "date": "2025", "commit": "b", "faster_from": {"1": None}, "cells": [], "us": [1.0]}
    rows = [{"name": "crossover, qwen3-4b, quest", **row}, {"name": "prefill"}, {"name": "crossover, x, kivi", "error": "e"}]
    made = summary({**of, "rows": rows, "ceilings": {}})
    row.pop("us")
    assert made == {**of, "model": "qwen3-4b", "methods": {"quest": row}}


def test_other_options_are_told_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    of, quest = {"device": "H200", "model": "qwen3-4b"}, {"method": "quest", "faster_from": {"1": 8192}}
    monkeypatch.setattr(runtime_crossover, "_measured", lambda: {**of, "methods": {"quest": {**quest, "cells": []}}})
    assert runtime_crossover.crossover("quest:budget=64") == {**of, **quest}
    assert runtime_crossover.crossover("dense") is None
