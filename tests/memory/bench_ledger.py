"""What the bookkeeping of a session costs: `python tests/memory/bench_ledger.py [--spans 10000] [--db PATH] [--json]`.

A session is filled with spans over a fake backend and a store on disk; then single verbs are timed, their store writes
included. The last line with --json is one object of medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from memory_fakes import FakeBackend, Reply

from agentkv.memory.session import Session
from agentkv.memory.store import SessionStore
from agentkv.types import Policy

PER_TURN = 64


class QuickBackend(FakeBackend):
    """Forwards nothing: only the bookkeeping is timed."""

    def generate(self, chain_id: str, history: Any, suffix: list[int], sampling: Any, **more: Any) -> Any:
        from memory_fakes import Chain, Running

        from agentkv.memory.backend import Counts

        reply = self.replies.popleft() if self.replies else Reply(echo=False)
        counts = Counts(cached_tokens=len(history.ids), prefilled_tokens=len(suffix), resident_tokens=0)
        running = Running(self, Chain(), Chain(), [*history.ids, *suffix], reply, counts, 1 << 20)
        running.work.forward = lambda *_: 0  # type: ignore[method-assign]
        return running


def filled(store: SessionStore | None, spans: int, policy: Policy | None, calls: int) -> tuple[Session, QuickBackend]:
    """A session with at least so many spans, and `calls` open calls."""
    backend = QuickBackend(window=1 << 30)
    session = Session(backend, store, system="sys", policy=policy)
    session.add_user("go")
    while True:
        done = len(session.spans()) >= spans
        backend.say(Reply("t", calls=(("bash", {"command": "ls"}),) * (calls if done else PER_TURN), echo=False))
        session.generate()
        if done:
            return session, backend
        for call in session.open_calls:
            session.add_tool_result(call.id, "a line of output\n" * 20)


def timed(action: Callable[[int], Any], times: int) -> dict[str, float]:
    """Milliseconds of a verb: median, 99th percentile, worst."""
    took = []
    for number in range(times):
        began = time.perf_counter()
        action(number)
        took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {"median": statistics.median(took), "p99": took[int(len(took) * 0.99)], "max": took[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--db", default=None, help="a path, ':memory:' or 'none'; default: a file in a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = options.db or str(Path(folder) / "bench.db")
        store = None if where == "none" else SessionStore(where)
        session, backend = filled(store, options.spans, Policy(prune_after=10_000_000), options.times)
        calls = session.open_calls
        report = {
            "add_tool_result": timed(lambda n: session.add_tool_result(calls[n].id, "a line of output\n" * 20), len(calls))
        }
        report["generate"] = timed(lambda n: session.generate(), 20)
        report["add_user"] = timed(lambda n: session.add_user("x"), 100)
        report["spans"] = timed(lambda n: session.spans(), 5)
        report["pin"] = timed(lambda n: session.pin(session._branch.ledger.answer(calls[n].id).id), 20)  # type: ignore[union-attr]
        report["prune"] = timed(lambda n: session.prune(calls[30 + n].id), 20)
        report["fork"] = timed(lambda n: session.fork(), 10)
        report["rollback"] = timed(lambda n: session.rollback(), 5)
        if store is not None:
            opened = store
            report["resume"] = timed(lambda n: Session.resume(backend, opened, session.id), 3)
            report["list"] = timed(lambda n: opened.list(), 5)
            store.close()
    for verb, row in report.items():
        print(f"{verb:16} " + "  ".join(f"{name} {value:9.3f} ms" for name, value in row.items()))
    if options.json:
        print(json.dumps({"spans": options.spans} | {f"{verb}_ms": round(row["median"], 4) for verb, row in report.items()}))


if __name__ == "__main__":
    main()
