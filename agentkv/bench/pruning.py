"""The lag study as a report: success, tokens freed and re-reads by lag and way of pruning, from the files of a grid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentkv.bench.grid import LAGS, WAYS, gathered
from agentkv.bench.plot import Line, Panel, svg
from agentkv.bench.world import totals
from agentkv.errors import BadRequest
from agentkv.world.task import FAMILIES

Rows = dict[str, dict[str, Any]]


def report(folder: Path) -> dict[str, Any]:
    """Totals by condition and family (`all` too), and the control on once by whether the lag outlasts the need."""
    found: dict[str, Rows] = {}
    for name in ("none", *(f"{way.replace(' ', '_')}-{lag}" for way in WAYS for lag in LAGS[1:])):
        results = gathered(folder, f"pruning-{name}")
        if results:
            found[name] = {"all": totals(results), **_by_family(results)}
    if "none" not in found:
        raise BadRequest(f"{folder} has no cells of the lag study", hint="Run: agentkv bench pruning --out FOLDER")
    return {"conditions": found, "once": _once(folder)}


def _by_family(results: Sequence[dict[str, Any]]) -> Rows:
    by = {family: [row for row in results if row["family"] == family] for family in FAMILIES}
    return {family: totals(rows) for family, rows in by.items() if rows}


def _once(folder: Path) -> list[dict[str, Any]]:
    """Once with rebuild: tasks whose result is gone when it is needed (lag <= results between), and the others."""
    rows: list[dict[str, Any]] = []
    for lag in (*LAGS, 10):
        results = gathered(folder, f"once-{lag}")
        if results:
            gone = [row for row in results if lag is not None and lag <= row["lag"]]
            kept = [row for row in results if row not in gone]
            rows.append({"prune_after": lag, "gone": totals(gone) if gone else None, "kept": totals(kept) if kept else None})
    return rows


def chart(made: dict[str, Any]) -> str:
    """Success by lag, a panel a family, a line a way of pruning; the place `none` is without pruning."""
    axis = (*(str(lag) for lag in LAGS[1:]), "none")
    panels = []
    for family in FAMILIES:
        lines = []
        for way in WAYS:
            names = [*(f"{way.replace(' ', '_')}-{lag}" for lag in LAGS[1:]), "none"]
            cells = [made["conditions"].get(name, {}).get(family) for name in names]
            points = tuple(None if cell is None else (cell["success"], *cell["interval"]) for cell in cells)
            lines.append(Line(way, points))
        panels.append(Panel(family, axis, tuple(lines)))
    return svg(panels, 3, "prune_after")


def markdown(made: dict[str, Any], plot: str) -> str:
    """The page `docs/pruning.md`."""
    conditions = made["conditions"]
    parts = [HEAD.format(plot=plot, n=conditions["none"]["chase"]["n"])]
    for family in ("all", *FAMILIES):
        parts.append(f"\n### {family}\n\n{TABLE}")
        for name, rows in conditions.items():
            if family in rows:
                parts.append(_row(name.replace("_", " ").replace("in place", "in_place"), rows[family]))
    parts.append(ONCE)
    for row in made["once"]:
        cells = [_share(row[key]) if row[key] else "-" for key in ("gone", "kept")]
        parts.append(f"| {'none' if row['prune_after'] is None else row['prune_after']} | {cells[0]} | {cells[1]} |\n")
    return "".join(parts)


def _row(name: str, cell: dict[str, Any]) -> str:
    freed = cell["freed"] / max(1.0, cell["tokens"])
    return f"| {name} | {_share(cell)} | {cell['freed']:.0f} of {cell['tokens']:.0f} ({freed:.0%}) | {cell['rereads']:.2f} |\n"


def _share(cell: dict[str, Any]) -> str:
    low, high = cell["interval"]
    return f"{cell['success']:.1%} ({low:.1%} to {high:.1%})"


def write(folder: Path, page: Path) -> dict[str, Any]:
    """Write the page, its chart and its JSON side by side; returns the JSON."""
    made = report(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(made, page.with_suffix(".svg").name), encoding="utf-8")
    page.with_suffix(".svg").write_text(chart(made), encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made


HEAD = """# What pruning costs

`micro` plays tasks of the agent world with dense KV, greedily, and the world judges real files. Every tool result is pruned
when its age reaches `prune_after` (section 6 of design.md). Three ways: `in_place drop` (the body's KV goes, later KV has
read it), `in_place edges` (its first and last 128 tokens stay), `rebuild` (a placeholder stands in the body and what follows
is computed anew). {n} seeds a family and condition, tasks of 2,048 to 8,192 bytes, Wilson intervals of 95 %.

Made by `agentkv bench pruning --out FOLDER --doc docs/pruning.md`; the figures are in pruning.json.

![success by lag]({plot})

A task can only be solved while what it needs is in view: `once` and `join` need a result that cannot be had again, `again`
can run its command again (a re-read), `chase` needs nothing but the latest result. `freed` counts the tokens whose KV went.
"""
TABLE = """| pruning | success | freed of a task's tokens | re-reads a task |
|---|---|---|---|
"""
ONCE = """
## The control

Family once with `rebuild`, all lags: tasks whose one-time result is gone when it is needed (`prune_after` at most the number
of results between it and the file that names what is wanted), and those where it is still there.

| prune_after | gone when needed | in view |
|---|---|---|
"""
