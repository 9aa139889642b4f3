"""What a model solves by itself, by family, dialect and length, with its controls: a page from the files of a grid."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentkv.bench.grid import gathered
from agentkv.bench.shares import counted, pooled, share_of
from agentkv.errors import BadRequest
from agentkv.world.dialect import DIALECTS
from agentkv.world.task import FAMILIES

LENGTHS = {"2K to 4K": 4096, "4K to 8K": 8192, "8K to 16K": 16_384, "28K to 32K": 32_768}  # bytes of a conversation, at most
LEAST = {"native": 0.95, "mini-swe-agent": 0.9, "openhands": 0.9}  # success up to 16K
WINDOW_MOST, BLANK_MOST = 0.2, 0.05  # the controls' bounds


def report(folder: Path) -> dict[str, Any]:
    """Shares solved by dialect and family (`dense`, up to 16K; `lengths`) and of the controls (`blank`, `window`).

    Raises:
        BadRequest: the folder has no dense cells.
    """
    dense: dict[str, dict[str, Any]] = {}
    lengths: dict[str, dict[str, dict[str, Any]]] = {}
    for dialect in DIALECTS:
        for family in FAMILIES:
            rows = gathered(folder, f"dense-{dialect}-{family}")
            if rows:
                dense.setdefault(dialect, {})[family] = _share(rows)
                every = rows + gathered(folder, f"long-{dialect}-{family}")
                lengths.setdefault(dialect, {})[family] = _by_length(every)
    if not dense:
        raise BadRequest(f"{folder} has no dense cells", hint="Run: agentkv bench grid --out FOLDER")
    blank = gathered(folder, "blank-all")
    windows = {family: gathered(folder, f"window-{family}") for family in FAMILIES}
    return {
        "dense": dense,
        "lengths": lengths,
        "blank": {family: _share([row for row in blank if row["family"] == family]) for family in FAMILIES if blank},
        "window": {family: _share(rows) for family, rows in windows.items() if rows},
    }


def _share(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return share_of([row["solved"] for row in rows])


def _by_length(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found, least = {}, 0
    for name, most in LENGTHS.items():
        found[name] = _share([row for row in rows if least < row["bytes"] <= most])
        least = most
    return found


def markdown(made: dict[str, Any]) -> str:
    """The page `docs/micro.md`."""
    dense = made["dense"]
    parts = [HEAD, f"| family | {' | '.join(dense)} |\n", "|---" * (1 + len(dense)), "|\n"]
    for family in FAMILIES:
        parts.append(
            f"| {family} | {' | '.join(counted(rows[family]) if family in rows else '-' for rows in dense.values())} |\n"
        )
    parts.append(f"| at least | {' | '.join(_bound(dialect, rows) for dialect, rows in dense.items())} |\n")
    parts += [BY_LENGTH, f"| dialect, family | {' | '.join(LENGTHS)} |\n", "|---" * (1 + len(LENGTHS)), "|\n"]
    for dialect, families in made["lengths"].items():
        parts += [f"| {dialect}, {family} | {' | '.join(map(_counts, row.values()))} |\n" for family, row in families.items()]
        every = [counted(pooled(row[name] for row in families.values())) for name in LENGTHS]
        parts.append(f"| **{dialect}, all** | {' | '.join(every)} |\n")
    controls = [
        *_controls("window of 1,024", made["window"], WINDOW_MOST),
        *_controls("blank", made["blank"], BLANK_MOST),
    ]
    return "".join([*parts, CONTROLS, *controls] if controls else parts)


def _counts(row: dict[str, Any]) -> str:
    return f"{row['solved']} of {row['n']}" if row["n"] else "-"


def _bound(dialect: str, rows: dict[str, Any]) -> str:
    met = all(row["success"] >= LEAST[dialect] for row in rows.values())
    return f"{100 * LEAST[dialect]:.0f} % in each: {'met' if met else 'NOT met'}"


def _controls(name: str, rows: dict[str, Any], most: float) -> Iterable[str]:
    if not rows:
        return
    for family, row in {**rows, "all": pooled(rows.values())}.items():
        yield f"| {name} | {family} | {counted(row)} | {100 * most:.0f} %: {'met' if row['success'] <= most else 'NOT met'} |\n"


def write(folder: Path, page: Path) -> dict[str, Any]:
    """Write the page and its JSON side by side; returns the JSON."""
    made = report(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(made), encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made


HEAD = """# What `micro` solves

The model acts by itself, greedily, with dense KV and no pruning; a task is solved when the world says so from real files and
exit statuses. The seeds are evaluation seeds that no choice of a checkpoint saw. Brackets are 95 % intervals (Wilson). Made by
`agentkv bench grid --out docs/bench/micro-grid --doc docs/micro.md`; every task is in docs/bench/micro-grid. The scores with
the expert's history given are in the card (agentkv/data/micro/README.md); what pruning costs is in pruning.md.

## Up to 16K bytes

Tasks of 2,048 to 16,384 bytes of conversation, uniform in log.

"""
BY_LENGTH = """
## By length

Tasks solved by bytes of conversation: those above, and longer ones apart (reported, not promised).

"""
CONTROLS = """
## Controls

What the model solves without what it needs, native, tasks of 2,048 to 8,192 bytes: attention limited to the last 1,024 tokens
and the request (`window`); or the facts that the answer has to copy struck out of every result (`blank`).

| control | family | solved | at most |
|---|---|---|---|
"""
