"""A blocking generation in a worker thread, seen from the event loop: its events, its end, and its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from agentkv.errors import AgentkvError, Cancelled, EngineFault

T = TypeVar("T")

MAX_THREADS = 1024
POKE_SECONDS = 0.05


class Threads:
    """Where blocking session calls run, so that the event loop stays free."""

    def __init__(self, count: int = MAX_THREADS) -> None:
        self._limit = anyio.CapacityLimiter(count)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in a worker thread and return its result or raise its error."""
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limit)


class Job(Generic[T]):
    """Runs `work(job)` in a thread. The work emits events; the loop iterates over them and then reads `result`.

    The work sets `interrupt` to what makes it stop (its stream's cancel; any thread, does not block), and is stopped when the
    client of `request` goes away or `stop` is called: `emit` and `check` then raise Cancelled inside the work.
    """

    def __init__(self, work: Callable[[Job[T]], T], request: Request, threads: Threads) -> None:
        self.started = time.monotonic()
        self.first_event: float | None = None
        self.interrupt: Callable[[], Any] = lambda: None
        self._work = work
        self._request = request
        self._threads = threads
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._runner = self._loop.create_task(self._run())
        self._watcher = self._loop.create_task(self._watch())

    # -- for the work

    def emit(self, event: Any) -> None:
        """Hand an event to the loop."""
        self.check()
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def check(self) -> None:
        """Raise Cancelled when the job was stopped."""
        if self._stop.is_set():
            raise Cancelled("the client is gone; the turn was rolled back")

    # -- for the loop

    async def next(self) -> Any:
        """The next event, None after the last. Raises the error that ended the work."""
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
            if self._error is not None:
                raise self._error
        elif self.first_event is None:
            self.first_event = time.monotonic()
        return event

    async def rest(self) -> AsyncIterator[Any]:
        """The events that remain."""
        while (event := await self.next()) is not None:
            yield event

    async def finish(self) -> T:
        """The result, once everything has been emitted."""
        async for _ in self.rest():
            pass
        return self._result[0]

    def stop(self) -> None:
        """Stop the work if it still runs. Does not wait."""
        self._watcher.cancel()
        if not self._runner.done() and not self._stop.is_set():
            self._stop.set()
            self._poke()

    def _poke(self) -> None:
        # once is not enough: the first call may come before there is anything to interrupt
        if not self._runner.done():
            with contextlib.suppress(AgentkvError):
                self.interrupt()
            self._loop.call_later(POKE_SECONDS, self._poke)

    async def _run(self) -> None:
        try:
            self._result.append(await self._threads.call(lambda: self._work(self)))
        except AgentkvError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 (a thread's error must reach the client)
            self._error = EngineFault(f"internal error: {type(error).__name__}: {error}")
            self._error.__cause__ = error
        finally:
            self._watcher.cancel()
            self._events.put_nowait(None)

    async def _watch(self) -> None:
        # the body has been read, so the next message can only be that the client went away
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.stop()
