"""Streams, cancelling, timeouts, and what other threads may do while a turn runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from memory_fakes import FakeBackend, Reply

from agentkv.errors import BadRequest, Busy, Cancelled, EngineFault
from agentkv.memory.session import Session
from agentkv.types import ReasoningDelta, TextDelta, ToolCallReady, TurnDone


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def session(backend: FakeBackend) -> Session:
    opened = Session(backend)
    opened.add_user("first")
    opened.generate()
    opened.add_user("second")
    return opened


def held(session: Session, backend: FakeBackend, **options: Any) -> tuple[Reply, threading.Thread, list[Any]]:
    """A turn that runs in a thread until `reply.hold` is set; and what came of it."""
    reply = Reply("slow", hold=threading.Event())
    backend.say(reply)
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(session.generate(**options))
        except Exception as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert reply.held.wait(5)
    return reply, thread, outcome


def stands(session: Session, backend: FakeBackend, turn: int = 1) -> None:
    """The session is at its last boundary with its message pending, and goes on."""
    assert not session.running
    assert session.turns == turn
    assert session.messages()[-1] == {"role": "user", "content": "second"}
    assert session.generate().number == turn + 1
    assert not backend.mismatches


def test_a_stream_gives_what_generate_gives(backend: FakeBackend) -> None:
    turns = []
    for streamed in (True, False):
        session = Session(backend)
        session.add_user("go")
        backend.say(Reply("text", calls=(("f", {"n": 1}),), reasoning="because"))
        if streamed:
            with session.stream() as st:
                assert not st.done
                with pytest.raises(BadRequest, match="not committed"):
                    _ = st.turn
                events = list(st)
            assert st.done
            turns.append(st.turn)
        else:
            turns.append(session.generate())
    assert [type(event) for event in events[:1] + events[-2:]] == [ReasoningDelta, ToolCallReady, TurnDone]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == turns[0].text == turns[1].text
    assert events[-1] == TurnDone(turn=turns[0])
    assert turns[0].usage == turns[1].usage
    assert [call.arguments for call in turns[0].tool_calls] == [call.arguments for call in turns[1].tool_calls]


def test_what_is_known_when_a_turn_has_begun(session: Session, backend: FakeBackend) -> None:
    stream = session.stream()
    with pytest.raises(BadRequest, match="entered"):
        _ = stream.begun
    with stream:
        begun = stream.begun
        assert (begun.number, begun.text, begun.chain_id, begun.miss) == (2, "", session.chain_id, None)
        assert stream.finish().usage.prompt_tokens == begun.usage.prompt_tokens
        assert stream.begun == stream.turn


def test_nothing_runs_before_with(session: Session) -> None:
    stream = session.stream()
    assert not session.running
    with pytest.raises(BadRequest, match="entered"):
        next(stream)
    with stream:
        assert session.running
        assert stream.finish().number == 2
    with pytest.raises(BadRequest, match="before"):
        stream.__enter__()


@pytest.mark.parametrize("read", [0, 1, 3])
def test_leaving_early_rolls_back(session: Session, backend: FakeBackend, read: int) -> None:
    with session.stream() as st:
        for _ in range(read):
            next(st)
    stands(session, backend)


def test_an_exception_in_the_body_rolls_back(session: Session, backend: FakeBackend) -> None:
    def body() -> None:
        with session.stream() as st:
            for _ in st:
                raise KeyError

    with pytest.raises(KeyError):
        body()
    stands(session, backend)


def test_leaving_after_the_last_event_keeps_the_turn(session: Session) -> None:
    with session.stream() as st:
        for event in st:
            if isinstance(event, TurnDone):
                break
    assert session.turns == 2
    assert session.last_turn == st.turn


def test_a_stream_that_is_dropped_does_not_keep_the_session_busy(session: Session, backend: FakeBackend) -> None:
    stream = session.stream()
    stream.__enter__()
    next(stream)
    del stream
    stands(session, backend)


def test_a_running_turn_refuses_changes_and_shows_the_rest(session: Session, backend: FakeBackend) -> None:
    before = session.spans()
    reply, thread, outcome = held(session, backend)
    changes: list[Callable[[], Any]] = [
        session.generate,
        lambda: session.add_user("x"),
        lambda: session.add_assistant("x"),
        lambda: session.add_tool_result("c", "x"),
        lambda: session.prune("x"),
        lambda: session.pin("x"),
        lambda: session.set_policy(None),
        session.rollback,
        session.suspend,
    ]
    for change in changes:
        with pytest.raises(Busy) as raised:
            change()
        assert raised.value.kept == 1
        assert raised.value.hint
    assert session.running
    assert session.spans() == before
    assert session.usage.completion_tokens == len("ok-1234") + 1
    assert session.plan().spans == ()
    child = session.fork()
    assert child.messages() == session.messages()
    assert child.generate().number == 2
    assert reply.hold is not None
    reply.hold.set()
    thread.join(5)
    assert outcome[0].number == 2
    assert not backend.mismatches


def test_cancel_from_another_thread(session: Session, backend: FakeBackend) -> None:
    session.cancel()
    _, thread, outcome = held(session, backend)
    session.cancel()
    session.cancel()
    thread.join(5)
    assert isinstance(outcome[0], Cancelled)
    assert outcome[0].kept == 1
    assert outcome[0].hint
    stands(session, backend)


def test_a_timeout_is_a_cancel(session: Session, backend: FakeBackend) -> None:
    backend.say(Reply("slow", hold=threading.Event()))
    with pytest.raises(Cancelled, match="timeout=0.05") as raised:
        session.generate(timeout=0.05)
    assert raised.value.kept == 1
    assert session.generate(timeout=30).number == 2
    assert threading.active_count() < 10


def test_close_and_cancel_of_a_stream_end_a_running_turn(session: Session, backend: FakeBackend) -> None:
    backend.say(Reply("slow", hold=threading.Event()))
    with session.stream() as st:
        next(st)
        st.cancel()
        with pytest.raises(Cancelled):
            st.finish()
    _, thread, outcome = held(session, backend)
    session.close()
    thread.join(5)
    assert isinstance(outcome[0], Cancelled)
    assert session.turns == 1
    assert session.chain_id not in backend.chains


def test_cancel_while_the_turn_starts(session: Session, backend: FakeBackend) -> None:
    generate = backend.generate

    def slow(*args: Any, **more: Any) -> Any:
        session.cancel()
        return generate(*args, **more)

    backend.generate = slow  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        session.generate()
    backend.generate = generate  # type: ignore[method-assign]
    stands(session, backend)


def test_a_chain_that_cannot_be_rolled_back_is_dropped(session: Session, backend: FakeBackend) -> None:
    backend.cancel_error = RuntimeError("stuck")
    with session.stream() as st:
        next(st)
    backend.cancel_error = None
    assert session.chain_id not in backend.chains
    stands(session, backend)


def test_a_chain_that_fails_after_the_store_has_the_turn_is_dropped(session: Session, backend: FakeBackend) -> None:
    backend.commit_error = RuntimeError("device lost")
    assert session.generate().number == 2
    backend.commit_error = None
    assert session.chain_id not in backend.chains
    session.add_user("on")
    turn = session.generate()
    assert turn.number == 3
    assert turn.usage.cached_tokens == 0


def test_keyboard_interrupt_rolls_back(session: Session, backend: FakeBackend) -> None:
    backend.say(Reply("x", error=KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        session.generate()
    stands(session, backend)
    backend.commit_error = KeyboardInterrupt()
    session.add_user("third")
    with pytest.raises(KeyboardInterrupt):
        session.generate()
    backend.commit_error = None
    assert session.turns == 3  # the store had it
    assert not session.running


def test_threads_share_a_session(backend: FakeBackend) -> None:
    session = Session(backend)
    session.add_user("go")
    done: list[int] = []
    problems: list[Exception] = []

    def work() -> None:
        for _ in range(20):
            try:
                done.append(session.generate().number)
            except Busy:
                time.sleep(0.001)
            except Exception as error:  # noqa: BLE001
                problems.append(error)
            session.spans()
            session.messages()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems
    assert sorted(done) == list(range(1, session.turns + 1))
    assert not backend.mismatches


def test_leaving_the_session_ends_a_turn_of_another_thread(session: Session, backend: FakeBackend) -> None:
    with session:
        _, thread, outcome = held(session, backend)
    thread.join(5)
    assert isinstance(outcome[0], Cancelled)
    assert backend.suspended == [session.chain_id]
    backend.errors["suspend"] = RuntimeError("engine is gone")
    with pytest.raises(KeyError), session:
        raise KeyError
    stands(session, backend)


def test_errors_of_ours_pass_as_they_are(session: Session, backend: FakeBackend) -> None:
    backend.say(Reply("x", error=EngineFault("lost a device")))
    with pytest.raises(EngineFault, match="^lost a device"):
        session.generate()
    stands(session, backend)
