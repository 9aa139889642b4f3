"""Shares of solved tasks: counted, with their interval, and as a page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agentkv.world.suite import wilson


def share(solved: int, n: int) -> dict[str, Any]:
    """`solved`, `n`, and `success` (0 to 1) with its 95 % Wilson `interval`, both None where there is no task."""
    return {"solved": solved, "n": n, "success": solved / n if n else None, "interval": wilson(solved, n) if n else None}


def share_of(verdicts: Sequence[bool]) -> dict[str, Any]:
    """The share of tasks that were solved."""
    return share(sum(verdicts), len(verdicts))


def pooled(shares: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several shares as one."""
    rows = list(shares)
    return share(sum(row["solved"] for row in rows), sum(row["n"] for row in rows))


def counted(row: dict[str, Any]) -> str:
    """`12 of 40, 30.0 % (18.1 to 45.4)`, or a dash where there is no task."""
    return f"{row['solved']} of {row['n']}, {shown(row)}" if row["n"] else "-"


def shown(row: dict[str, Any]) -> str:
    """`30.0 % (18.1 to 45.4)`."""
    low, high = row["interval"]
    return f"{percent(row['success'])} ({100 * low:.1f} to {100 * high:.1f})"


def percent(part: float) -> str:
    """`30.0 %`."""
    return f"{100 * part:.1f} %"
