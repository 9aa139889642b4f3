"""`agentkv bench world`: play seeds of the agent world through a Runtime and count the world's verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from agentkv.runtime import Runtime
from agentkv.types import Policy
from agentkv.world.dialect import NATIVE
from agentkv.world.suite import run_suite


def run_world(
    *,
    seeds: Sequence[int],
    model: str = "micro",
    families: Sequence[str] | None = None,
    max_bytes: int = 8192,
    prune_after: int | None = None,
    mode: str = "in_place",
    concurrency: int = 1,
    device: str = "auto",
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Each seed once, greedily, in the native dialect.

    Returns `success` (0 to 1), `n`, `interval` (Wilson, 95 %), `by_family`, `results` and the conditions.
    """
    started = time.monotonic()
    policy = None if prune_after is None else Policy(prune_after=prune_after, mode=mode)  # type: ignore[arg-type]

    def told(result: Any) -> None:
        if tell is not None:
            tell(str(result))

    with Runtime(model, db=None, device=device) as runtime:
        result = run_suite(
            lambda world: runtime.session(system=NATIVE.system, tools=[world.bash], policy=policy),
            list(seeds),
            families=list(families) if families else None,
            max_bytes=max_bytes,
            concurrency=concurrency,
            on_result=told,
        )
        conditions = {"model": runtime.model_name, "device": str(runtime.device), "method": "dense", "dialect": NATIVE.name}
    options = {
        "max_bytes": max_bytes,
        "prune_after": prune_after,
        "mode": mode,
        "seconds": round(time.monotonic() - started, 1),
    }
    return {**result, **conditions, **options}
