"""A turn as a stream of events."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from agentkv.errors import BadRequest
from agentkv.memory.turn import RunningTurn
from agentkv.types import Event, Turn


class TurnStream:
    """`with session.stream() as st: for event in st: ...`. The turn starts at `with`; leaving early rolls it back."""

    def __init__(self, make: Callable[[], RunningTurn]) -> None:
        self._make = make
        self._running: RunningTurn | None = None
        self._events: Iterator[Event] | None = None

    def __enter__(self) -> Self:
        if self._running is not None:
            raise BadRequest("this stream has been entered before", hint="Call session.stream() again for another turn")
        self._running = self._make()
        self._running.start()
        self._events = self._running.events()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._running is not None:
            self._running.abandon()

    def __del__(self) -> None:
        running = self._running
        if running is None or running.over or sys.is_finalizing():
            return
        # Entered and forgotten: the session must not stay busy. The collector may run on any thread, the engine's own included,
        # which must not wait for a lock that somebody holds who waits for the engine.
        threading.Thread(target=running.abandon, name="agentkv-forgotten-stream", daemon=True).start()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._events is None:
            raise BadRequest("this stream has not been entered", hint="Use it as `with session.stream() as st:`")
        return next(self._events)

    @property
    def done(self) -> bool:
        """Is the turn committed?"""
        return self._running is not None and self._running.turn is not None

    @property
    def begun(self) -> Turn:
        """The turn as it stands: counts, miss, exactness and what was pruned are known from the first event on, text is not."""
        if self._running is None:
            raise BadRequest("this stream has not been entered", hint="Use it as `with session.stream() as st:`")
        return self._running.begun()

    @property
    def turn(self) -> Turn:
        """The committed turn; BadRequest until then."""
        if self._running is None or self._running.turn is None:
            raise BadRequest("the turn is not committed", hint="Read the stream to its end first, or call finish()")
        return self._running.turn

    def finish(self) -> Turn:
        """Read to the end and return the turn."""
        for _ in self:
            pass
        return self.turn

    def cancel(self) -> None:
        """Ask for the turn's rollback, from any thread; whoever reads the stream gets Cancelled."""
        if self._running is not None:
            self._running.cancel()
