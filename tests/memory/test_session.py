"""The verbs of a session without a store, and every error with where the session stands and what to do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from memory_fakes import ASSISTANT, END, FakeBackend, Reply, spell

from agentkv.errors import (
    AgentkvError,
    BadRequest,
    Busy,
    Capacity,
    Conflict,
    ContextOverflow,
    EngineFault,
    OpenCalls,
    OrphanResult,
    UnknownOption,
)
from agentkv.memory.session import Session
from agentkv.types import Sampling, ToolCall

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def session(backend: FakeBackend) -> Session:
    """A session whose first turn made one call."""
    opened = Session(backend, system="be brief", tools=TOOLS)
    opened.add_user("go")
    backend.say(Reply("calling", calls=(("f", {"n": 1}),), reasoning="hm"))
    opened.generate()
    return opened


def refused(error: type[AgentkvError], kept: int | None, call: Any) -> AgentkvError:
    with pytest.raises(error) as raised:
        call()
    assert raised.value.kept == kept
    assert raised.value.hint
    return raised.value


def test_without_a_store_nothing_of_a_database_is_loaded() -> None:
    import subprocess

    code = "import sys, agentkv.memory.session; print([m for m in ('sqlalchemy', 'alembic', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_conversation(session: Session, backend: FakeBackend) -> None:
    (call,) = session.open_calls
    assert (call.name, call.arguments) == ("f", {"n": 1})
    span = session.add_tool_result(call.id, "the result")
    assert (span.kind, span.turn, span.start, span.size, span.tool_name) == ("tool_result", 2, None, 10, "f")
    turn = session.generate()
    assert (turn.number, turn.finish_reason, turn.state, turn.miss, turn.exactness) == (2, "stop", "done", None, "exact")
    assert turn.chain_id == session.chain_id
    assert turn == session.last_turn
    kinds = [span.kind for span in session.spans()]
    assert kinds == ["system", "tools", "user", "reasoning", "text", "tool_call", "tool_result", "text"]
    assert [span.turn for span in session.spans()] == [1, 1, 1, 1, 1, 1, 2, 2]
    ids = list(session._branch.ledger.ids)
    texts = {span.kind: spell(ids[span.start : span.end]) for span in session.spans()[:7]}
    assert texts["system"] == "be brief"
    assert texts["user"] == "go"
    assert texts["reasoning"] == "hm"
    assert texts["tool_result"] == "the result"
    told = session.messages()
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "assistant"]
    assert told[2]["reasoning_content"] == "hm"
    assert told[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 1}'}
    assert told[3] == {"role": "tool", "tool_call_id": call.id, "name": "f", "content": "the result"}
    assert not backend.mismatches


def test_usage_adds_up(session: Session) -> None:
    session.add_tool_result(session.open_calls[0].id, "r")
    first, second = session.last_turn, session.generate()
    assert first is not None
    for turn in (first, second):
        assert turn.usage.prompt_tokens == turn.usage.cached_tokens + turn.usage.prefilled_tokens
    assert second.usage.reusable_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert session.usage.prompt_tokens == first.usage.prompt_tokens + second.usage.prompt_tokens
    assert session.usage.resident_tokens == second.usage.resident_tokens
    assert session.tokens == second.usage.prompt_tokens + second.usage.completion_tokens


def test_results_of_one_turn_are_rendered_together(backend: FakeBackend) -> None:
    session = Session(backend)
    session.add_user("go")
    backend.say(Reply("two", calls=(("f", {}), ("g", {}))))
    session.generate()
    one, two = session.open_calls
    session.add_tool_result(two.id, "second call first")
    refused(OpenCalls, 1, session.generate)
    session.add_tool_result(one.id, "first call")
    session.generate()
    first, second = (span for span in session.spans() if span.kind == "tool_result")
    assert (first.call_id, second.call_id) == (two.id, one.id)
    assert first.end is not None
    assert second.start is not None
    assert first.end < second.start


def test_open_calls_orphans_and_conflicts(session: Session) -> None:
    (call,) = session.open_calls
    for verb in (session.generate, lambda: session.add_user("x"), lambda: session.add_assistant("x")):
        error = refused(OpenCalls, 1, verb)
        assert error.details["ids"] == [call.id]
    refused(OrphanResult, 1, lambda: session.add_tool_result("call_x", "r"))
    first = session.add_tool_result(call.id, "r", prune_after=3)
    again = session.add_tool_result(call.id, "r")
    assert again == first
    refused(Conflict, 1, lambda: session.add_tool_result(call.id, "other"))
    session.generate()
    assert session.add_tool_result(call.id, "r").id == first.id
    refused(Conflict, 2, lambda: session.add_tool_result(call.id, "other"))
    assert len([span for span in session.spans() if span.kind == "tool_result"]) == 1


def test_reject_answers_without_running(session: Session) -> None:
    span = session.reject(session.open_calls[0].id, "too dangerous")
    assert span.error
    assert not session.open_calls
    assert session.messages()[-1]["content"] == "Rejected: too dangerous"


def test_content_is_text_or_text_parts(backend: FakeBackend) -> None:
    session = Session(backend)
    session.add_user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert session.messages() == [{"role": "user", "content": "ab"}]
    for content in (None, 5, {"type": "text"}, [{"type": "image_url", "image_url": {}}]):
        refused(BadRequest, 0, lambda content=content: session.add_user(content))
    assert len(session.spans()) == 1


def test_history_that_a_client_brings_along(backend: FakeBackend) -> None:
    session = Session(backend)
    session.add_user("q")
    call = ToolCall(id="c1", name="f", arguments={"a": 1}, raw='{"a": 1}')
    spans = session.add_assistant("thinking aloud", [call], "deep")
    assert [span.kind for span in spans] == ["reasoning", "text", "tool_call"]
    assert session.open_calls == (call,)
    refused(Conflict, 0, lambda: session.add_tool_result("c1", "r") and session.add_assistant("", [call]))
    session.add_assistant("so it is")
    session.add_user("and now?")
    turn = session.generate()
    assert turn.number == 1
    assert [span.kind for span in session.spans()] == [
        "user", "reasoning", "text", "tool_call", "tool_result", "text", "user", "text",
    ]  # fmt: skip
    edges = [edge for span in session.spans() for edge in (span.start, span.end)]
    assert edges == sorted(edges)
    assert [span.age for span in session.spans() if span.kind == "tool_result"] == [0]
    assert session.messages()[1]["tool_calls"][0]["id"] == "c1"


def test_a_turn_that_ran_into_max_tokens_is_closed_by_the_next_rendering(backend: FakeBackend) -> None:
    session = Session(backend)
    session.add_user("go")
    backend.say(Reply("a long answer", calls=(("f", {}),)))
    turn = session.generate(max_tokens=4)
    assert (turn.finish_reason, turn.text, turn.tool_calls) == ("length", "a lo", ())
    session.add_user("go on")
    session.generate()
    ids = list(session._branch.ledger.ids)
    at = turn.usage.prompt_tokens
    assert ids[at : at + 5] == [*map(ord, "a lo"), END]
    assert ids.count(ASSISTANT) == 2


def test_a_turn_without_new_messages_goes_on(backend: FakeBackend) -> None:
    session = Session(backend)
    refused(BadRequest, 0, session.generate)
    session.add_user("go")
    session.generate()
    assert session.generate().number == 2
    assert not backend.mismatches


def test_an_empty_answer_is_a_turn(backend: FakeBackend) -> None:
    session = Session(backend)
    session.add_user("go")
    backend.say(Reply("", echo=False))
    assert session.generate().text == ""
    assert [span.kind for span in session.spans()] == ["user", "text"]
    assert session.messages()[-1] == {"role": "assistant", "content": ""}


def test_a_head_that_the_template_brings_is_a_span(backend: FakeBackend) -> None:
    backend.template_system = "default"
    session = Session(backend)
    session.add_user("go")
    session.generate()
    assert [span.kind for span in session.spans()] == ["system", "user", "text"]
    backend.say(Reply("x", calls=(("f", {}),)))
    session.generate()
    span = session.add_tool_result(session.open_calls[0].id, "found by its call")
    assert session.add_tool_result(span.call_id or "", "found by its call").id == span.id
    session.rollback(to=0)
    assert session.spans() == []


# -- what is refused


def test_what_is_not_served_is_refused(session: Session, backend: FakeBackend) -> None:
    refused(BadRequest, None, lambda: Session(backend, history="template"))
    refused(BadRequest, None, lambda: Session(backend, history="no-such"))
    refused(BadRequest, None, lambda: Session(backend, on_window="slide"))
    session.add_tool_result(session.open_calls[0].id, "r" * 20)
    span = next(span for span in session.spans() if span.kind == "tool_result")
    for verb in (
        lambda: session.generate(response_format={"type": "yaml"}),
        lambda: session.generate(tool_choice="sometimes"),
        lambda: session.choices(0),
        lambda: session.choices(17),
        lambda: session.generate(tool_choice={"type": "function"}),
        lambda: session.generate(timeout=0),
        lambda: session.generate(max_tokens=0),
        lambda: session.generate(top_p=2.0),
        lambda: session.prune(span, scorer="by-attention"),
        lambda: session.prune(span, keep_ratio=0.5),
        lambda: session.recall(span),
        lambda: session.redact(span),
    ):
        refused(BadRequest, 1, verb)
    refused(UnknownOption, 1, lambda: session.plan({"spans": [span], "ratio": 1}))
    assert session.generate(response_format={"type": "text"}, tool_choice="none").number == 2


def test_sampling_defaults_and_what_a_call_changes(backend: FakeBackend) -> None:
    seen: list[Sampling] = []
    generate = backend.generate

    def spy(chain_id: str, history: Any, suffix: Any, sampling: Sampling, **more: Any) -> Any:
        seen.append(sampling)
        return generate(chain_id, history, suffix, sampling, **more)

    backend.generate = spy  # type: ignore[method-assign]
    session = Session(backend, sampling=Sampling(temperature=0.5, max_tokens=50), salt="salt of a tenant")
    session.add_user("go")
    session.generate(seed=3, stop="END", temperature=0.0)
    assert seen == [Sampling(temperature=0.0, max_tokens=50, seed=3, stop=("END",))]
    assert backend.salts == ["salt of a tenant"]


def test_errors_of_the_engine_leave_the_session_at_its_boundary(session: Session, backend: FakeBackend) -> None:
    session.add_tool_result(session.open_calls[0].id, "r")
    before = session.spans()
    backend.errors["generate"] = Capacity("no room", retry_after=2.0)
    error = refused(Capacity, 1, session.generate)
    assert error.retry_after == 2.0
    backend.errors["render"] = RuntimeError("template broke")
    assert "template broke" in str(refused(EngineFault, 1, session.generate))
    backend.say(Reply("half an ans", error=RuntimeError("device lost")))
    assert "device lost" in str(refused(EngineFault, 1, session.generate))
    assert session.spans() == before
    assert not session.running
    assert session.generate().number == 2
    assert not backend.mismatches


def test_an_overflow_says_what_a_rebuild_could_free(backend: FakeBackend) -> None:
    backend.window = 300
    session = Session(backend, on_window="error")
    session.add_user("go")
    backend.say(Reply("t", calls=(("f", {}),)))
    session.generate()
    session.add_tool_result(session.open_calls[0].id, "r" * 100)
    session.generate()
    session.add_user("u" * 200)
    error = refused(ContextOverflow, 2, session.generate)
    assert error.details["freeable"] == 100
    assert error.details["logical"] > error.details["limit"] == 300
    assert session.messages()[-1]["content"] == "u" * 200


def test_a_repeated_call_id_of_the_dialect_is_a_fault(session: Session, backend: FakeBackend) -> None:
    call = session.open_calls[0]
    session.add_tool_result(call.id, "r")
    backend.new_call_id = lambda: call.id  # type: ignore[method-assign]
    backend.say(Reply("again", calls=(("f", {}),)))
    refused(EngineFault, 1, session.generate)
    assert session.turns == 1


# -- branches and the end


def test_rollback_opens_the_calls_again(session: Session, backend: FakeBackend) -> None:
    (call,) = session.open_calls
    session.add_tool_result(call.id, "r")
    second = session.generate()
    assert session.rollback() == 1
    assert session.open_calls == (call,)
    session.add_tool_result(call.id, "r")
    again = session.generate()
    assert again.text == second.text
    session.add_user("dropped")
    assert session.rollback(to=2) == 2
    assert session.messages()[-1]["role"] == "assistant"
    assert session.rollback(to=0) == 0
    assert [span.kind for span in session.spans()] == ["system", "tools"]
    assert session.tokens == 0
    refused(BadRequest, 0, session.rollback)
    refused(BadRequest, 0, lambda: session.rollback(to=1))
    refused(BadRequest, 0, lambda: session.rollback(to=-1))
    session.add_user("anew")
    assert session.generate().number == 1
    assert not backend.mismatches


def test_a_fork_shares_and_leaves_the_parent(session: Session, backend: FakeBackend) -> None:
    (call,) = session.open_calls
    child, early = session.fork(), session.fork(at=0)
    assert child.id != session.id
    assert child.chain_id != session.chain_id
    for branch in (session, child):
        branch.add_tool_result(call.id, "r")
    assert child.generate().text == session.generate().text
    assert child.last_turn is not None
    assert child.last_turn.usage.reusable_share > 0.95
    child.add_user("only here")
    child.close()
    assert session.messages()[-1]["role"] == "assistant"
    early.add_user("other start")
    assert early.generate().number == 1
    refused(BadRequest, 2, lambda: session.fork(at=3))
    assert not backend.mismatches


def test_a_fork_takes_what_is_pending_and_its_own_name(session: Session) -> None:
    session.add_tool_result(session.open_calls[0].id, "r")
    child = session.fork(session_id="child")
    assert child.id == "child"
    assert not child.open_calls
    assert child.messages() == session.messages()
    assert session.fork(at=1).open_calls


def test_when_a_fork_cannot_share_the_child_prefills(session: Session, backend: FakeBackend) -> None:
    backend.errors["fork"] = RuntimeError("no")
    child = session.fork()
    child.add_tool_result(child.open_calls[0].id, "r")
    turn = child.generate()
    assert turn.miss is not None
    assert turn.usage.cached_tokens == 0


def test_leaving_with_suspends(session: Session, backend: FakeBackend) -> None:
    with session:
        pass
    assert backend.suspended == [session.chain_id]
    assert not session.closed
    assert session.info().state == "idle"
    with session:
        session.close()
    assert backend.suspended == [session.chain_id]


def test_an_exception_in_with_rolls_a_running_turn_back(session: Session, backend: FakeBackend) -> None:
    session.add_tool_result(session.open_calls[0].id, "r")
    stream = session.stream()

    def body() -> None:
        with session:
            stream.__enter__()
            next(stream)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert not session.running
    assert session.turns == 1
    assert session.messages()[-1]["content"] == "r"
    assert session.generate().number == 2
    assert not backend.mismatches


def test_cancelling_a_turn_that_is_over_leaves_the_next_one_alone(session: Session) -> None:
    """A server tells a turn to stop when its client leaves, and may say so after the turn's end."""
    session.add_tool_result(session.open_calls[0].id, "r")
    over = session.stream()
    with over:
        over.finish()
    session.add_user("next")
    with session.stream() as stream:
        next(stream)
        over.cancel()
        assert stream.finish().number == 3


