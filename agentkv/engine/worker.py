"""The engine's thread: steps the LLM while there is work and runs everybody else's commands between steps.

All engine state belongs to this thread, so nothing in the engine needs a lock. It is a daemon thread: a runtime that was
never closed does not hang the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, TypeVar

from agentkv.engine.core import Request, Sequence, StepOutput
from agentkv.engine.llm import LLM
from agentkv.engine.threads import EngineThreads
from agentkv.errors import EngineFault

log = logging.getLogger(__name__)

T = TypeVar("T")

STALL_SECONDS = 10.0
"""Readiness turns false when work was queued this long without a token."""

BLOCKED_SECONDS = 0.002
"""Pause before trying again when nothing could be scheduled."""

WATCH_SECONDS = 1.0
"""How often the watchdog looks, at least."""


class Ticket:
    """A submitted sequence and the outputs it has made so far. `outputs` ends with None."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.submitted = time.monotonic()
        self.first_token: float | None = None
        self.outputs: SimpleQueue[StepOutput | None] = SimpleQueue()


class EngineWorker:
    """Owns an `LLM` and the thread that may touch it. threads: what that thread does about the CPU's cores; None is nothing.

    A second thread watches the first. A step or command that takes longer than `config.step_timeout` is taken for lost: the
    thread cannot be killed, but everybody who waits for it gets an EngineFault, and so does who comes later, at once. Should
    it return after all, what was running is rolled back and the engine serves again.
    """

    def __init__(self, llm: LLM, threads: EngineThreads | None = None) -> None:
        self.llm = llm
        self._threads = threads
        self._busy_since: float | None = None
        self._current: Future[Any] | None = None
        self._lost: EngineFault | None = None
        self._ended = threading.Event()
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._tickets: dict[int, Ticket] = {}
        self._closed = False
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="agentkv-engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="agentkv-watchdog", daemon=True).start()

    def call(self, command: Callable[[], T]) -> T:
        """Run `command` on the engine's thread, between two steps, and return its result or raise its error."""
        future: Future[T] = Future()
        self._post(future, command)
        return future.result()

    def post(self, command: Callable[[], Any]) -> None:
        """The same without waiting."""
        with contextlib.suppress(EngineFault):
            self._post(Future(), command)

    def submit(self, request: Request) -> Ticket:
        """Add a request; its outputs arrive in the ticket. Raises what `LLM.add` raises."""

        def add() -> Ticket:
            ticket = Ticket(self.llm.add(request))
            self._tickets[ticket.seq.seq_id] = ticket
            return ticket

        return self.call(add)

    def abort(self, ticket: Ticket, *, late: bool = False) -> None:
        """End a sequence at any point; its chain stands at its last boundary. Idempotent. late: its timeout has passed."""

        def end() -> None:
            self.llm.abort(ticket.seq, late=late)
            if self._tickets.pop(ticket.seq.seq_id, None) is not None:
                ticket.outputs.put(None)

        self.post(end)

    @property
    def trouble(self) -> str | None:
        """Why tokens do not progress while work is queued; None when they do, or nothing is queued."""
        if self._lost is not None:
            return self._lost.message
        if self._closed or not self._thread.is_alive():
            return "the engine is closed"
        queued, still = len(self._tickets) + len(self._commands), time.monotonic() - self._last_progress
        if (queued or self._busy_since is not None) and still > STALL_SECONDS:
            return f"no token for {still:.0f} s with {queued} requests queued"
        return None

    def close(self) -> None:
        """Stop the thread; running sequences end as aborted."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=0 if self._lost else 30)
            if self._thread.is_alive():
                self._give_up("the engine was closed during a step that does not end")
        self._ended.set()

    def _post(self, future: Future[Any], command: Callable[[], Any]) -> None:
        with self._wake:
            if self._lost is not None:
                raise EngineFault(self._lost.message, hint=self._lost.hint)
            if self._closed or not self._thread.is_alive():
                raise EngineFault("the engine is closed", hint="Open a new Runtime and resume the session")
            if not self._tickets and not self._commands:
                self._last_progress = time.monotonic()
            self._commands.append((future, command))
            self._wake.notify()

    def _loop(self) -> None:
        if self._threads is None:
            return self._serve()
        self._threads.begin()
        try:
            return self._serve()
        finally:
            self._threads.end()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._tickets or self._closed):
                    self._wake.wait()
                count, closed = len(self._commands), self._closed
            for _ in range(count):
                self._run_next()
            if closed:
                return self._end_all()
            if self._tickets:
                self._step()

    def _run_next(self) -> None:
        with self._wake:
            if not self._commands:
                return
            self._current, command = self._commands.popleft()
            self._last_progress = self._busy_since = time.monotonic()
        future, error = self._current, None
        try:
            result = command()
        except BaseException as raised:  # noqa: BLE001 - raised where the result is awaited
            result, error = None, raised
        self._back()
        with contextlib.suppress(InvalidStateError):  # who waited was told that it is lost
            future.set_result(result) if error is None else future.set_exception(error)

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        try:
            outputs = self.llm.step()
        except Exception as error:  # noqa: BLE001 - a fault of the engine itself: no sequence can be trusted to go on
            self._fail_all(error)
            return self._back()
        self._back()
        if self.llm.scheduler.running or outputs:
            self._last_progress = time.monotonic()
        elif self._tickets:  # memory is held by turns that are being committed
            time.sleep(BLOCKED_SECONDS)
        for output in outputs:
            self._deliver(output)
        if not outputs and not self.llm.has_work:
            self._end_all()
        return None

    def _back(self) -> None:
        """A step or command has returned. If it was given up, what ran ends here and the engine is whole again."""
        with self._wake:
            self._busy_since = self._current = None
            if self._lost is None:
                return
        log.warning("the engine is back after: %s", self._lost.message)
        self._end_all()
        for seq in list(self.llm.scheduler.sequences()):  # finished ones: their commits were refused
            self.llm.abort(seq)
        with self._wake:
            self._lost = None

    def _watch(self) -> None:
        limit = self.llm.config.step_timeout
        while not self._ended.wait(min(WATCH_SECONDS, limit / 4)):
            since = self._busy_since
            if since is not None and self._lost is None and time.monotonic() - since > limit:
                self._give_up(f"a step takes longer than step_timeout={limit:g} s", since)

    def _give_up(self, why: str, since: float | None = None) -> None:
        """Release everybody who waits for the engine's thread. since: only if it is still busy with what it began then."""
        with self._wake:
            if since is not None and self._busy_since != since:
                return
            self._lost = EngineFault(why, hint="Restart the server if it stays so; transcripts are kept")
            waiting = [future for future, _ in self._commands]
            self._commands.clear()
            if self._current is not None:
                waiting.append(self._current)
        log.error("%s: %d requests end", why, len(self._tickets))
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(EngineFault(why, hint=self._lost.hint))
        for ticket in list(self._tickets.values()):
            ticket.seq.fault = ticket.seq.fault or EngineFault(why, hint=self._lost.hint)
            ticket.outputs.put(None)

    def _deliver(self, output: StepOutput) -> None:
        ticket = self._tickets.get(output.seq.seq_id)
        if ticket is None:
            return
        if ticket.first_token is None:
            ticket.first_token = time.monotonic()
        ticket.outputs.put(output)
        if output.finished:
            del self._tickets[output.seq.seq_id]
            ticket.outputs.put(None)

    def _fail_all(self, error: Exception) -> None:
        for ticket in self._tickets.values():
            ticket.seq.fault = EngineFault(f"the engine failed: {type(error).__name__}: {error}")
            ticket.seq.fault.__cause__ = error
        self._end_all()

    def _end_all(self) -> None:
        for ticket in self._tickets.values():
            try:
                self.llm.abort(ticket.seq)
            except Exception:  # its accounts are broken already; the others must hear of it
                log.exception("sequence %d could not be ended cleanly", ticket.seq.seq_id)
            ticket.outputs.put(None)
        self._tickets.clear()
