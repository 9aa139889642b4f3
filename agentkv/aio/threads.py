"""Blocking calls made awaitable: threads for them, cancellation through them, and callbacks back onto the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from typing import Any, TypeVar

from agentkv.errors import Cancelled

T = TypeVar("T")

IDLE_SECONDS = 10.0
POKE_SECONDS = 0.05


class Threads:
    """Threads for blocking calls: as many as calls are waiting, ended when idle, never in the way of the interpreter's exit."""

    def __init__(self, name: str = "agentkv") -> None:
        self._name = name
        self._wake = threading.Condition()
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._idle = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Start the work in a thread, in the caller's context."""
        future: Future[T] = Future()
        context = contextvars.copy_context()
        with self._wake:
            self._work.append((future, lambda: context.run(work)))
            if self._idle >= len(self._work):
                self._wake.notify()
            else:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            future, work = taken
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del taken, future, work  # an idle thread must not keep a result alive

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._wake:
            while not self._work:
                self._idle += 1
                woken = self._wake.wait(IDLE_SECONDS)
                self._idle -= 1
                if not woken and not self._work:
                    return None
            return self._work.popleft()

    async def call(self, work: Callable[[], T], cancel: Callable[[], Any] | None = None) -> T:
        """The work's result. When the awaiting task is cancelled, `cancel` is called (more than once, as the work may not have
        begun what it cancels), the work's end is awaited, and only then does the cancellation go on."""
        future = self.submit(work)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not future.cancel():
                await self._settle(waiter, cancel)
            raise

    async def _settle(self, waiter: asyncio.Future[Any], cancel: Callable[[], Any] | None) -> None:
        poke: asyncio.Future[Any] | None = None
        # a late poke would hit the next turn: wait for it, too
        while pending := [future for future in (waiter, poke) if future is not None and not future.done()]:
            if cancel is not None and not waiter.done() and (poke is None or poke.done()):
                poke = asyncio.wrap_future(self.submit(_quiet(cancel)))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pending, timeout=POKE_SECONDS)
        if not waiter.cancelled():
            waiter.exception()  # seen: the cancellation is what the caller gets


def _quiet(call: Callable[[], Any]) -> Callable[[], None]:
    def quiet() -> None:
        with contextlib.suppress(Exception):
            call()

    return quiet


class Bridge:
    """Lets code in a thread call the functions, sync or async, that a task passed in: they run on the task's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None
        self._stopped = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A sync function for the thread; after `stop` it raises Cancelled."""

        async def invoke(*args: Any) -> Any:
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

        def call(*args: Any) -> Any:
            return self._run(invoke, args)

        return call

    def check(self, *_: Any) -> None:
        """Raise Cancelled after `stop`."""
        if self._stopped:
            raise Cancelled("the task was cancelled")

    def stop(self) -> None:
        """End what runs on the loop for the thread, and let nothing new begin."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                self._running.cancel()

    def _run(self, invoke: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> Any:
        with self._lock:
            self.check()
            future = self._running = asyncio.run_coroutine_threadsafe(invoke(*args), self._loop)
        try:
            return future.result()
        except FutureCancelledError:
            raise Cancelled("the task was cancelled") from None
        finally:
            with self._lock:
                self._running = None