def test_close_frees_kv_and_keeps_the_transcript(session: Session, backend: FakeBackend) -> None:
    session.close()
    session.close()
    assert session.chain_id not in backend.chains
    assert session.messages()
    assert session.info().state == "closed"
    for verb in (
        session.generate,
        session.plan,
        session.fork,
        session.rollback,
        session.suspend,
        lambda: session.add_user("x"),
    ):
        refused(BadRequest, 1, verb)


def test_kv_that_was_reclaimed_is_a_miss_with_a_reason(session: Session, backend: FakeBackend) -> None:
    session.add_tool_result(session.open_calls[0].id, "r")
    backend.drop(session.chain_id)
    assert session.info().state == "stored"
    turn = session.generate()
    assert turn.miss is not None
    assert turn.miss.reason == "reclaimed"
    assert "stored ids" in turn.miss.detail
    assert session.info().state == "hot"
    fresh = Session(backend)
    assert fresh.info().state == "idle"
    fresh.add_user("go")
    first = fresh.generate()
    assert first.miss is not None
    assert first.miss.reason == "new"


def test_info_and_repr(session: Session) -> None:
    info = session.info()
    assert (info.id, info.turns, info.model) == (session.id, 1, "fake")
    assert info.open_calls == tuple(call.id for call in session.open_calls)
    assert session.id in repr(session)
    assert (session.system, session.tools, session.policy, session.tenant) == ("be brief", tuple(TOOLS), None, "")


def test_a_busy_chain_in_the_engine_is_busy(session: Session, backend: FakeBackend) -> None:
    session.add_tool_result(session.open_calls[0].id, "r")
    backend.chains[session.chain_id].active = True
    refused(Busy, 1, session.generate)
    backend.chains[session.chain_id].active = False
    assert session.generate().number == 2
