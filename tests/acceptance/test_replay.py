"""A pruned session whose KV is gone goes on by prefill, token for token as if it had never been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.types import TurnDone
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import make_task


def play(runtime: Runtime, world: World, turns: int, **options: Any) -> tuple[Any, list[Any]]:
    session = runtime.session(system=NATIVE.system, tools=[world.bash])
    session.add_user(world.task.prompt)
    events: list[Any] = []
    session.run(max_turns=turns, on_event=events.append, **options)
    return session, [event.turn for event in events if isinstance(event, TurnDone)]


def go_on(session: Any, world: World, **options: Any) -> list[Any]:
    events: list[Any] = []
    session.run(max_turns=24, on_event=events.append, **options)
    return [event.turn for event in events if isinstance(event, TurnDone)]


def said(turns: list[Any]) -> list[Any]:
    return [(turn.text, [call.arguments for call in turn.tool_calls], turn.finish_reason) for turn in turns]


@pytest.mark.parametrize("lag", [None, 0, 1])
def test_resumed_without_kv_gives_the_same_tokens(tmp_path: Path, lag: int | None) -> None:
    seed = 3
    options = {"prune_after": lag}
    with Runtime("micro", db=None) as runtime, World(make_task(seed)) as world:
        _, whole = play(runtime, world, 24, **options)
    with Runtime("micro", db=tmp_path / "a.db") as runtime, World(make_task(seed)) as world:
        session, first = play(runtime, world, 3, **options)
    with Runtime("micro", db=tmp_path / "a.db") as runtime, World(make_task(seed)) as again:
        for turn in first[:-1]:  # bring the new world to where the old one was
            for call in turn.tool_calls:
                again.bash(**call.arguments)
        resumed = runtime.resume(session.id, tools=[again.bash])
        rest = go_on(resumed, again, **options)
        assert rest[0].usage.prefilled_tokens > rest[0].usage.cached_tokens
        assert rest[0].miss is not None
        runtime.check()
    assert said(first) + said(rest) == said(whole)
    if lag is not None:
        assert whole[-1].usage.pruned_tokens > 0
        assert rest[-1].usage.pruned_tokens == whole[-1].usage.pruned_tokens
        assert rest[-1].usage.resident_tokens == whole[-1].usage.resident_tokens


def test_a_rebuild_is_as_if_the_body_had_been_the_placeholder(tmp_path: Path) -> None:
    """Oracle: a second session whose tool really printed the placeholder."""
    with Runtime("micro", db=None) as runtime, World(make_task(3)) as world:
        session, turns = play(runtime, world, 2)
        call = session.open_calls[0]
        session.add_tool_result(call.id, world.bash(**call.arguments))
        body = next(span for span in session.spans() if span.kind == "tool_result")
        session.prune(body.id, mode="rebuild")
        rebuilt = session.generate()
        twin = runtime.session(system=NATIVE.system, tools=[world.bash])
        twin.add_user(world.task.prompt)
        for turn in turns:
            twin.add_assistant(turn.text, turn.tool_calls)
            for made in turn.tool_calls:
                told = next(m["content"] for m in session.messages() if m.get("tool_call_id") == made.id)
                twin.add_tool_result(made.id, "[pruned]" if made.id == body.call_id else told)
        plain = twin.generate()
        assert said([rebuilt]) == said([plain])
        assert rebuilt.usage.prompt_tokens == plain.usage.prompt_tokens
        assert rebuilt.usage.prefilled_tokens < plain.usage.prompt_tokens
        assert rebuilt.miss is not None
        assert rebuilt.miss.reason == "rebuild"
