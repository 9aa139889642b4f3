"""The age of a result, against a recount of the raw events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_fakes import FakeBackend, Reply

from agentkv.errors import BadRequest
from agentkv.memory import policy as rules
from agentkv.memory.session import Session
from agentkv.types import Policy, Span

Event = tuple[str, int]


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Raw events of a branch: ("assistant", turn), ("result", answered turn), ("commit", 0) after each assistant turn."""
    events: list[Event] = []
    for turn in range(1, draw(st.integers(1, 8)) + 1):
        events += [("assistant", turn), ("commit", 0)]
        events += [("result", turn)] * draw(st.integers(0, 3))
    return events


def recount(events: list[Event], at: int) -> int | None:
    """Age of the result at this place, counted event by event; None before a generation has read it."""
    commits = [place for place, (kind, _) in enumerate(events) if kind == "commit"]
    if not commits or commits[-1] < at:
        return None
    return sum(kind == "result" and turn > events[at][1] for kind, turn in events[: commits[-1]])


@given(histories())
def test_age_is_what_a_recount_of_the_events_gives(events: list[Event]) -> None:
    answers = [turn for kind, turn in events if kind == "result"]
    last = max(place for place, (kind, _) in enumerate(events) if kind == "commit")
    committed = sum(kind == "result" for kind, _ in events[:last])
    places = [place for place, (kind, _) in enumerate(events) if kind == "result"]
    for number, place in enumerate(places):
        if number < committed:
            assert rules.age(answers, answers[number], committed) == recount(events, place)


@given(histories(), st.integers(0, 4))
def test_a_session_agrees_with_the_recount_after_every_event(events: list[Event], lag: int) -> None:
    backend = FakeBackend()
    session = Session(backend, policy=Policy(prune_after=lag))
    session.add_user("go")
    results = {turn: sum(e == ("result", turn) for e in events) for _, turn in events}
    past: list[Event] = []
    gone: set[int] = set()
    for event in events:
        if event[0] == "assistant":
            due = [
                place for place in spots(past) if place not in gone and (recount(past, place) or 0) >= lag and read(past, place)
            ]
            backend.say(Reply("t", calls=(("f", {}),) * results[event[1]]))
            turn = session.generate()
            assert len(turn.pruned_now) == len(due)
            gone |= set(due)
            past += [event, ("commit", 0)]
        elif event[0] == "result":
            session.add_tool_result(session.open_calls[0].id, f"body of {len(past)}")
            past.append(event)
        for place, span in zip(spots(past), results_of(session), strict=True):
            age = recount(past, place)
            assert span.age == age
            expected = "pruned" if place in gone else "due" if age is not None and age >= lag else "live"
            assert span.state == expected
    assert not backend.mismatches


def spots(events: list[Event]) -> list[int]:
    return [place for place, (kind, _) in enumerate(events) if kind == "result"]


def read(events: list[Event], place: int) -> bool:
    return recount(events, place) is not None


def results_of(session: Session) -> list[Span]:
    return [span for span in session.spans() if span.kind == "tool_result"]


def act(session: Session, backend: FakeBackend, *names: str, **more: object) -> list[Span]:
    """One generation that calls these tools, and a result for each."""
    backend.say(Reply("t", calls=tuple((name, {}) for name in names)))
    session.generate()
    return [session.add_tool_result(call.id, f"result of {call.id}", **more) for call in session.open_calls]  # type: ignore[arg-type]


def test_zero_means_read_once() -> None:
    backend = FakeBackend()
    session = Session(backend, policy=Policy(prune_after=0))
    session.add_user("go")
    (span,) = act(session, backend, "f")
    assert span.state == "live"
    assert span.prune_after == 0
    assert session.plan().frees_tokens == 0
    act(session, backend, "f")
    assert results_of(session)[0].state == "due"
    turn = session.generate()
    assert [row.span_id for row in turn.pruned_now] == [span.id]
    assert "prune_after=0" in turn.pruned_now[0].why


def test_parallel_results_never_age_one_another_and_errors_count() -> None:
    backend = FakeBackend()
    session = Session(backend)
    session.add_user("go")
    act(session, backend, "f", "f", "f")
    session.generate()
    assert [span.age for span in results_of(session)] == [0, 0, 0]
    session.add_user("more")
    act(session, backend, "f", "g", error=True)
    session.generate()
    assert [span.age for span in results_of(session)] == [2, 2, 2, 0, 0]
    session.prune(results_of(session)[3])
    assert [span.age for span in results_of(session)] == [2, 2, 2, 0, 0]


