"""`agentkv bench world`: play tasks of the agent world through a Runtime and count the world's verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from agentkv.bench.plot import Line, Panel, svg
from agentkv.errors import BadRequest
from agentkv.runtime import Runtime, Session
from agentkv.types import Policy, TurnDone, check_lag
from agentkv.world.dialect import DIALECTS
from agentkv.world.env import World
from agentkv.world.suite import Setting, run_suite, summary, wilson
from agentkv.world.task import FAMILIES, LARGEST, SMALLEST

LENGTHS = {"2K": (2048, 3000), "4K": (4000, 5000), "8K": (7000, 8192), "16K": (14_000, 16_384), "32K": (28_000, 32_768)}
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Condition:
    """What is played and how results are pruned: lag None is never; families None is the one that each seed gives.

    Two controls: `blank` strikes the facts out, `window` limits attention to so many tokens and the task (through the
    training module, for `micro` and its variants only).
    """

    seeds: tuple[int, ...]
    families: tuple[str, ...] | None = None
    dialect: str = "native"
    min_bytes: int = SMALLEST
    max_bytes: int = 8192
    lag: int | None = None
    keep: str = "drop"
    mode: str = "in_place"
    blank: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        Policy(prune_after=self.lag, keep=self.keep, mode=self.mode)  # type: ignore[arg-type]  # refused also where nothing is pruned
        if self.window is not None and self.window < 1:
            raise BadRequest(f"window={self.window}: at least 1 token", param="window")

    @property
    def policy(self) -> Policy | None:
        """The session's policy."""
        if self.lag is None:
            return None
        return Policy(prune_after=self.lag, keep=self.keep, mode=self.mode)  # type: ignore[arg-type]

    @property
    def setting(self) -> Setting:
        """How tasks are given."""
        if self.dialect not in DIALECTS:
            raise BadRequest(f"unknown dialect {self.dialect!r}; known: {', '.join(DIALECTS)}", param="dialect")
        return Setting(self.min_bytes, self.max_bytes, DIALECTS[self.dialect], self.blank)

    def told(self) -> dict[str, Any]:
        """The condition's fields for a report."""
        told = {"dialect": self.dialect, "prune_after": self.lag, "keep": self.keep, "mode": self.mode}
        return {**told, "min_bytes": self.min_bytes, "max_bytes": self.max_bytes, "blank": self.blank, "window": self.window}


class Watched:
    """A session that counts what its turns pruned, forwarded and held."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.freed = self.prefilled = self.longest = 0

    def add_user(self, text: str) -> None:
        """Add a user message."""
        self.session.add_user(text)

    def run(self, *, max_turns: int, prune_after: Any) -> Any:
        """The tool loop."""
        return self.session.run(max_turns=max_turns, prune_after=prune_after, on_event=self._see)

    def close(self) -> None:
        """Free the session."""
        self.session.close()

    def _see(self, event: Any) -> None:
        if isinstance(event, TurnDone):
            usage = event.turn.usage
            self.freed += sum(gone.tokens for gone in event.turn.pruned_now)
            self.prefilled += usage.prefilled_tokens
            self.longest = max(self.longest, usage.prompt_tokens + usage.completion_tokens)

    def measures(self) -> dict[str, int]:
        """Tokens that pruning freed, tokens forwarded as prompt, logical length at the end."""
        return {"freed": self.freed, "prefilled": self.prefilled, "tokens": self.longest}


def play(runtime: Runtime, condition: Condition, concurrency: int = 1, tell: Tell | None = None) -> dict[str, Any]:
    """One condition: `success`, `n`, `interval`, `by_family` (with freed tokens and re-reads), `results`, the condition."""
    began = time.monotonic()
    setting = condition.setting
    if condition.window is not None:
        return {**_windowed(runtime, condition), **condition.told(), "seconds": round(time.monotonic() - began, 1)}
    result = run_suite(
        lambda world: Watched(runtime.session(system=setting.dialect.system, tools=world.tools, policy=condition.policy)),
        condition.seeds,
        families=condition.families,
        concurrency=concurrency,
        on_result=None if tell is None else lambda row: tell(str(row)),
        setting=setting,
        measure=lambda watched: watched.measures(),
    )
    for name, row in result["by_family"].items():
        row.update(totals([one for one in result["results"] if one["family"] == name]))
    return {**result, **condition.told(), "seconds": round(time.monotonic() - began, 1)}


def _windowed(runtime: Runtime, condition: Condition) -> dict[str, Any]:
    from agentkv.runtime_engine import model_path
    from agentkv.world import masked_play

    results = []
    for family in condition.families or FAMILIES:
        with ExitStack() as stack:
            tasks = [condition.setting.task(seed, family) for seed in condition.seeds]
            worlds = [stack.enter_context(World(task, condition.setting.dialect)) for task in tasks]
            verdicts = masked_play.play(model_path(runtime.model_name), worlds, condition.window, runtime.device)
            results += [
                {
                    "seed": task.seed,
                    "family": family,
                    "bytes": task.metadata["bytes"],
                    "solved": solved,
                    "rereads": world.rereads(),
                }
                for task, world, solved in zip(tasks, worlds, verdicts, strict=True)
            ]
    return summary(results)


def totals(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Success with its interval, and means a task, of results; results that failed early lack some of the counts."""
    solved, n = sum(row["solved"] for row in results), len(results)
    rows = [row for row in results if row.get("tokens")]
    return {
        "success": solved / n,
        "n": n,
        "interval": wilson(solved, n),
        "rereads": sum(row.get("rereads", 0) for row in results) / n,
        "freed": sum(row["freed"] for row in rows) / max(1, len(rows)),
        "tokens": sum(row["tokens"] for row in rows) / max(1, len(rows)),
    }


