"""The command of a tuner, `python -m agentkv.bench.NAME --out FOLDER`: they all take the same options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def run_tuner(
    tune: Callable[..., dict[str, Any]], name: str, description: str | None, files: str, *, minutes: float, repeats: int
) -> None:
    """Read the options, call `tune` with them, print what it tells. files: what it writes to the folder."""
    parser = argparse.ArgumentParser(prog=f"python -m agentkv.bench.{name}", description=description)
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {files}")
    parser.add_argument("--minutes", type=float, default=minutes, help="no shape is begun after that")
    parser.add_argument("--repeats", type=int, default=repeats)
    given = parser.parse_args()
    tune(**vars(given), tell=lambda text: print(text, flush=True))


def failures(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Lines for people: two of the tiles that did not run or were wrong, and why."""
    failed = [row for row in rows if "why_not" in row]
    return [f"    failed: {tuple(row['tile'].values())} {row['why_not'][:100]}" for row in failed[:2]]
