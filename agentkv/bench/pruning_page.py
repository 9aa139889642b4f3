"""The page `docs/pruning.md` from the lag study's figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentkv.bench.grid import LAGS, WAYS
from agentkv.bench.shares import counted, percent, pooled, shown

LOSS = 0.03  # how much less success still counts as none lost
# What each family needs, in the order of the tables.
NEEDS = {
    "chase": "the latest result only",
    "again": "an old result, but its command can be run again",
    "update": "the later of two old readings of one file",
    "repair": "a value from an old file, several turns later",
    "once": "an old result that cannot be had again",
    "join": "two such results",
}
LOST = ("once", "repair", "join")  # the model does not read again what these need


def markdown(made: dict[str, Any], plot: str) -> str:
    """The page; `plot` is the chart's file."""
    conditions = made["conditions"]
    free = conditions["none"]["all"]
    n = next(row["n"] for family, row in conditions["none"].items() if family != "all")
    parts = [HEAD.format(n=n), *_short(made), CHART.format(plot=plot), *_safe(conditions)]
    if made["view"]:
        parts += [VIEW, *_views(made["view"])]
    if made["once"]["rows"]:
        parts += [CONTROL.format(**_bounds(made["once"])), *map(_control, made["once"]["rows"])]
    parts.append(FIGURES.format(tokens=free["tokens"], prefilled=free["prefilled"]))
    for family in ("all", *NEEDS):
        parts.append(f"\n### {'all families' if family == 'all' else f'{family}: needs {NEEDS[family]}'}\n\n{TABLE}")
        parts += [_row(name, rows[family]) for name, rows in conditions.items() if family in rows]
    return "".join(parts)


def _short(made: dict[str, Any]) -> Iterable[str]:
    """What the figures say, in sentences that hold whatever the figures are."""
    conditions, view = made["conditions"], made["view"]
    yield "\n## In short\n\n"
    if view:
        kept = [f"{_pool(families, 'kept', NEEDS)} with {way}" for way, families in view.items()]
        gone = [f"{_pool(families, 'gone', LOST)} with {way}" for way, families in view.items()]
        yield f"- Tasks whose needed results are still in view when they are needed: solved {', '.join(kept)}.\n"
        yield f"- Tasks of {', '.join(LOST)} whose needed result is gone then: solved {', '.join(gone)}; "
        yield "edges save what stands in them.\n"
    again = conditions.get("in_place_drop-1", {}).get("again")
    if again:
        yield "- Where the command can be run again, a re-read is the price: `again` with in_place drop after 1: "
        yield f"{percent(again['success'])} solved, {again['rereads']:.2f} re-reads a task.\n"
    free = conditions["none"].get("chase")
    for name in ("in_place_drop-1", "rebuild-1") if free else ():
        row = conditions.get(name, {}).get("chase")
        if row:
            freed, computed = row["freed"] / max(1.0, free["tokens"]), row["prefilled"] / max(1.0, free["prefilled"])
            yield f"- Where nothing old is needed, {_title(name)} frees {percent(freed)} of a task's tokens and computes "
            yield f"{computed:.1f} times the prompt tokens: {percent(row['success'])} solved.\n"
    yield "- So choose a `prune_after` larger than the number of results between one that is needed and its use, or pin it.\n"


def _pool(families: dict[str, Any], key: str, only: Iterable[str]) -> str:
    row = pooled(families[family][key] for family in only if family in families)
    return f"{row['solved']} of {row['n']}"


def _safe(conditions: dict[str, Any]) -> Iterable[str]:
    """The smallest lag that costs next to nothing, by family and way."""
    yield SAFE
    for family, needs in NEEDS.items():
        cells = []
        for way in WAYS:
            lag = _smallest(conditions, way, family)
            row = {} if lag is None else conditions[_key(way, lag)][family]
            cells.append("more than 8" if lag is None else f"{lag} (freed {row['freed']:.0f}, re-reads {row['rereads']:.2f})")
        yield f"| {family} | {needs} | {' | '.join(cells)} |\n"


def _smallest(conditions: dict[str, Any], way: str, family: str) -> int | None:
    """The smallest lag at which, and at all larger ones, success is at most LOSS below that without pruning."""
    least = conditions["none"][family]["success"] - LOSS
    found = None
    for lag in reversed([lag for lag in LAGS if lag is not None]):
        row = conditions.get(_key(way, lag), {}).get(family)
        if row is None or row["success"] < least:
            break
        found = lag
    return found


def _key(way: str, lag: int) -> str:
    return f"{way.replace(' ', '_')}-{lag}"


