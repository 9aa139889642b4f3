"""The async twins: the same verbs, and cancellation that ends with the session at its last boundary."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agentkv.aio import AsyncSession, Threads
from agentkv.client import AsyncClient, RemoteSession
from agentkv.errors import BadRequest, Busy, Cancelled
from agentkv.tools import ALLOW, ToolStarted
from agentkv.types import TextDelta, TurnDone


def double(n: int) -> int:
    """Doubles."""
    return 2 * n


def connect(stub: Any) -> AsyncClient:
    return AsyncClient("http://kv.test", transport=httpx.MockTransport(stub))


def test_the_twins_have_the_same_verbs() -> None:
    def verbs(cls: type) -> dict[str, Any]:
        return {name: value for name, value in vars(cls).items() if not name.startswith("_")}

    ours, theirs = verbs(AsyncSession), verbs(RemoteSession)
    assert set(theirs) - set(ours) == {"refresh", "doubt", "took", "open_stream"}
    assert set(ours) - set(theirs) == {"session", "run"}
    for name in set(ours) & set(theirs):
        if inspect.isfunction(ours[name]):
            assert list(inspect.signature(ours[name]).parameters) == list(inspect.signature(theirs[name]).parameters), name


def test_verbs(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=1)], []]

    async def main() -> None:
        async with connect(stub) as client:
            async with await client.session(tools=[double]) as session:
                await session.add_user("hi")
                turn = await session.generate(max_tokens=3)
                assert [each.id for each in session.open_calls] == ["call_1"]
                before = len(stub.requests)
                assert (session.usage.prompt_tokens, session.turns, session.tokens) == (7, 1, 10)
                assert len(stub.requests) == before  # properties never ask
                await session.add_tool_result(turn.tool_calls[0].id, "2", prune_after=1)
                async with session.stream() as stream:
                    events = [event async for event in stream]
                assert isinstance(events[-1], TurnDone)
                assert stream.turn == events[-1].turn
                assert len(await session.spans()) == 2
                assert await session.messages()
                assert (await session.plan()).frees_now == 1
                assert [each.span_id for each in await session.prune("a")] == ["a"]
                for verb in (session.pin, session.unpin, session.recall, session.redact):
                    assert (await verb("a")).id == "a"
                assert (await session.fork()).turns == 2
                assert await session.rollback() == 1
                await session.cancel()
                assert (session.system, session.exactness, session.chain_id) == (None, "exact", "c1")
                assert session.session.id == session.id
            assert stub.sessions[session.id].suspended == 1
            again = await client.resume(session.id)
            await again.suspend()
            await again.close()
            assert len(await client.sessions()) == 2
            await client.delete(session.id)
            assert (await client.models())[0]["id"] == "micro"

    asyncio.run(main())


def test_run_with_callbacks_on_the_loop(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=4), call(2, "look")], []]
    schema = {"type": "function", "function": {"name": "look"}}

    async def main() -> None:
        async with connect(stub) as client:
            session = await client.session(tools=[double, schema])
            queue: asyncio.Queue[Any] = asyncio.Queue()
            home = threading.current_thread()

            async def approve(asked: Any) -> Any:
                await asyncio.sleep(0)
                assert threading.current_thread() is home
                return ALLOW

            async def execute(asked: Any) -> str:
                await asyncio.sleep(0)
                return "seen"

            turn = await session.run(on_event=queue.put_nowait, approve=approve, execute=execute)
            assert turn.finish_reason == "stop"
            assert queue.qsize() == 12
            assert stub.sessions[session.id].answers == {"call_1": "8", "call_2": "seen"}
            assert session.turns == 2

            def fails(event: Any) -> None:
                raise ValueError("mine")

            with pytest.raises(ValueError, match="mine"):
                await session.run(on_event=fails, execute=execute)

    asyncio.run(main())


async def cancelled(task: asyncio.Task[Any], after: float = 0.1) -> None:
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", ["generate", "stream", "run"])
def test_cancelling_the_task_cancels_the_turn(stub: Any, server: str, how: str) -> None:
    async def main() -> None:
        async with AsyncClient(server) as client:
            session = await client.session()
            stub.sessions[session.id].slow = True

            async def stream() -> None:
                async with session.stream() as events:
                    async for _ in events:
                        pass

            work = {"generate": session.generate, "run": session.run, "stream": stream}[how]
            task: asyncio.Task[Any] = asyncio.create_task(work())  # type: ignore[operator]
            await cancelled(task)
            stub.sessions[session.id].slow = False
            assert (await session.generate()).number == 1  # neither Busy nor cancelled by a late poke
            stub.sessions[session.id].slow = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.generate(), 0.1)
            stub.sessions[session.id].slow = False
            assert (await session.generate()).number == 2

    asyncio.run(main())


class Slow:
    """A sync session whose turn ends only by cancel; the turn begins a while after generate is called."""

    def __init__(self) -> None:
        self.usage = self.open_calls = None
        self.state: list[str] = []
        self._cancel = threading.Event()
        self._running = False

    def generate(self, **_: Any) -> Any:
        time.sleep(0.1)  # a cancel that comes now finds nothing to cancel
        return self._turn()

    def _turn(self) -> Any:
        if self._running:
            raise Busy("busy")
        self._running = True
        self._cancel.clear()
        self.state.append("begun")
        try:
            assert self._cancel.wait(10)
            time.sleep(0.05)  # the rollback takes its time
            self.state.append("rolled back")
            raise Cancelled("cancelled")
        finally:
            self._running = False

    def cancel(self) -> None:
        if self._running:
            self._cancel.set()

    @contextmanager
    def stream(self, **_: Any) -> Iterator[Any]:
        time.sleep(0.1)
        self.state.append("entered")
        try:
            yield iter([TextDelta(text="a")])
        finally:
            self.state.append("left")

    def run(self, *, on_event: Any, approve: Any = None, execute: Any = None, **_: Any) -> Any:
        for number in range(3):
            on_event(ToolStarted(call=number))  # type: ignore[arg-type]
            if approve is not None:
                approve(number)
            self.state.append(f"tool {number}")
            time.sleep(0.05)


def test_the_cancellation_waits_for_the_rollback() -> None:
    async def main() -> None:
        for after in (0.0, 0.02, 0.2):
            session = Slow()
            await cancelled(asyncio.create_task(AsyncSession(session).generate()), after)
            assert session.state in (["begun", "rolled back"], [])  # [] where it had not started
            assert session.state or not after

    asyncio.run(main())


def test_cancelling_twice_still_waits() -> None:
    async def main() -> None:
        session = Slow()
        task = asyncio.create_task(AsyncSession(session).generate())
        await asyncio.sleep(0.15)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.state == ["begun", "rolled back"]

    asyncio.run(main())


def test_cancelling_while_a_stream_is_entered_leaves_it() -> None:
    async def main() -> None:
        session = Slow()

        async def work() -> None:
            async with AsyncSession(session).stream():
                raise AssertionError("not entered")

        await cancelled(asyncio.create_task(work()), 0.02)
        assert session.state == ["entered", "left"]
        stream = AsyncSession(session).stream()
        with pytest.raises(BadRequest):
            await anext(stream)

    asyncio.run(main())


def test_cancelling_a_run_starts_no_other_tool() -> None:
    async def main() -> None:
        session = Slow()
        await cancelled(asyncio.create_task(AsyncSession(session).run()), 0.02)
        assert session.state == ["tool 0"]

        async def forever(asked: Any) -> Any:
            await asyncio.sleep(1000)

        session = Slow()
        await cancelled(asyncio.create_task(AsyncSession(session).run(approve=forever)), 0.02)
        assert session.state == []

    asyncio.run(main())


def test_two_turns_at_once_are_busy_as_in_the_sync_api() -> None:
    async def main() -> None:
        twin = AsyncSession(Slow())
        first = asyncio.create_task(twin.generate())
        await asyncio.sleep(0.15)
        with pytest.raises(Busy):
            await twin.generate()
        await cancelled(first, 0)

    asyncio.run(main())


def test_many_calls_at_once_have_a_thread_each() -> None:
    async def main() -> None:
        threads = Threads()
        barrier = threading.Barrier(40)
        await asyncio.gather(*(threads.call(lambda: barrier.wait(10)) for _ in range(40)))
        before = threading.active_count()
        for _ in range(20):
            await threads.call(lambda: None)
        assert threading.active_count() <= before  # idle threads are used again

    asyncio.run(main())


def test_a_blocked_call_does_not_hang_the_exit() -> None:
    code = "import time; from agentkv.aio import Threads; Threads().submit(lambda: time.sleep(60)); print('over')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "over\n"
