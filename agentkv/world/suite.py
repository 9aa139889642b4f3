"""Play many tasks with sessions and count what was solved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from agentkv.errors import BadRequest
from agentkv.world.env import World
from agentkv.world.task import EVALUATION_SEEDS, FAMILIES, family_of, make_task


class Session(Protocol):
    """The verbs of a session that the suite uses; it has its system prompt and tools already."""

    def add_user(self, text: str, /) -> Any:
        """Add a user message."""

    def run(self, *, max_turns: int, prune_after: Any) -> Any:
        """The tool loop; returns the last turn."""

    def close(self) -> Any:
        """Free the session."""


MakeSession = Callable[[World], Session]


def run_suite(
    make_session: MakeSession,
    seeds: Iterable[int],
    families: Sequence[str] | None = None,
    max_bytes: int = 8192,
    concurrency: int = 1,
    max_turns: int = 24,
    prune_after: Any = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Play each seed once; `families` keeps only the seeds of some families.

    The answer has `success`, `n`, `interval` (Wilson, 95 %), `by_family` and `results`.
    """
    chosen = _chosen(seeds, families)
    if concurrency < 1 or max_turns < 1:
        raise BadRequest("concurrency and max_turns are at least 1")
    make_task(0, max_bytes=max_bytes)  # refuse a bad size before any session is made

    def one(seed: int) -> dict[str, Any]:
        result = play_seed(make_session, seed, max_bytes, max_turns, prune_after)
        if on_result is not None:
            on_result(result)
        return result

    if concurrency == 1:
        results = [one(seed) for seed in chosen]
    else:
        with ThreadPoolExecutor(concurrency) as pool:
            results = list(pool.map(one, chosen))
    return summary(results)


def _chosen(seeds: Iterable[int], families: Sequence[str] | None) -> list[int]:
    unknown = [name for name in families or () if name not in FAMILIES]
    if unknown:
        raise BadRequest(f"unknown family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    chosen = [seed for seed in seeds if not families or family_of(seed) in families]
    if not chosen:
        raise BadRequest("no seeds to play")
    if not all(0 <= seed < EVALUATION_SEEDS for seed in chosen):
        raise BadRequest(f"evaluation seeds are 0 to {EVALUATION_SEEDS - 1}")
    return chosen


def play_seed(
    make_session: MakeSession, seed: int, max_bytes: int = 8192, max_turns: int = 24, prune_after: Any = None
) -> dict[str, Any]:
    """One task with one session; whatever the session raises is a failure with its message."""
    task = make_task(seed, max_bytes=max_bytes)
    began = time.perf_counter()
    solved, error = False, None
    with World(task) as world:
        try:
            session = make_session(world)
            try:
                session.add_user(task.prompt)
                session.run(max_turns=max_turns, prune_after=prune_after)
            finally:
                session.close()
            solved = world.verdict()
        except Exception as caught:  # noqa: BLE001 - the suite goes on with the next seed
            error = f"{type(caught).__name__}: {caught}"
        commands = len(world.history)
    return {
        "seed": seed,
        "family": task.family,
        "bytes": task.metadata["bytes"],
        "solved": solved,
        "commands": commands,
        "seconds": round(time.perf_counter() - began, 3),
        "error": error,
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
