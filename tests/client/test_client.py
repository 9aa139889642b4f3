"""The client over a stub of the HTTP contract: verbs, values, exceptions, streams, retries."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from agentkv.client import Client, RemoteSession, Unreachable
from agentkv.errors import (
    AgentkvError,
    BadModel,
    BadRequest,
    Busy,
    Cancelled,
    Capacity,
    Conflict,
    ContextOverflow,
    EngineFault,
    OpenCalls,
    OrphanResult,
    StoreFault,
    UnknownModel,
    UnknownOption,
)
from agentkv.tools import WAIT, ToolFinished
from agentkv.types import Policy, TextDelta, ToolCallReady, TurnDone

ALL = [
    BadRequest, UnknownOption, UnknownModel, BadModel, OrphanResult, OpenCalls, Conflict, ContextOverflow, Busy, Capacity,
    Cancelled, EngineFault, StoreFault, AgentkvError,
]  # fmt: skip


def double(n: int) -> int:
    """Doubles."""
    return 2 * n


def connect(stub: Any, **options: Any) -> Client:
    return Client("http://kv.test/v1/", "secret", transport=httpx.MockTransport(stub), **options)


def test_a_session_is_opened_with_what_was_given(stub: Any) -> None:
    with connect(stub) as client:
        plain = client.session()
        assert stub.requests == [("POST", "/v1/sessions", {}, "Bearer secret")]
        assert (plain.turns, plain.tokens, plain.open_calls, plain.tools, plain.system) == (0, 0, (), (), None)
        session = client.session(
            id="mine", system="s", tools=[double], policy=Policy(prune_after=4), history="template", temperature=0.5, seed=None
        )
        body = stub.requests[-1][2]
        assert body.pop("tools")[0]["function"]["name"] == "double"
        assert body.pop("policy")["prune_after"] == 4
        assert body == {"id": "mine", "system": "s", "history": "template", "sampling": {"temperature": 0.5}}
        assert session.tools[0]["function"]["name"] == "double"
        assert [row.id for row in client.sessions()] == ["s 0/x", "mine"]
        assert client.models() == [{"id": "micro", "max_model_len": 64}]
        client.delete("s 0/x")
        assert [row.id for row in client.sessions()] == ["mine"]


def test_verbs_and_their_bodies(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=1), call(2, n=2)], []]
    session = connect(stub).session(tools=[double])
    state = stub.sessions[session.id]
    span = session.add_user([{"type": "text", "text": "hi"}])
    assert (span.kind, span.id) == ("user", "sp0")
    turn = session.generate(max_tokens=5, stop=["x"], timeout=3.0)
    assert state.asked == [{"max_tokens": 5, "stop": ["x"], "timeout": 3.0, "tool_choice": "auto"}]
    assert (turn.finish_reason, session.last_turn) == ("tool_calls", turn)
    assert [each.id for each in session.open_calls] == ["call_1", "call_2"]
    before = len(stub.requests)
    result = session.add_tool_result("call_1", "2", prune_after=3, keep="edges:4", pin=True)
    assert stub.requests[-1][2] == {"call_id": "call_1", "content": "2", "prune_after": 3, "keep": "edges:4", "pin": True}
    assert (result.call_id, result.prune_after, result.keep) == ("call_1", 3, "edges:4")
    assert session.add_tool_result("call_1", "2") == result
    session.reject("call_2", "no")
    assert session.open_calls == ()
    assert len(stub.requests) == before + 3  # open calls are known without asking
    assert (session.turns, session.tokens, session.usage.prompt_tokens, session.exactness) == (1, 10, 7, "exact")
    assert len(stub.requests) == before + 4  # and the counts are fetched once
    assert [each.kind for each in session.spans()] == ["user", "tool_result", "tool_result"]
    assert session.messages() == [{"role": "user", "content": "x"}]
    for edit, body in [(None, {}), (span, {"spans": ["sp0"]}), ([span, "a"], {"spans": ["sp0", "a"]})]:
        session.plan(edit)
        assert state.asked[-1] == body
    assert session.plan({"spans": "a", "mode": "rebuild"}).spans == ("a",)
    assert state.asked[-1] == {"spans": ["a"], "mode": "rebuild"}
    assert [each.span_id for each in session.prune([span, "b"], keep="edges:2")] == ["sp0", "b"]
    assert state.asked[-1] == {"spans": ["sp0", "b"], "keep": "edges:2", "mode": "in_place"}
    assert session.pin(span).state == "pinned"
    assert [verb("q").id for verb in (session.unpin, session.recall, session.redact)] == ["q"] * 3


def test_branches_and_the_end(stub: Any) -> None:
    client = connect(stub)
    session = client.session()
    session.generate()
    session.generate()
    assert session.rollback() == 1
    assert session.turns == 1
    assert session.rollback(0) == 0
    session.generate()
    child = session.fork()
    assert (child.id, child.turns) == ("s 0/x-fork", 1)
    with child:
        pass
    assert stub.sessions[child.id].suspended == 1
    session.close()
    with session:
        pass
    state = stub.sessions[session.id]
    assert (state.closed, state.suspended) == (True, 0)
    again = client.resume(child.id)
    assert (again.id, again.turns) == (child.id, 1)
    stub.fail = [StoreFault("x")]
    with pytest.raises(RuntimeError, match="mine"), again:  # what went wrong first is what is seen
        raise RuntimeError("mine")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_class_comes_through(stub: Any, kind: type[AgentkvError]) -> None:
    session = connect(stub).session()
    sent = kind("it failed", kept=3, hint="do this", retry_after=1.5, ids=["a"], limit=9, param="x")
    for verb in (lambda: session.add_user("x"), session.generate, lambda: session.stream().__enter__(), session.spans):
        stub.fail = [sent]
        with pytest.raises(AgentkvError) as caught:
            verb()
        error = caught.value
        assert type(error) is kind
        assert (error.message, error.kept, error.hint, error.retry_after, error.details) == (
            sent.message, sent.kept, sent.hint, sent.retry_after, sent.details,
        )  # fmt: skip
        assert error.ids == ["a"]  # type: ignore[attr-defined]
        assert str(error) == str(sent)


def test_errors_of_verbs(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=1)]]
    client = connect(stub)
    session = client.session(tools=[double])
    session.generate()
    with pytest.raises(OpenCalls) as caught:
        session.generate()
    assert caught.value.ids == ["call_1"]  # type: ignore[attr-defined]
    with pytest.raises(OrphanResult):
        session.add_tool_result("other", "x")
    assert [each.id for each in session.open_calls] == ["call_1"]  # asked again after an error
    session.add_tool_result("call_1", "2")
    with pytest.raises(Conflict):
        session.add_tool_result("call_1", "3")
    with pytest.raises(BadRequest, match="no session"):
        client.resume("unknown/../id")
    with pytest.raises(BadRequest, match="JSON"):
        session.add_user(object())  # type: ignore[arg-type]


def test_answers_that_are_not_agentkvs(stub: Any) -> None:
    session = connect(stub).session()
    for failure in [(502, b"<html>bad gateway"), (404, b'{"detail": "Not Found"}'), (200, b"<html>"), (200, b'{"id": 1}')]:
        stub.fail = [failure]
        with pytest.raises(EngineFault) as caught:
            session.refresh()
        assert "base_url" in caught.value.hint
    stub.fail = [(200, b"data: {}\n\n")]
    with session.stream() as stream, pytest.raises(EngineFault):
        next(stream)


def test_only_capacity_is_tried_again_and_only_when_asked_to(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    full = Capacity("full", retry_after=0.25)
    session = connect(stub).session()
    stub.fail = [full]
    with pytest.raises(Capacity):
        session.generate()
    patient = connect(stub, retries=2).session()
    stub.fail = [full, full]
    assert patient.generate().text == "done"
    stub.fail = [full]
    with patient.stream() as stream:
        assert stream.finish().text == "done"
    assert slept == [0.25] * 3
    for failures in ([full] * 3, [Capacity("never fits")], [Busy("busy", retry_after=1)], [EngineFault("x", retry_after=1)]):
        stub.fail = list(failures)
        with pytest.raises(type(failures[0])):
            patient.generate()
        assert stub.fail == []
    assert slept == [0.25] * 5


def test_streams(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=1)]]
    session = connect(stub).session(tools=[double])
    with session.stream(temperature=1.0) as stream:
        assert not stream.done
        with pytest.raises(BadRequest, match="not committed"):
            _ = stream.turn
        events = list(stream)
    assert [type(event) for event in events] == [TextDelta, TextDelta, ToolCallReady, TurnDone]
    assert events[0] == TextDelta(text="line\u2028sep\x85 ")  # no line ends inside an event
    assert stream.turn == events[-1].turn == session.last_turn
    assert stub.sessions[session.id].asked[-1] == {"temperature": 1.0, "tool_choice": "auto", "stream": True}
    assert [each.id for each in session.open_calls] == ["call_1"]
    with pytest.raises(BadRequest, match="not been entered"):
        next(session.stream())
    with pytest.raises(BadRequest, match="entered before"):
        stream.__enter__()


def test_a_stream_that_breaks(stub: Any) -> None:
    session = connect(stub).session()
    stub.fail = [(200, b'data: {"type": "text_delta", "text": "a"}\n\n')]
    with session.stream() as stream, pytest.raises(Unreachable, match="ended before"):
        list(stream)
    wire = {"code": "context_length_exceeded", "agentkv": {"message": "m", "kept": 2, "details": {"limit": 5}}}
    stub.fail = [
        (200, b'data:{"type":"text_delta","text":"a"}\n\ndata: {"error": %s}\n\n' % httpx.Response(200, json=wire).content)
    ]
    with session.stream() as stream, pytest.raises(ContextOverflow) as caught:
        list(stream)
    assert (caught.value.kept, caught.value.limit) == (2, 5)  # type: ignore[attr-defined]
    assert all(request[1].rpartition("/")[2] != "cancel" for request in stub.requests)


def test_leaving_a_stream_early_waits_for_the_rollback(stub: Any, server: str) -> None:
    with Client(server) as client:
        session = client.session()
        stub.sessions[session.id].slow = True
        with session.stream() as stream:
            assert next(stream) == TextDelta(text="line\u2028sep\x85 ")
        stub.sessions[session.id].slow = False
        assert session.turns == 0
        assert session.generate().number == 1  # not Busy


def test_cancel_from_another_thread(stub: Any, server: str) -> None:
    with Client(server) as client:
        session = client.session()
        stub.sessions[session.id].slow = True
        timer = threading.Timer(0.1, session.cancel)
        timer.start()
        with pytest.raises(Cancelled):
            session.generate()
        timer.join()
        assert session.turns == 0


def test_no_server() -> None:
    with Client("http://127.0.0.1:9", timeout=2) as client, pytest.raises(Unreachable, match="no server answers") as caught:
        client.models()
    assert "agentkv serve" in caught.value.hint
    assert isinstance(caught.value, EngineFault)
    for url in ("127.0.0.1:8000", "ftp://x", "http://[::1"):
        with pytest.raises(BadRequest, match="base_url"):
            Client(url).models()


def test_a_server_that_does_not_answer(stub: Any, server: str) -> None:
    with Client(server, timeout=0.2) as client:
        session = client.session()
        stub.sessions[session.id].slow = True
        with pytest.raises(Unreachable, match="in time"):
            session.generate()
        stub.sessions[session.id].cancelled.set()


def test_the_tool_loop_runs_here(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=4)], [call(2, n=5)], []]
    session = connect(stub).session(tools=[double])
    seen: list[Any] = []
    turn = session.run(on_event=seen.append, prune_after=2)
    assert (turn.number, turn.tool_calls) == (3, ())
    state = stub.sessions[session.id]
    assert state.answers == {"call_1": "8", "call_2": "10"}
    assert [span.prune_after for span in state.spans] == [2, 2]
    assert sum(isinstance(event, ToolFinished) for event in seen) == 2


def test_a_waiting_run_goes_on_in_another_process(stub: Any, call: Any) -> None:
    stub.script += [[call(1, n=4)], []]
    client = connect(stub)
    turn = client.session(id="w", tools=[double]).run(approve=lambda asked: WAIT)
    assert turn.state == "waiting"
    assert stub.sessions["w"].suspended == 1
    with pytest.raises(BadRequest, match="execute"):
        client.resume("w").run()
    with pytest.raises(BadRequest, match="without a tool 'connect'"):
        client.resume("w", tools=[{"name": "connect"}])
    resumed: RemoteSession = client.resume("w", tools=[double])
    assert resumed.run(approve=lambda asked: WAIT).tool_calls == resumed.open_calls
    assert resumed.run().finish_reason == "stop"
    assert stub.sessions["w"].answers == {"call_1": "8"}
