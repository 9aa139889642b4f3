"""The retrieval tables of docs/methods.md, their JSON, and whether the bounds hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentkv.bench.budgets import (
    AT,
    BUDGETS,
    COLUMNS,
    DENSE,
    DENSE_LEAST,
    NEAR,
    NEAR_LEAST,
    RECENT,
    RECENT_SLACK,
    TWICE,
)
from agentkv.bench.retrieval import KINDS, LENGTH, verdict
from agentkv.bench.shares import counted, percent, share_of, shown
from agentkv.errors import BadRequest

TITLE, MARK, MARK_END = "## Retrieval\n", "<!-- retrieval -->\n", "<!-- /retrieval -->\n"
FRESH = "# Attention methods\n\nWhat each keeps of a session, and what it costs.\n"
Rows = dict[str, Any]


def report(folder: Path) -> dict[str, Any]:
    """`rows`: by kind, column and budget ("all" where there is none) the share of sessions that were right, with its interval;
    `bounds`; `errors` of cells; `conditions`. BadRequest where nothing was played."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    conditions: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    texts: dict[str, str] = {}
    for file in sorted(folder.glob("*.json")):
        cell = json.loads(file.read_text(encoding="utf-8"))
        if "column" not in cell:
            continue
        texts[cell["column"]] = next((one.method for one in COLUMNS if one.name == cell["column"]), cell["method"])
        if "error" in cell:
            errors[file.stem] = cell["error"]
            continue
        found.setdefault((cell["column"], str(cell["budget"] or "all")), []).extend(cell["results"])
        conditions.append(cell["conditions"])
    if not found:
        raise BadRequest(f"{folder} has no cells", hint="Run: agentkv bench quality --out FOLDER", param="out")
    rows: Rows = {kind: {} for kind in KINDS}
    for (column, budget), results in found.items():
        for kind in KINDS:
            rows[kind].setdefault(column, {})[budget] = share_of([verdict(one, kind) for one in results])
    tokens = [one["tokens"] for results in found.values() for one in results]
    made = {"tokens": [min(tokens), max(tokens)], "methods": texts, "rows": rows, "bounds": bounds(rows), "errors": errors}
    return {**made, "conditions": max(conditions, key=lambda each: str(each["date"]))}


def bounds(rows: Rows) -> list[dict[str, Any]]:
    """Each bound with its figure: `says`, `kind`, `column`, `budget`, `success`, `least` or `most`, `met`. Only what was played
    is judged."""
    found = []
    for kind, columns in rows.items():
        dense = columns.get(DENSE, {}).get("all")
        if dense is not None:
            found.append(_bound(kind, DENSE, "all", dense, least=DENSE_LEAST))
        for name in NEAR:
            for budget in (str(AT), "all"):
                row = columns.get(name, {}).get(budget)
                if row is not None and dense is not None:
                    found.append(_bound(kind, name, budget, row, least=NEAR_LEAST * dense["success"]))
        for name in RECENT:
            for budget, row in columns.get(name, {}).items():
                found.append(_bound(kind, name, budget, row, most=int(budget) / LENGTH + RECENT_SLACK))
    return found


def _bound(kind: str, column: str, budget: str, row: Rows, least: float = 0.0, most: float = 1.0) -> dict[str, Any]:
    met = least <= row["success"] <= most
    limit = {"least": least} if least else {"most": most}
    return {"kind": kind, "column": column, "budget": budget, "success": row["success"], **limit, "met": met}


def bound_lines(made: dict[str, Any]) -> Iterable[str]:
    """Each bound in a line, and each error."""
    for one in made["bounds"]:
        limit = f"at least {percent(one['least'])}" if "least" in one else f"at most {percent(one['most'])}"
        budget = "no budget" if one["budget"] == "all" else one["budget"]
        met = "met" if one["met"] else "NOT met"
        yield f"{one['kind']}, {one['column']}, {budget}: {percent(one['success'])}, {limit}: {met}"
    for name, error in made["errors"].items():
        yield f"{name} failed: {error[:200]}"


