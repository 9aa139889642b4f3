"""One file over both ways in: what docs/api.md promises of a session holds in process and over HTTP."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agentkv.errors import BadRequest, Conflict, ContextOverflow, OpenCalls, OrphanResult, UnknownOption
from agentkv.types import Policy, TextDelta, ToolCallReady, TurnDone
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import make_task

SEED = 6  # a chase: several tool results


def opened(face: Any, world: World | None = None, **options: Any) -> Any:
    tools = [world.bash] if world else list(NATIVE.tools)
    return face.session(system=NATIVE.system, tools=tools, **options)


def first_call(face: Any, world: World, **options: Any) -> Any:
    """A session whose model has just made its first call."""
    session = opened(face, world, **options)
    session.add_user(world.task.prompt)
    turn = session.generate()
    assert turn.finish_reason == "tool_calls"
    assert len(session.open_calls) == 1
    return session


@pytest.fixture
def world() -> Any:
    with World(make_task(SEED)) as made:
        yield made


def test_a_task_is_solved_and_nothing_is_prefilled_twice(face: Any, world: World) -> None:
    events: list[Any] = []
    with opened(face, world) as session:
        session.add_user(world.task.prompt)
        last = session.run(max_turns=24, on_event=events.append)
        assert world.verdict()
        assert last.finish_reason == "stop"
        turns = [event.turn for event in events if isinstance(event, TurnDone)]
        assert len(turns) >= 4
        for before, turn in itertools.pairwise(turns):
            assert turn.usage.prompt_tokens == turn.usage.cached_tokens + turn.usage.prefilled_tokens
            assert turn.usage.reusable_share >= 0.995
            assert turn.usage.prompt_tokens > before.usage.prompt_tokens
            assert turn.miss is None
            assert turn.exactness == "exact"
        kinds = [span.kind for span in session.spans()]
        assert kinds[:3] == ["system", "tools", "user"]
        assert kinds.count("tool_result") == kinds.count("tool_call") == len(turns) - 1


def test_spans_tile_the_chain_in_order(face: Any, world: World) -> None:
    session = first_call(face, world)
    spans = session.spans()
    edges = [edge for span in spans for edge in (span.start, span.end)]
    assert edges == sorted(edges)
    session.close()


def test_streaming_gives_what_generate_gives(face: Any, world: World) -> None:
    plain = first_call(face, world)
    session = opened(face, world)
    session.add_user(world.task.prompt)
    with session.stream() as stream:
        events = list(stream)
    calls = [event.call for event in events if isinstance(event, ToolCallReady)]
    assert isinstance(events[-1], TurnDone)
    assert [call.arguments for call in calls] == [call.arguments for call in plain.open_calls]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == stream.turn.text
    plain.close()
    session.close()


def test_leaving_a_stream_early_rolls_the_turn_back(face: Any) -> None:
    session = face.session()
    session.add_user("babble")
    with session.stream(max_tokens=3000, temperature=2.0, seed=3) as stream:
        for _ in stream:
            break
    assert session.turns == 0
    turn = session.generate(max_tokens=4)
    assert turn.number == 1
    assert session.messages()[0] == {"role": "user", "content": "babble"}
    session.close()


def test_open_calls_conflict_and_orphan(face: Any, world: World) -> None:
    session = first_call(face, world)
    call = session.open_calls[0]
    for refused in (session.generate, lambda: session.add_user("more")):
        with pytest.raises(OpenCalls) as raised:
            refused()
        assert raised.value.ids in ([call.id], (call.id,))
        assert raised.value.kept is not None
        assert raised.value.hint
    with pytest.raises(OrphanResult):
        session.add_tool_result("call_never_made", "x")
    first = session.add_tool_result(call.id, "one")
    assert session.add_tool_result(call.id, "one").id == first.id
    with pytest.raises(Conflict):
        session.add_tool_result(call.id, "two")
    session.close()


def test_a_rejected_call_is_answered_without_running_it(face: Any, world: World) -> None:
    session = first_call(face, world)
    span = session.reject(session.open_calls[0].id, "not allowed")
    assert span.kind == "tool_result"
    assert span.error
    assert not session.open_calls
    assert session.generate().number >= 1
    session.close()


def test_prune_after_frees_tokens_and_says_so(face: Any, world: World) -> None:
    events: list[Any] = []
    session = opened(face, world)
    session.add_user(world.task.prompt)
    session.run(max_turns=24, prune_after=1, on_event=events.append)
    turns = [event.turn for event in events if isinstance(event, TurnDone)]
    pruned = [gone for turn in turns for gone in turn.pruned_now]
    assert pruned
    assert turns[0].exactness == "exact"
    assert turns[-1].exactness == "lossy"
    assert turns[-1].usage.pruned_tokens == sum(gone.tokens for gone in pruned)
    assert turns[-1].usage.resident_tokens < turns[-1].usage.prompt_tokens
    assert all(turn.usage.reusable_share >= 0.995 for turn in turns[1:])
    assert {span.state for span in session.spans() if span.kind == "tool_result"} >= {"pruned"}
    session.close()


def test_plan_prices_a_prune_before_it_is_made(face: Any, world: World) -> None:
    session = first_call(face, world)
    assert session.plan().frees_tokens == 0
    span = session.add_tool_result(session.open_calls[0].id, world.bash(session.open_calls[0].arguments["command"]))
    session.generate()
    span = next(row for row in session.spans() if row.id == span.id)
    plan = session.plan([span.id])
    assert plan.frees_tokens == span.tokens
    assert plan.prefill_tokens == 0
    pruned = session.prune(span.id)
    assert [row.tokens for row in pruned] == [span.tokens]
    with pytest.raises(BadRequest):
        session.prune(span.id)
    session.close()


def test_pin_keeps_a_result_from_the_policy(face: Any, world: World) -> None:
    session = opened(face, world, policy=Policy(prune_after=0))
    session.add_user(world.task.prompt)
    pinned = None
    for _ in range(4):
        turn = session.generate()
        for call in turn.tool_calls:
            span = session.add_tool_result(call.id, world.bash(call.arguments["command"]), pin=pinned is None)
            pinned = pinned or span.id
    states = {span.id: span.state for span in session.spans() if span.kind == "tool_result"}
    assert states[pinned] == "pinned"
    assert "pruned" in states.values()
    assert session.unpin(pinned).state in ("live", "due")
    session.close()


def test_fork_shares_and_leaves_the_parent(face: Any, world: World) -> None:
    session = first_call(face, world)
    call = session.open_calls[0]
    child = session.fork()
    for branch, text in ((session, "nothing here"), (child, "nothing here")):
        branch.add_tool_result(call.id, text)
    first, second = session.generate(), child.generate()
    assert [c.arguments for c in first.tool_calls] == [c.arguments for c in second.tool_calls]
    assert first.text == second.text
    assert second.usage.reusable_share >= 0.995
    child.close()
    assert session.messages()
    session.close()


def test_rollback_then_the_same_turn_again(face: Any, world: World) -> None:
    session = first_call(face, world)
    call = session.open_calls[0]
    session.add_tool_result(call.id, world.bash(call.arguments["command"]))
    second = session.generate()
    session.rollback()
    assert [open_.id for open_ in session.open_calls] == [call.id] or not session.open_calls
    if session.open_calls:
        session.add_tool_result(call.id, world.bash(call.arguments["command"]))
    again = session.generate()
    assert [c.arguments for c in again.tool_calls] == [c.arguments for c in second.tool_calls]
    session.close()


def test_suspend_and_resume_by_id(face: Any, world: World) -> None:
    session = first_call(face, world)
    call = session.open_calls[0]
    session.suspend()
    again = face.resume(session.id)
    assert [open_.id for open_ in again.open_calls] == [call.id]
    assert any(row.id == session.id for row in face.sessions())
    again.add_tool_result(call.id, "no such file\n[exit 1]", error=True)
    assert again.generate().number >= 1
    again.close()
    face.delete(session.id)
    with pytest.raises(BadRequest):
        face.resume(session.id)


def test_bad_input_is_refused_at_the_door(face: Any) -> None:
    for options, error in (
        ({"temperature": -1.0}, BadRequest),
        ({"nonsense": 1}, UnknownOption),
        ({"policy": {"prune_after": -1}}, BadRequest),
        ({"policy": {"prun_after": 1}}, UnknownOption),
        ({"history": "template"}, BadRequest),
        ({"method": "no-such-method"}, BadRequest),
    ):
        with pytest.raises(error) as raised:
            face.session(**options)
        assert raised.value.hint
    session = face.session()
    session.add_user("hi")
    for options in (
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
        {"tool_choice": "required"},
        {"max_tokens": 0},
        {"top_p": 2.0},
    ):
        with pytest.raises(BadRequest):
            session.generate(**options)
    session.close()


def test_a_prompt_beyond_the_window_overflows(face: Any) -> None:
    session = face.session()
    session.add_user("x" * 70_000)
    with pytest.raises(ContextOverflow) as raised:
        session.generate(max_tokens=4)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.logical > raised.value.limit
    assert raised.value.hint
    session.close()


def test_a_rebuild_puts_the_placeholder_of_the_session(face: Any, world: World) -> None:
    session = first_call(face, world, placeholder="(gone)")
    call = session.open_calls[0]
    span = session.add_tool_result(call.id, world.bash(call.arguments["command"]))
    session.generate()
    before = session.tokens
    span = next(row for row in session.spans() if row.id == span.id)
    plan = session.plan([span.id], mode="rebuild")
    assert plan.prefill_tokens > 0
    session.prune(span.id, mode="rebuild")
    assert session.tokens == before - span.tokens + len("(gone)")  # one token a byte
    session.close()
