"""Figures that no unit test should time: `make figures`. One row each with its bound; exit code 1 where one is missed."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPEATS = 5
SPANS = 10_000
IMPORT_MS = 150.0
ADD_MS = 1.0


def interpreter_ms(code: str) -> float:
    """Median wall time of a fresh interpreter that runs `code`."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times[1:])  # the first one warms the disk cache


def import_ms() -> float:
    """What `import agentkv` adds to a bare interpreter's start."""
    return interpreter_ms("import agentkv") - interpreter_ms("pass")


def add_tool_result_ms() -> tuple[float, float]:
    """Median of `add_tool_result` with 10,000 spans in the session: (without a store, with SQLite)."""
    from agentkv import Runtime
    from agentkv.types import ToolCall

    def measure(db: Path | None) -> float:
        with Runtime("micro", db=db) as runtime:
            session = runtime.session()
            session.add_user("go")
            times: list[float] = []
            number = 0
            while len(session._branch.ledger.records) < SPANS or len(times) < 200:
                calls = [ToolCall(id=f"call_{number + i}", name="bash", arguments={}) for i in range(100)]
                number += len(calls)
                session.add_assistant("", calls)
                enough = len(session._branch.ledger.records) >= SPANS
                for call in calls:
                    began = time.perf_counter()
                    session.add_tool_result(call.id, "some output\n" * 20, prune_after=4)
                    if enough:
                        times.append((time.perf_counter() - began) * 1000)
            return statistics.median(times)

    with tempfile.TemporaryDirectory() as folder:
        return measure(None), measure(Path(folder) / "bench.db")


def main() -> None:
    memory, stored = add_tool_result_ms()
    rows: list[tuple[str, float, float]] = [
        ("import agentkv above a bare interpreter, ms", import_ms(), IMPORT_MS),
        (f"add_tool_result with {SPANS:,} spans, no store, ms", memory, ADD_MS),
        (f"add_tool_result with {SPANS:,} spans, SQLite, ms", stored, ADD_MS),
    ]
    missed: list[Any] = []
    for name, figure, bound in rows:
        print(f"{name:60} {figure:8.3f}  (bound {bound:g})  {'met' if figure < bound else 'MISSED'}")
        if figure >= bound:
            missed.append(name)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
