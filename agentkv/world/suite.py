"""Play many tasks with sessions and count what was solved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from agentkv.errors import BadRequest
from agentkv.world.dialect import NATIVE, Dialect
from agentkv.world.env import World
from agentkv.world.task import EVALUATION_SEEDS, FAMILIES, SMALLEST, Task, family_of, make_task


class Session(Protocol):
    """The verbs of a session that the suite uses; it has its system prompt and tools already."""

    def add_user(self, text: str, /) -> Any:
        """Add a user message."""

    def run(self, *, max_turns: int, prune_after: Any) -> Any:
        """The tool loop; returns the last turn."""

    def close(self) -> Any:
        """Free the session."""


MakeSession = Callable[[World], Session]


@dataclass(frozen=True)
class Setting:
    """How tasks are given: their size in bytes, the dialect, and whether facts are struck out (a control)."""

    min_bytes: int = SMALLEST
    max_bytes: int = 8192
    dialect: Dialect = NATIVE
    blank: bool = False

    def task(self, seed: int, family: str | None) -> Task:
        """The task of a seed in this setting."""
        return make_task(seed, family, self.max_bytes, min_bytes=self.min_bytes, dialect=self.dialect)


def run_suite(
    make_session: MakeSession,
    seeds: Iterable[int],
    families: Sequence[str] | None = None,
    max_bytes: int = 8192,
    concurrency: int = 1,
    max_turns: int = 24,
    prune_after: Any = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
    setting: Setting | None = None,
    measure: Callable[[Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Play each seed once in the family that it gives, or with `families` in each of these.

    `measure` adds what it finds in a played session to its result.
    The answer has `success`, `n`, `interval` (Wilson, 95 %), `by_family` and `results`.
    """
    chosen = _chosen(seeds, families)
    setting = setting or Setting(max_bytes=max_bytes)
    if concurrency < 1 or max_turns < 1:
        raise BadRequest("concurrency and max_turns are at least 1")
    setting.task(0, None)  # refuse a bad size before any session is made

    def one(case: tuple[int, str]) -> dict[str, Any]:
        result = play(make_session, case, setting, max_turns, prune_after, measure)
        if on_result is not None:
            on_result(result)
        return result

    if concurrency == 1:
        results = [one(seed) for seed in chosen]
    else:
        with ThreadPoolExecutor(concurrency) as pool:
            results = list(pool.map(one, chosen))
    return summary(results)


def _chosen(seeds: Iterable[int], families: Sequence[str] | None) -> list[tuple[int, str]]:
    unknown = [name for name in families or () if name not in FAMILIES]
    if unknown:
        raise BadRequest(f"unknown family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    given = list(seeds)
    if not given:
        raise BadRequest("no seeds to play")
    if not all(0 <= seed < EVALUATION_SEEDS for seed in given):
        raise BadRequest(f"evaluation seeds are 0 to {EVALUATION_SEEDS - 1}")
    if not families:
        return [(seed, family_of(seed)) for seed in given]
    return [(seed, family) for family in families for seed in given]


def play(
    make_session: MakeSession,
    case: tuple[int, str],
    setting: Setting,
    max_turns: int = 24,
    prune_after: Any = None,
    measure: Callable[[Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One task with one session; whatever the session raises is a failure with its message."""
    task = setting.task(*case)
    began = time.perf_counter()
    solved, error = False, None
    found: dict[str, Any] = {}
    with World(task, setting.dialect, setting.blank) as world:
        try:
            session = make_session(world)
            try:
                session.add_user(world.prompt)
                session.run(max_turns=max_turns, prune_after=prune_after)
                found = measure(session) if measure else {}
            finally:
                session.close()
            solved = world.verdict()
        except Exception as caught:  # noqa: BLE001 - the suite goes on with the next seed
            error = f"{type(caught).__name__}: {caught}"
        commands, rereads = len(world.history), world.rereads()
    return {
        "seed": task.seed,
        "family": task.family,
        "bytes": task.metadata["bytes"],
        "lag": task.metadata.get("lag"),
        "solved": solved,
        "commands": commands,
        "rereads": rereads,
        "seconds": round(time.perf_counter() - began, 3),
        "error": error,
        **found,
    }


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals of results."""
    solved = sum(result["solved"] for result in results)
    by_family: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        mine = [result["solved"] for result in results if result["family"] == family]
        if mine:
            by_family[family] = {"success": sum(mine) / len(mine), "n": len(mine)}
    return {
        "success": solved / len(results),
        "n": len(results),
        "interval": wilson(solved, len(results)),
        "by_family": by_family,
        "results": list(results),
    }


def wilson(hits: int, n: int) -> list[float]:
    """The 95 % Wilson interval of a share."""
    if n < 1:
        raise ValueError("an interval needs at least one result")
    z = 1.959964
    share = hits / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return [max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]
