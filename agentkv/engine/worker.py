"""The engine's thread: steps the LLM while there is work and runs everybody else's commands between steps.

All engine state belongs to this thread, so nothing in the engine needs a lock. It is a daemon thread: a runtime that was
never closed does not hang the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from agentkv.engine.core import Request, Sequence, StepOutput
from agentkv.engine.llm import LLM
from agentkv.errors import EngineFault

T = TypeVar("T")

STALL_SECONDS = 10.0
"""Readiness turns false when work was queued this long without a token."""


BLOCKED_SECONDS = 0.002
"""Pause before trying again when nothing could be scheduled."""


class Ticket:
    """A submitted sequence and the outputs it has made so far. `outputs` ends with None."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.submitted = time.monotonic()
        self.first_token: float | None = None
        self.outputs: SimpleQueue[StepOutput | None] = SimpleQueue()


class EngineWorker:
    """Owns an `LLM` and the thread that may touch it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._tickets: dict[int, Ticket] = {}
        self._closed = False
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="agentkv-engine", daemon=True)
        self._thread.start()

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

    def abort(self, ticket: Ticket) -> None:
        """End a sequence at any point; its chain stands at its last boundary. Idempotent."""

        def end() -> None:
            self.llm.abort(ticket.seq)
            if self._tickets.pop(ticket.seq.seq_id, None) is not None:
                ticket.outputs.put(None)

        self.post(end)

    @property
    def ready(self) -> bool:
        """Tokens progress while work is queued."""
        idle = not self._tickets and not self._commands
        stalled = time.monotonic() - self._last_progress > STALL_SECONDS
        return self._thread.is_alive() and not self._closed and (idle or not stalled)

    def close(self) -> None:
        """Stop the thread; running sequences end as aborted."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def _post(self, future: Future[Any], command: Callable[[], Any]) -> None:
        with self._wake:
            if self._closed or not self._thread.is_alive():
                raise EngineFault("the engine is closed", hint="Open a new Runtime and resume the session")
            if not self._tickets and not self._commands:
                self._last_progress = time.monotonic()
            self._commands.append((future, command))
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._tickets or self._closed):
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
                closed = self._closed
            for future, command in commands:
                self._run(future, command)
            if closed:
                return self._end_all()
            if self._tickets:
                self._step()

    def _run(self, future: Future[Any], command: Callable[[], Any]) -> None:
        self._last_progress = time.monotonic()
        try:
            future.set_result(command())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)

    def _step(self) -> None:
        try:
            outputs = self.llm.step()
        except Exception as error:  # noqa: BLE001 - a fault of the engine itself: no sequence can be trusted to go on
            return self._fail_all(error)
        if self.llm.scheduler.running or outputs:
            self._last_progress = time.monotonic()
        elif self._tickets:  # memory is held by turns that are being committed
            time.sleep(BLOCKED_SECONDS)
        for output in outputs:
            self._deliver(output)
        if not outputs and not self.llm.has_work:
            self._end_all()
        return None

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
            self.llm.abort(ticket.seq)
        self._end_all()

    def _end_all(self) -> None:
        for ticket in self._tickets.values():
            self.llm.abort(ticket.seq)
            ticket.outputs.put(None)
        self._tickets.clear()
