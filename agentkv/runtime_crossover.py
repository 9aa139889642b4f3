"""From which context on a method's decode steps are faster than dense ones: data that `agentkv bench gpu` measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data" / "crossover.json"


def crossover(method: str) -> dict[str, Any] | None:
    """Of a method as people write it: device, model, method: what was measured, which may have other options, and faster_from:
    by sequences in a step the smallest context in tokens, None for never. None where it was not measured."""
    measured = _measured()
    found = measured["methods"].get(method.partition(":")[0])
    if found is None:
        return None
    return {"device": measured["device"], "model": measured["model"], **{key: found[key] for key in ("method", "faster_from")}}


def told(found: dict[str, Any] | None) -> str:
    """The same for people."""
    if found is None:
        return "-"
    rows = (
        f"{count} from {'never' if length is None else f'{length // 1024}K'}" for count, length in found["faster_from"].items()
    )
    return ", ".join(rows).replace("from never", "never")


@cache
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {"methods": {}}
    return found
