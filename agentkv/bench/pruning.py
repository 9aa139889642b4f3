"""The lag study's figures: success, tokens freed, re-reads by lag and way of pruning, from the files of a grid."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentkv.bench.grid import LAGS, WAYS, gathered
from agentkv.bench.plot import Line, Panel, svg
from agentkv.bench.pruning_page import markdown
from agentkv.bench.shares import pooled, share_of
from agentkv.bench.world import totals
from agentkv.errors import BadRequest
from agentkv.world.task import FAMILIES

Rows = dict[str, dict[str, Any]]
MEANS = ("freed", "rereads", "prefilled")
GONE_MOST, KEPT_LOSS = 0.05, 0.03  # the bounds of the control: success without what is needed, loss while it is in view


def report(folder: Path) -> dict[str, Any]:
    """What the page says.

    `conditions`: totals by condition and family (`all` too); `view`: by way and family, tasks whose needed result was gone
    and the others; `once`: the control with its bounds.

    Raises:
        BadRequest: the folder has no cells of the lag study.
    """
    found: dict[str, Rows] = {}
    sides: dict[str, dict[str, list[Rows]]] = {}
    for name, way, lag in [("none", "", None), *((_name(way, lag), way, lag) for way in WAYS for lag in LAGS[1:])]:
        results = gathered(folder, f"pruning-{name}")
        if results:
            found[name] = {"all": cell(results), **{family: cell(rows) for family, rows in _families(results)}}
        for family, rows in _families(results):
            if way and rows[0].get("lag") is not None:  # a family that needs nothing old has no lag
                sides.setdefault(way, {}).setdefault(family, []).append(_sides(rows, lag))
    if "none" not in found:
        raise BadRequest(f"{folder} has no cells of the lag study", hint="Run: agentkv bench pruning --out FOLDER")
    view = {way: {family: _pooled(rows) for family, rows in families.items()} for way, families in sides.items()}
    return {"conditions": found, "view": view, "once": _once(folder)}


def cell(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals of results, with `prefilled` (prompt tokens that were computed) and half the 95 % intervals of the means."""
    rows = [row for row in results if row.get("tokens")]
    values = {name: [float(row.get(name, 0)) for row in rows] for name in MEANS}
    made = {**totals(results), "prefilled": sum(values["prefilled"]) / max(1, len(rows))}
    return {**made, "plus_minus": {name: _half(values[name]) for name in MEANS}}


def _half(values: Sequence[float]) -> float:
    """Half the 95 % interval of a mean, by the normal approximation."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = sum(values) / n
    return 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _name(way: str, lag: int | None) -> str:
    return f"{way.replace(' ', '_')}-{lag}"


def _families(results: Sequence[dict[str, Any]]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """The results of each family that has some."""
    by = [(family, [row for row in results if row["family"] == family]) for family in FAMILIES]
    return [(family, rows) for family, rows in by if rows]


def _sides(results: Sequence[dict[str, Any]], lag: int | None) -> Rows:
    """Shares solved of tasks whose needed result is `gone` when it is needed (lag <= results between), or `kept`."""
    gone = [row["solved"] for row in results if lag is not None and lag <= row["lag"]]
    kept = [row["solved"] for row in results if lag is None or lag > row["lag"]]
    return {"gone": share_of(gone), "kept": share_of(kept)}


def _pooled(rows: Sequence[Rows]) -> Rows:
    return {side: pooled(row[side] for row in rows) for side in ("gone", "kept")}


def _once(folder: Path) -> dict[str, Any]:
    """The control on once by lag and over all: rebuild with the bounds, in_place (of the lag study's seeds) beside it."""
    rows: list[dict[str, Any]] = []
    for lag in (*LAGS, 10):
        results = gathered(folder, f"once-{lag}")
        if results:
            beside = [row for row in gathered(folder, f"pruning-{_name('in_place drop', lag)}") if row["family"] == "once"]
            rows.append({"prune_after": lag, **_sides(results, lag), "in_place": _sides(beside, lag)})
    if not rows:
        return {"rows": []}
    pruned = [row for row in rows if row["prune_after"] is not None]
    free = next((row["kept"]["success"] for row in rows if row["prune_after"] is None), 1.0)
    rows.append({"prune_after": "all", **_pooled(pruned), "in_place": _pooled([row["in_place"] for row in pruned])})
    for row in rows:
        row["met"] = not any(_misses(row, free))
    return {"none": free, "gone_most": GONE_MOST, "kept_loss": KEPT_LOSS, "rows": rows}


def _misses(row: dict[str, Any], free: float) -> Iterable[bool]:
    """Whether each bound is missed, by the share itself; the interval stands beside it."""
    gone, kept = row["gone"]["success"], row["kept"]["success"]
    yield gone is not None and gone > GONE_MOST
    yield kept is not None and kept < free - KEPT_LOSS


def chart(made: dict[str, Any]) -> str:
    """Success by lag, a panel a family, a line a way of pruning; the place `none` is without pruning."""
    axis = (*(str(lag) for lag in LAGS[1:]), "none")
    panels = []
    for family in FAMILIES:
        lines = []
        for way in WAYS:
            names = [*(_name(way, lag) for lag in LAGS[1:]), "none"]
            cells = [made["conditions"].get(name, {}).get(family) for name in names]
            points = tuple(None if one is None else (one["success"], *one["interval"]) for one in cells)
            lines.append(Line(way, points))
        panels.append(Panel(family, axis, tuple(lines)))
    return svg(panels, 3, "prune_after", "tasks solved; bars are 95 % intervals")


def write(folder: Path, page: Path) -> dict[str, Any]:
    """Write the page, its chart and its JSON side by side; returns the JSON."""
    made = report(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(made, page.with_suffix(".svg").name), encoding="utf-8")
    page.with_suffix(".svg").write_text(chart(made), encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made