def markdown(made: dict[str, Any]) -> str:
    """The section without its title."""
    rows, (low, high) = made["rows"], made["tokens"]
    n = max(row["n"] for columns in rows.values() for budgets in columns.values() for row in budgets.values())
    parts = [HEAD.format(low=low, high=high, n=n, device=made["conditions"]["device"], date=made["conditions"]["date"][:10])]
    for kind, what in KINDS.items():
        parts.append(f"\n### {kind}: {what}\n\n{_line('method', *(f'{each:,}' for each in sorted(BUDGETS)), 'no budget')}")
        parts.append("|---" * (len(BUDGETS) + 2) + "|\n")
        for column in _in_order(rows[kind]):
            cells = (rows[kind][column].get(key) for key in (*map(str, sorted(BUDGETS)), "all"))
            parts.append(_line(f"`{column}`", *("" if cell is None else _cell(cell, n) for cell in cells)))
    parts += _twice(rows)
    parts.append(f"\n### Bounds\n\n{_line('kind', 'method', 'budget', 'right', 'bound', '')}{'|---' * 6}|\n")
    parts += _bounds(made["bounds"])
    parts += [f"\n`{name}` failed: {error[:200]}\n" for name, error in made["errors"].items()]
    options = ", ".join(f"`{made['methods'][column]}`" for column in _in_order(made["methods"]))
    return "".join([*parts, f"\nOptions: {options}.\n"])


def _bounds(found: Iterable[dict[str, Any]]) -> Iterable[str]:
    for one in found:
        limit = f"at least {percent(one['least'])}" if "least" in one else f"at most {percent(one['most'])}"
        budget = "-" if one["budget"] == "all" else f"{int(one['budget']):,}"
        met = "met" if one["met"] else "NOT met"
        yield _line(one["kind"], f"`{one['column']}`", budget, percent(one["success"]), limit, met)


def _cell(row: dict[str, Any], n: int) -> str:
    """The share, and how many sessions where they are fewer than elsewhere."""
    return shown(row) + (f", n = {row['n']}" if row["n"] < n else "")


def _twice(rows: Rows) -> Iterable[str]:
    """The first and the second question of the same sessions side by side."""
    columns = [name for name in TWICE if name in rows["single"]]
    if columns:
        yield "\n### First and second question\n\n"
        yield "The same sessions: what was chosen by the first question is what the second finds.\n\n"
        yield f"{_line('method', 'budget', 'first', 'second')}{'|---' * 4}|\n"
    for name in columns:
        for budget in sorted(map(str, rows["single"][name]), key=lambda each: int(each) if each.isdigit() else 0):
            first, second = (counted(rows[kind][name][budget]) for kind in ("single", "second"))
            yield _line(f"`{name}`", f"{int(budget):,}" if budget.isdigit() else "-", first, second)


def _in_order(names: Iterable[str]) -> list[str]:
    known = [column.name for column in COLUMNS]
    return sorted(names, key=lambda name: (name not in known, known.index(name) if name in known else 0, name))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def placed(page: str, section: str) -> str:
    """The page with the section between its marks; without marks, under the title, whose text it replaces, or at the end."""
    block = f"{MARK}{section}{MARK_END}"
    if MARK in page:
        before, _, rest = page.partition(MARK)
        return f"{before}{block}{rest.partition(MARK_END)[2]}"
    if TITLE not in page:
        return f"{page.rstrip()}\n\n{TITLE}\n{block}"
    before, _, rest = page.partition(TITLE)
    _, found, after = rest.partition("\n## ")
    return f"{before}{TITLE}\n{block}{found}{after}"


def write(made: dict[str, Any], page: Path) -> None:
    """Put the tables into the page, which is made where it is not there, and the JSON beside it at bench/quality.json."""
    text = page.read_text(encoding="utf-8") if page.exists() else FRESH
    data = page.parent / "bench" / "quality.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(placed(text, markdown(made)), encoding="utf-8")
    data.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


HEAD = """
Whole answers of `micro` by method and budget: four tool results of three-letter names with four-digit values and near misses,
{low:,} to {high:,} tokens, then four questions, a turn each, about one record of each result. An answer is right if it is the
value and nothing else. {n} sessions of evaluation seeds unless a cell says fewer, greedy; an empty cell was not played; 95 %
intervals (Wilson). A budget is in tokens of a head: what
stays, or what a decode step reads. A token is a byte here, so windows and pools of scores span few words. Measured on {device},
{date}, by `agentkv bench quality --out FOLDER --doc docs/methods.md`; the figures are in bench/quality.json.
"""