def _views(view: dict[str, Any]) -> Iterable[str]:
    for family in NEEDS:
        for way, families in view.items():
            if family in families:
                yield f"| {family} | {way} | {counted(families[family]['kept'])} | {counted(families[family]['gone'])} |\n"


def _bounds(once: dict[str, Any]) -> dict[str, str]:
    return {
        "gone": percent(once["gone_most"]),
        "kept": percent(once["none"] - once["kept_loss"]),
        "none": percent(once["none"]),
    }


def _control(row: dict[str, Any]) -> str:
    lag = "none" if row["prune_after"] is None else row["prune_after"]
    cells = [counted(part) for part in (row["gone"], row["kept"], row["in_place"]["gone"], row["in_place"]["kept"])]
    return f"| {lag} | {cells[0]} | {cells[1]} | {'met' if row['met'] else 'NOT met'} | {cells[2]} | {cells[3]} |\n"


def _row(name: str, cell: dict[str, Any]) -> str:
    off = cell["plus_minus"]
    way, _, lag = _title(name).rpartition(" after ")
    means = [
        f"{cell[key]:.{digits}f} ± {off[key]:.{digits}f}" for key, digits in (("freed", 0), ("rereads", 2), ("prefilled", 0))
    ]
    return f"| {way or 'no pruning'} | {lag if way else '-'} | {shown(cell)} | {' | '.join(means)} |\n"


def _title(name: str) -> str:
    """`in_place_drop-2` as a reader sees it: in_place drop after 2."""
    way, _, lag = name.partition("-")
    known = {one.replace(" ", "_"): one for one in WAYS}
    return f"{known[way]} after {lag}" if way in known else name


HEAD = """# What pruning costs

`micro` plays tasks of the agent world with dense KV, greedily, and the world judges real files. Every tool result is pruned
when its age, the number of later results, reaches `prune_after` (section 6 of design.md), in three ways:

- `in_place drop`: the KV of the body goes; what follows stays as it was computed, with the body in view;
- `in_place edges`: the same, but the first and last 128 tokens of the body stay;
- `rebuild`: a placeholder stands in the body, and all that follows is computed anew.

{n} seeds a family and condition, native dialect, tasks of 2,048 to 8,192 bytes (a token is a byte). Brackets and ± are
intervals of 95 % (Wilson's for shares, the normal approximation for means). Made by `agentkv bench pruning --out
docs/bench/micro-grid --doc docs/pruning.md`; all figures are in pruning.json, every task's in docs/bench/micro-grid.
"""
CHART = """
![tasks solved by prune_after, a panel a family, a line a way of pruning]({plot})
"""
SAFE = """
## When it costs nothing

The smallest `prune_after` that, like every larger one measured, costs at most 3 points of success; in brackets the tokens that
it freed and the re-reads, both a task. Needed results lie up to 9 results back, so with 8 some tasks still lose theirs.

| family | needs | in_place drop | in_place edges | rebuild |
|---|---|---|---|---|
"""
VIEW = """
## What it costs when a needed result is gone

All lags together, the same seeds at each (so intervals are somewhat too narrow). *Gone*: `prune_after` is at most the number
of results between the one that is needed and its use. With edges *gone* means all but the edges: tasks whose fact stands in
the edges are still solved. In `again` and `update` the model may read a thing again; with `prune_after` 0 that is gone too
before it can be used, which leaves a guess among names that the listing repeats, and where edges are left it sometimes
answers from them instead.

| family | pruning | solved, in view | solved, gone |
|---|---|---|---|
"""
CONTROL = """
## The control

Once with `rebuild`, own cells with more seeds. Where the result is gone when it is needed, at most {gone} may be solved; where
it is in view, at least {kept}, 3 points below no pruning ({none}). The shares are held to the bounds, their intervals stand by.
`in_place drop` is beside it without a bound, from the seeds of the study: later KV, computed with the body in view, might carry
the fact. *all* are the lags together, the same seeds at each: their intervals take these for independent and are too narrow.

| prune_after | rebuild, gone | rebuild, in view | bounds | in_place drop, gone | in_place drop, in view |
|---|---|---|---|---|---|
"""
FIGURES = """
## All figures

*freed*: tokens whose KV went, over the whole task (what is read again can go again); an unpruned task has {tokens:.0f} tokens
in the mean. *computed*: prompt tokens that were computed, {prefilled:.0f} without pruning; `rebuild` computes what follows a
body again, and a task that goes astray takes more turns.
"""
TABLE = """| pruning | prune_after | solved | freed a task | re-reads a task | computed a task |
|---|---|---|---|---|---|
"""
