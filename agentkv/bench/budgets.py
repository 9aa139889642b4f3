"""What the retrieval study compares: methods with their options by budget, the budgets, and the bounds that must hold.

All of it is data: nothing in the study depends on a method's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentkv import methods
from agentkv.bench.retrieval import LENGTH
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import BadRequest

BUDGETS = (2048, 512, 256, 1024, 4096)
"""Tokens a head, the most telling first."""


@dataclass(frozen=True)
class Column:
    """One way to keep KV. method: as people write it, with {budget}, {half} of it, {rest} beside four sinks, and {ratio} of
    the text. bounded: it has a budget. prepared: options of its preparation; None: it needs none."""

    name: str
    method: str
    bounded: bool = True
    prepared: dict[str, Any] | None = field(default=None, hash=False)

    def text(self, budget: int | None) -> str:
        """The method as people write it, but for the prepared file."""
        given = budget or LENGTH
        return self.method.format(budget=given, half=given // 2, rest=given - 4, ratio=given / LENGTH)

    def made(self, budget: int | None, prepared: Path | None) -> SparseMethod:
        """The method. prepared: the file of its preparation."""
        found = methods.parse(self.text(budget))
        return found if prepared is None else replace(found, prepared=str(prepared))  # type: ignore[call-arg]


COLUMNS = (
    Column("dense", "dense", bounded=False),
    Column("quest", "quest:budget={budget}"),
    Column("omnikv", "omnikv:budget={budget}"),
    Column("kvzip", "kvzip:keep_ratio={ratio}"),
    Column("snapkv", "snapkv:capacity={budget}"),
    Column("snapkv-11", "snapkv:capacity={budget},kernel=11"),
    Column("streamingllm", "streamingllm:sinks=4,recent={rest}"),
    Column("kivi-4", "kivi:bits=4", bounded=False),
    Column("fp8_kv", "fp8_kv", bounded=False),
    Column("h2o", "h2o:heavy={half},recent={half}"),
    Column("adakv", "adakv:capacity={budget}"),
    Column("kivi-2", "kivi:bits=2", bounded=False),
    Column("palu-0.75", "palu:ratio=0.75", bounded=False, prepared={"group_size": 2}),
    Column("palu-0.5", "palu:ratio=0.5", bounded=False, prepared={"group_size": 2}),
)
DENSE = "dense"
DENSE_LEAST = 0.99
AT, NEAR, NEAR_LEAST = 2048, ("quest", "omnikv", "kvzip", "kivi-4", "fp8_kv"), 0.95
"""At this budget, or without one, these answer at least that part of what dense does."""
RECENT, RECENT_SLACK = ("streamingllm",), 0.05
"""These read the newest tokens alone: at most budget / length and that much more."""
TWICE = ("snapkv", "snapkv-11", "adakv", "h2o", "kvzip", "quest")
"""Whose first and second question stand side by side."""


def chosen(names: str) -> tuple[Column, ...]:
    """Columns by name or by method, comma-separated; '' is all."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {key for column in COLUMNS for key in (column.name, methods_name(column))}
    for name in wanted:
        if name not in known:
            raise BadRequest(f"unknown method {name!r}; known: {', '.join(sorted(known))}", param="methods")
    return tuple(column for column in COLUMNS if not wanted or {column.name, methods_name(column)} & set(wanted))


def methods_name(column: Column) -> str:
    """The method's name without options."""
    return column.method.partition(":")[0]


def budgets_of(text: str) -> tuple[int, ...]:
    """'512,2048' as numbers, in that order; '' is all."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text.strip() else BUDGETS
    except ValueError:
        found = (0,)
    if min(found) < 64 or max(found) >= LENGTH:
        raise BadRequest(f"budgets {text!r}: tokens, 64 to {LENGTH - 1}, like 512,2048", param="budgets")
    return found


def pairs(columns: Iterable[Column], budgets: Iterable[int]) -> list[tuple[Column, int | None]]:
    """Each column at each budget, those without one at the first; the most telling first."""
    some = tuple(columns)
    found: list[tuple[Column, int | None]] = []
    for number, budget in enumerate(budgets):
        found += [(each, budget if each.bounded else None) for each in some if each.bounded or number == 0]
    return found
