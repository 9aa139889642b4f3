"""A session's verbs, awaitable, run in threads over the sync session.

Cancelling the task that waits for a turn cancels the turn: the await ends when the session stands at its last boundary again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from agentkv.aio.threads import Bridge, Threads
from agentkv.errors import BadRequest
from agentkv.types import Event, Exactness, Plan, PrunedSpan, PruneMode, SamplingOptions, Span, ToolCall, Turn, Usage

S = TypeVar("S")
T = TypeVar("T")

_END: Any = object()


class AsyncStream:
    """`async with session.stream() as st: async for event in st: ...`; `st.turn` afterwards. Leaving early rolls back."""

    def __init__(
        self,
        threads: Threads,
        make: Callable[[], AbstractContextManager[Any]],
        cancel: Callable[[], Any],
        after: Callable[[], Any],
    ) -> None:
        self._threads = threads
        self._make = make
        self._cancel = cancel
        self._after = after
        self._manager: AbstractContextManager[Any] | None = None
        self._stream: Any = None
        self._events: Iterator[Event] | None = None

    async def __aenter__(self) -> Self:
        def enter() -> None:
            manager = self._make()
            self._stream = manager.__enter__()
            self._manager = manager
            self._events = iter(self._stream)

        try:
            await self._threads.call(enter, self._cancel)
        except asyncio.CancelledError:
            await self._leave(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(kind, error, trace)

    async def _leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        manager, self._manager = self._manager, None
        if manager is None:
            return

        def leave() -> None:
            manager.__exit__(kind, error, trace)
            self._after()

        await self._threads.call(leave)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        events = self._events
        if events is None:
            raise BadRequest("this stream has not been entered", hint="Use it as `async with session.stream() as st:`")
        event: Event = await self._threads.call(lambda: next(events, _END), self._cancel)
        if event is _END:
            raise StopAsyncIteration
        return event

    @property
    def turn(self) -> Turn:
        """The committed turn; BadRequest until then."""
        if self._stream is None:
            raise BadRequest("this stream has not been entered", hint="Use it as `async with session.stream() as st:`")
        turn: Turn = self._stream.turn
        return turn


class AsyncSession(Generic[S]):
    """A session whose verbs are awaited. The meaning of each is the sync verb's; properties are plain attributes.

    `async with`: leaving suspends. Callbacks of `run` may be async and run on the event loop.
    """

    def __init__(self, session: S, threads: Threads | None = None) -> None:
        self._session: Any = session
        self._threads = threads or Threads()

    async def __aenter__(self) -> Self:
        await self._threads.call(self._session.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.call(lambda: self._session.__exit__(kind, error, trace))

    def __repr__(self) -> str:
        return f"<Async{repr(self._session).removeprefix('<')}"

    @property
    def session(self) -> S:
        """The sync session below."""
        session: S = self._session
        return session

    @property
    def id(self) -> str:
        """Name of the session."""
        return str(self._session.id)

    @property
    def chain_id(self) -> str:
        """Name of its chain."""
        return str(self._session.chain_id)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        system: str | None = self._session.system
        return system

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Schemas of its tools."""
        tools: Sequence[dict[str, Any]] = self._session.tools
        return tools

    @property
    def turns(self) -> int:
        """Turns committed."""
        return int(self._session.turns)

    @property
    def tokens(self) -> int:
        """Logical tokens committed."""
        return int(self._session.tokens)

    @property
    def exactness(self) -> Exactness:
        """The worst of its method's exactness and of its prunes."""
        exactness: Exactness = self._session.exactness
        return exactness

    @property
    def usage(self) -> Usage:
        """Token counts over all turns."""
        usage: Usage = self._session.usage
        return usage

    @property
    def open_calls(self) -> Sequence[ToolCall]:
        """Calls that have no result yet, in the order they were made."""
        calls: Sequence[ToolCall] = self._session.open_calls
        return calls

    async def _call(self, work: Callable[[], T], *, turn: bool = False) -> T:
        def verb() -> T:
            try:
                return work()
            finally:
                self._peek()

        return await self._threads.call(verb, self._session.cancel if turn else None)

    def _peek(self) -> None:
        """In a thread, after a verb: a remote session fetches here what the properties show, so that they never block."""
        with contextlib.suppress(Exception):
            _ = self._session.usage, self._session.open_calls

    async def add_user(self, content: str | Sequence[Any]) -> Span:
        """Add what the user says."""
        return await self._call(lambda: self._session.add_user(content))

    async def add_tool_result(
        self,
        call_id: str,
        content: str | Sequence[Any],
        *,
        prune_after: int | None = None,
        keep: str = "drop",
        pin: bool = False,
        error: bool = False,
    ) -> Span:
        """Answer an open call."""
        options: dict[str, Any] = {"prune_after": prune_after, "keep": keep, "pin": pin, "error": error}
        return await self._call(lambda: self._session.add_tool_result(call_id, content, **options))

    async def reject(self, call_id: str, reason: str) -> Span:
        """Answer an open call without running it."""
        return await self._call(lambda: self._session.reject(call_id, reason))

    async def generate(
        self,
        *,
        tool_choice: Any = "auto",
        response_format: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> Turn:
        """Let the model answer; sampling: what differs from the session's."""
        options: dict[str, Any] = {
            "tool_choice": tool_choice,
            "response_format": response_format,
            "timeout": timeout,
            "priority": priority,
            **sampling,
        }
        return await self._call(lambda: self._session.generate(**options), turn=True)

    def stream(
        self,
        *,
        tool_choice: Any = "auto",
        response_format: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """The answer as events: `async with session.stream() as st: async for event in st: ...`."""
        options: dict[str, Any] = {
            "tool_choice": tool_choice,
            "response_format": response_format,
            "timeout": timeout,
            "priority": priority,
            **sampling,
        }
        make = lambda: self._session.stream(**options)
        return AsyncStream(self._threads, make, self._session.cancel, self._peek)

    async def run(
        self,
        *,
        max_turns: int = 50,
        prune_after: int | Mapping[str, int | None] | None = None,
        approve: Callable[[ToolCall], Any] | None = None,
        on_event: Callable[[Any], Any] | None = None,
        execute: Callable[[ToolCall], Any] | None = None,
    ) -> Turn:
        """The whole tool loop. approve, on_event and execute may be async. Cancelling stops before the next tool; one that runs
        in a thread is waited for."""
        bridge = Bridge()
        options: dict[str, Any] = {"on_event": bridge.check if on_event is None else bridge.wrap(on_event)}
        if approve is not None:
            options["approve"] = bridge.wrap(approve)
        if execute is not None:
            options["execute"] = bridge.wrap(execute)

        def cancel() -> None:
            bridge.stop()
            self._session.cancel()

        def work() -> Turn:
            turn: Turn = self._session.run(max_turns=max_turns, prune_after=prune_after, **options)
            self._peek()
            return turn

        return await self._threads.call(work, cancel)

    async def spans(self) -> list[Span]:
        """Every span in order."""
        return list(await self._call(lambda: self._session.spans()))

    async def messages(self) -> list[dict[str, Any]]:
        """The transcript in OpenAI's form."""
        return list(await self._call(lambda: self._session.messages()))

    async def plan(self, edit: Any = None, *, keep: str | None = None, mode: PruneMode | None = None) -> Plan:
        """The price of an edit."""
        return await self._call(lambda: self._session.plan(edit, keep=keep, mode=mode))

    async def prune(
        self,
        spans: Any,
        *,
        keep: str = "drop",
        scorer: Any = None,
        keep_ratio: float | None = None,
        mode: PruneMode = "in_place",
    ) -> list[PrunedSpan]:
        """Remove the bodies of tool results now."""
        options: dict[str, Any] = {"keep": keep, "scorer": scorer, "keep_ratio": keep_ratio, "mode": mode}
        return list(await self._call(lambda: self._session.prune(spans, **options)))

    async def recall(self, span: Span | str) -> Span:
        """Bring a pruned body back."""
        return await self._call(lambda: self._session.recall(span))

    async def redact(self, span: Span | str) -> Span:
        """Remove a body everywhere, text included."""
        return await self._call(lambda: self._session.redact(span))

    async def pin(self, span: Span | str) -> Span:
        """Never prune this result until it is unpinned."""
        return await self._call(lambda: self._session.pin(span))

    async def unpin(self, span: Span | str) -> Span:
        """Let a result be pruned again."""
        return await self._call(lambda: self._session.unpin(span))

    async def fork(self, at: int | None = None) -> Self:
        """A child that shares everything up to turn `at`, or up to now."""
        return type(self)(await self._call(lambda: self._session.fork(at)), self._threads)

    async def rollback(self, to: int | None = None) -> int:
        """Stand at the boundary of turn `to` again, or one turn back; returns the turn it stands at."""
        return int(await self._call(lambda: self._session.rollback(to)))

    async def suspend(self) -> None:
        """Its KV may be demoted or reclaimed."""
        await self._call(lambda: self._session.suspend())

    async def close(self) -> None:
        """Free its KV; the transcript stays."""
        await self._call(lambda: self._session.close())

    async def cancel(self) -> None:
        """Roll the running turn back, if there is one."""
        await self._call(lambda: self._session.cancel())