def run_world(
    *,
    seeds: Sequence[int],
    model: str = "micro",
    families: Sequence[str] | None = None,
    max_bytes: int = 8192,
    min_bytes: int = SMALLEST,
    dialect: str = "native",
    prune_after: int | None = None,
    keep: str = "drop",
    mode: str = "in_place",
    blank: bool = False,
    concurrency: int = 1,
    device: str = "auto",
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Each seed once, greedily; with `families`, each seed in each of them.

    Returns `success` (0 to 1), `n`, `interval` (Wilson, 95 %), `by_family`, `results` and the conditions.
    """
    named = tuple(families) if families else None
    condition = Condition(tuple(seeds), named, dialect, min_bytes, max_bytes, prune_after, keep, mode, blank)
    with Runtime(model, db=None, device=device) as runtime:
        return {**play(runtime, condition, concurrency, tell), **about(runtime)}


def all_lags(
    model: str, device: str, given: Condition, lags: Sequence[int | None], concurrency: int, tell: Tell | None
) -> list[dict[str, Any]]:
    """One result for each lag, all played by one runtime."""
    with Runtime(model, db=None, device=device) as runtime:
        return [{**play(runtime, replace(given, lag=lag), concurrency, tell), **about(runtime)} for lag in lags]


def plot_of(runs: Sequence[dict[str, Any]]) -> str:
    """Success by lag as SVG: one line a family, and one for all."""
    axis = tuple("none" if run["prune_after"] is None else str(run["prune_after"]) for run in runs)
    lines = [Line("all", tuple((run["success"], *run["interval"]) for run in runs))]
    for family in runs[0]["by_family"]:
        rows = [run["by_family"][family] for run in runs]
        lines.append(Line(family, tuple((row["success"], *wilson(round(row["success"] * row["n"]), row["n"])) for row in rows)))
    return svg([Panel("success", axis, tuple(lines))], 1, "prune_after")


def about(runtime: Runtime) -> dict[str, str]:
    """What played."""
    return {"model": runtime.model_name, "device": str(runtime.device), "method": runtime.method}


def sizes_of(text: str) -> tuple[int, int]:
    """Bytes of the shortest and longest task of '8K' (a length of the card) or '2048-16384'."""
    if text in LENGTHS:
        return LENGTHS[text]
    low, _, high = text.partition("-")
    try:
        sizes = int(low), int(high or low)
    except ValueError:
        sizes = (0, 0)
    if not SMALLEST <= sizes[0] <= sizes[1] <= LARGEST:
        raise BadRequest(f"length {text!r}: {', '.join(LENGTHS)}, or bytes like {SMALLEST}-{LARGEST}", param="length")
    return sizes


def lags_of(text: str) -> list[int | None]:
    """'none,0,2' to a list of lags; None never prunes."""
    try:
        return [None if part.strip() == "none" else check_lag(int(part)) for part in text.split(",")]
    except ValueError:
        raise BadRequest(f"lags {text!r}: like none,0,2", param="lags") from None