def test_the_results_own_lag_wins_over_the_policy() -> None:
    backend = FakeBackend()
    policy = Policy(prune_after=1, by_tool={"slow": 5, "never": None}, exclude_tools=("plan",), keep="edges:2")
    session = Session(backend, policy=policy)
    session.add_user("go")
    backend.say(Reply("t", calls=(("f", {}), ("slow", {}), ("never", {}), ("plan", {}), ("f", {}))))
    session.generate()
    calls = session.open_calls
    for call in calls[:4]:
        session.add_tool_result(call.id, "0123456789")
    session.add_tool_result(calls[4].id, "0123456789", prune_after=0, keep="edges:3")
    spans = results_of(session)
    assert [span.prune_after for span in spans] == [1, 5, None, None, 0]
    assert [span.keep for span in spans] == ["edges:2"] * 4 + ["edges:3"]
    session.generate()
    session.add_user("on")
    turn = session.generate()
    assert [(row.span_id, row.tokens) for row in turn.pruned_now] == [(spans[4].id, 4)]


def test_the_latest_policy_wins_for_what_is_not_due_and_never_unprunes() -> None:
    backend = FakeBackend()
    session = Session(backend, policy=Policy(prune_after=0))
    session.add_user("go")
    first, second = act(session, backend, "f")[0], act(session, backend, "f")[0]
    third = act(session, backend, "f")[0]
    assert [span.state for span in results_of(session)] == ["pruned", "due", "live"]
    session.set_policy(None)
    assert [span.state for span in results_of(session)] == ["pruned", "due", "live"]
    turn = session.generate()
    assert [row.span_id for row in turn.pruned_now] == [second.id]
    assert "before the policy changed" in turn.pruned_now[0].why
    assert [span.state for span in results_of(session)] == ["pruned", "pruned", "live"]
    session.set_policy(Policy(prune_after=0))
    assert session.spans()[-2].id == third.id
    assert session.spans()[-2].state == "due"
    assert first.id != third.id


def test_rollback_lowers_age_and_a_fork_inherits_it() -> None:
    backend = FakeBackend()
    session = Session(backend, policy=Policy(prune_after=2))
    session.add_user("go")
    for _ in range(3):
        act(session, backend, "f")
    session.generate()
    assert [span.age for span in results_of(session)] == [2, 1, 0]
    assert [span.state for span in results_of(session)] == ["due", "live", "live"]
    child = session.fork()
    assert [span.age for span in results_of(child)] == [2, 1, 0]
    session.rollback()
    assert [span.age for span in results_of(session)] == [1, 0]
    assert [span.state for span in results_of(session)] == ["live", "live"]
    assert [span.state for span in results_of(child)] == ["due", "live", "live"]


def test_a_pin_suspends_it() -> None:
    backend = FakeBackend()
    session = Session(backend, policy=Policy(prune_after=0))
    session.add_user("go")
    (span,) = act(session, backend, "f", pin=True)
    for _ in range(2):
        session.add_user("on") if not session.open_calls and session.turns > 1 else None
        assert session.generate().pruned_now == ()
    assert session.unpin(span).state == "due"
    session.add_user("on")
    assert [row.span_id for row in session.generate().pruned_now] == [span.id]


@pytest.mark.parametrize("lag", [-1, True, 1.5, "4"])
def test_a_lag_is_an_int_or_none(lag: object) -> None:
    backend = FakeBackend()
    session = Session(backend)
    session.add_user("go")
    backend.say(Reply("t", calls=(("f", {}),)))
    session.generate()
    with pytest.raises(BadRequest, match="prune_after"):
        session.add_tool_result(session.open_calls[0].id, "x", prune_after=lag)  # type: ignore[arg-type]
    assert session.open_calls


def test_rolling_back_forgets_what_was_due_and_pinned_later() -> None:
    backend = FakeBackend()
    session = Session(backend, policy=Policy(prune_after=0))
    session.add_user("go")
    act(session, backend, "f")
    act(session, backend, "f", pin=True)
    act(session, backend, "f")
    assert [span.state for span in results_of(session)] == ["pruned", "pinned", "live"]
    session.set_policy(None)
    session.generate()
    session.set_policy(Policy(prune_after=0))
    session.set_policy(None)
    assert [span.state for span in results_of(session)] == ["pruned", "pinned", "due"]
    session.rollback(to=3)
    assert session._branch.ledger.pins == {results_of(session)[1].id}
    session.rollback(to=1)
    assert session._branch.ledger.pins == set()


def test_rolling_back_recounts_with_the_policy_of_now() -> None:
    backend = FakeBackend()
    session = Session(backend)
    session.add_user("go")
    for _ in range(3):
        act(session, backend, "f")
    session.generate()
    session.set_policy(Policy(prune_after=0))
    session.set_policy(None)
    assert [span.state for span in results_of(session)] == ["due", "due", "due"]
    session.rollback(to=3)
    assert [span.state for span in results_of(session)] == ["live", "live"]
