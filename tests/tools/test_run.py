"""The tool loop over a session that is a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agentkv.errors import BadRequest, Cancelled
from agentkv.tools import ALLOW, WAIT, Toolbox, ToolFinished, ToolStarted, reject
from agentkv.tools.run import ToolLoop
from agentkv.types import Span, TextDelta, ToolCall, ToolCallReady, Turn, TurnDone

SCHEMA = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


def double(n: int) -> int:
    """Doubles."""
    return 2 * n


def fail() -> str:
    """Fails."""
    raise ValueError("no")


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"c{number}", name=name, arguments=arguments)


class Scripted(ToolLoop):
    """Each generation gives the next of the given lists of calls; an empty list is a final answer."""

    def __init__(self, *turns: list[ToolCall], tools: Any = (double, fail)) -> None:
        self.toolbox = Toolbox(tools)
        self.turns = [Turn(number=at, text=f"t{at}", tool_calls=tuple(calls)) for at, calls in enumerate(turns)]
        self.open_calls: list[ToolCall] = []
        self.log: list[Any] = []
        self.suspended = 0

    def generate(self) -> Turn:
        assert not self.open_calls
        turn = self.turns.pop(0)
        self.open_calls = list(turn.tool_calls)
        self.log.append(("generate", turn.number))
        return turn

    class _Stream:
        def __init__(self, session: Scripted) -> None:
            self._session = session
            self.turn: Any = None

        def __iter__(self) -> Iterator[Any]:
            yield TextDelta(text="t")
            turn = self._session.generate()
            yield from (ToolCallReady(call=each) for each in turn.tool_calls)
            self.turn = turn
            yield TurnDone(turn=turn)

    @contextmanager
    def stream(self) -> Iterator[Any]:
        yield self._Stream(self)

    def _answer(self, call_id: str) -> Span:
        self.open_calls = [open_call for open_call in self.open_calls if open_call.id != call_id]
        return Span(id="s", kind="tool_result", turn=0)

    def add_tool_result(self, call_id: str, content: str, **options: Any) -> Span:
        self.log.append((call_id, content, options))
        return self._answer(call_id)

    def reject(self, call_id: str, reason: str) -> Span:
        self.log.append(("reject", call_id, reason))
        return self._answer(call_id)

    def suspend(self) -> None:
        self.suspended += 1


def test_runs_until_an_answer_without_calls() -> None:
    session = Scripted([call("double", 1, n=4), call("fail", 2)], [call("double", 3, n="x")], [])
    turn = session.run()
    assert (turn.number, turn.state) == (2, "done")
    assert session.log == [
        ("generate", 0),
        ("c1", "8", {"error": False}),
        ("c2", "ValueError: no", {"error": True}),
        ("generate", 1),
        ("c3", "InvalidArguments: double: Expected `int`, got `str` - at `$.n`", {"error": True}),
        ("generate", 2),
    ]


def test_prune_after_by_name() -> None:
    session = Scripted([call("double", 1, n=4), call("fail", 2)], [])
    session.run(prune_after={"double": 0})
    assert [entry[2] for entry in session.log if len(entry) == 3] == [{"error": False, "prune_after": 0}, {"error": True}]
    session = Scripted([call("double", 1, n=4)], [])
    session.run(prune_after=3)
    assert session.log[1][2] == {"error": False, "prune_after": 3}
    for wrong in (-1, True, "2", {"double": -1}):
        with pytest.raises(BadRequest, match="prune_after"):
            Scripted([]).run(prune_after=wrong)  # type: ignore[arg-type]


def test_max_turns_leaves_the_last_calls_open_and_goes_on() -> None:
    session = Scripted([call("double", 1, n=1)], [call("double", 2, n=2)], [])
    turn = session.run(max_turns=2)
    assert turn.number == 1
    assert [each.id for each in session.open_calls] == ["c2"]
    assert session.run(max_turns=1).number == 2
    assert session.log[-2] == ("c2", "4", {"error": False})
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(BadRequest, match="max_turns"):
            session.run(max_turns=wrong)  # type: ignore[arg-type]


def test_approve_allows_rejects_and_waits() -> None:
    session = Scripted([call("double", 1, n=1), call("double", 2, n=2), call("double", 3, n=3)], [])
    answers: dict[str, Any] = {"c1": reject("not now"), "c2": WAIT, "c3": ALLOW}
    turn = session.run(approve=lambda asked: answers[asked.id])
    assert (turn.state, turn.number) == ("waiting", 0)
    assert session.suspended == 1
    assert [each.id for each in session.open_calls] == ["c2", "c3"]
    assert session.log[1:] == [("reject", "c1", "not now")]
    again = session.run(approve=lambda asked: answers[asked.id])
    assert (again.state, again.tool_calls) == ("waiting", tuple(session.open_calls))
    answers["c2"] = ALLOW
    assert session.run(approve=lambda asked: answers[asked.id]).number == 1
    with pytest.raises(BadRequest, match="approve"):
        Scripted([call("double", 1, n=1)], []).run(approve=lambda asked: True)  # type: ignore[arg-type, return-value]


def test_events_in_order() -> None:
    session = Scripted([call("double", 1, n=4), call("double", 2, n=5)], [])
    seen: list[Any] = []
    session.run(on_event=seen.append, approve=lambda asked: ALLOW if asked.id == "c1" else reject("no"))
    assert [type(event).__name__ for event in seen] == [
        "TextDelta", "ToolCallReady", "ToolCallReady", "TurnDone", "ToolStarted", "ToolFinished", "ToolFinished", "TextDelta",
        "TurnDone",
    ]  # fmt: skip
    assert isinstance(seen[4], ToolStarted)
    finished = seen[5]
    assert isinstance(finished, ToolFinished)
    assert (finished.content, finished.error, finished.rejected) == ("8", False, False)
    assert (seen[6].content, seen[6].rejected) == ("no", True)


def test_what_on_event_raises_ends_the_run() -> None:
    session = Scripted([call("double", 1, n=4)], [])

    def stop(event: Any) -> None:
        if isinstance(event, ToolStarted):
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        session.run(on_event=stop)
    assert [each.id for each in session.open_calls] == ["c1"]


def test_schemas_need_execute_before_anything_runs() -> None:
    session = Scripted([call("look", 1, at="x")], [], tools=[SCHEMA, double])
    with pytest.raises(BadRequest, match="look") as caught:
        session.run()
    assert "execute=" in caught.value.hint
    assert session.log == []
    session.run(execute=lambda made: f"saw {made.arguments['at']}")
    assert session.log[1] == ("c1", "saw x", {"error": False})


def test_only_passed_tools_run() -> None:
    ran: list[ToolCall] = []
    session = Scripted([call("rm", 1), call("bash", 2, command="touch /tmp/never")], [], tools=[SCHEMA])
    session.run(execute=ran.append)
    assert ran == []
    assert [entry[2]["error"] for entry in session.log if len(entry) == 3] == [True, True]
