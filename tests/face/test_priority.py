"""priority and timeout of a turn, over every way in; and what a preempted turn reports."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from agentkv import Runtime
from agentkv.engine.core import Request, Sequence
from agentkv.errors import BadRequest, Cancelled
from agentkv.types import Sampling


@pytest.fixture
def added(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Every sequence that the engine is given."""
    seen: list[Sequence] = []
    add = runtime._engine.worker.llm.add

    def spied(request: Request) -> Sequence:
        seen.append(add(request))
        return seen[-1]

    monkeypatch.setattr(runtime._engine.worker.llm, "add", spied)
    return seen


def test_priority_and_timeout_reach_the_engine(face: Any, added: list[Sequence]) -> None:
    session = face.session()
    session.add_user("hello")
    session.generate(max_tokens=2, priority=-4, timeout=60)
    session.add_user("again")
    with session.stream(max_tokens=2, priority=3) as stream:
        list(stream)
    session.add_user("and again")
    session.generate(max_tokens=2)
    asked = [(seq.request.priority, seq.request.timeout) for seq in added]
    assert asked == [(-4, 60), (3, None), (0, None)]
    session.close()


BAD = [{"priority": 11}, {"priority": 1.5}, {"priority": "high"}, {"timeout": 0}, {"timeout": -1}, {"timeout": float("nan")}]


@pytest.mark.parametrize("bad", BAD)
def test_out_of_range_is_refused_and_changes_nothing(face: Any, bad: dict[str, Any]) -> None:
    session = face.session()
    session.add_user("hello")
    with pytest.raises(BadRequest) as caught:
        session.generate(**bad)
    assert caught.value.details["param"] in bad
    assert session.generate(max_tokens=2).number == 1
    session.close()


def test_seconds_that_no_float_holds_are_refused(runtime: Runtime) -> None:
    with runtime.session() as session:
        session.add_user("hello")
        with pytest.raises(BadRequest, match="timeout"):
            session.generate(timeout=10**400)
    for bad in (10**400, True, float("nan")):
        with pytest.raises(BadRequest) as caught:
            Runtime(db=None, step_timeout=bad)
        assert caught.value.details["param"] == "step_timeout"


def test_a_timeout_ends_a_turn_that_waits_for_room(face: Any, runtime: Runtime) -> None:
    worker, session = runtime._engine.worker, face.session()
    session.add_user("hello")
    missed = runtime.stats()["deadline_misses"]
    slots = runtime.stats()["arena"]["total"] // runtime._engine.backend.token_bytes
    taken = worker.submit(Request([7, 8], Sampling(max_tokens=slots - 1), priority=10))
    try:
        with pytest.raises(Cancelled, match=r"timeout=0\.3 s") as caught:
            session.generate(timeout=0.3)
        assert caught.value.kept == 0
        assert runtime.stats()["deadline_misses"] == missed + 1
    finally:
        worker.abort(taken)
    assert session.generate(max_tokens=2).number == 1
    runtime.check()
    session.close()


def test_the_chat_route_takes_them_in_its_extension(base_url: str, added: list[Sequence]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    url = base_url + "/v1/chat/completions"
    assert httpx.post(url, json=body | {"agentkv": {"priority": 5, "timeout": 50.5}}).status_code == 200
    assert (added[-1].request.priority, added[-1].request.timeout) == (5, 50.5)
    for bad in ({"priority": 11}, {"priority": True}, {"timeout": 0}, {"timeout": "soon"}):
        answer = httpx.post(url, json=body | {"agentkv": bad})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
    assert httpx.post(url, json=body | {"agentkv": {"deadline": 5}}).json()["error"]["code"] == "unknown_option"


def test_a_preempted_turn_says_the_same_and_counts_what_it_cost() -> None:
    turns = []
    for disturbed in (False, True):
        with Runtime("micro", db=None, memory="8MiB", page_size=16) as runtime:
            if disturbed:
                _push_in(runtime._engine.worker.llm, at=12, size=800)
            session = runtime.session()
            session.add_user("the quick brown fox " * 30)
            with session.stream(max_tokens=40, temperature=1.0, seed=4) as stream:
                told = "".join(getattr(event, "text", "") for event in stream)
            turns.append((stream.turn, told, runtime.stats()))
            runtime.check()
    (calm, told, _), (turn, told_again, stats) = turns
    assert (turn.text, told_again) == (calm.text, told)
    assert (stats["preemptions"], stats["preempted"], stats["waiting_by_priority"]) == (1, 0, {})
    again = turn.usage.prefilled_tokens - calm.usage.prefilled_tokens
    assert again == stats["recomputed_tokens"] > 0
    assert turn.usage.prompt_tokens == calm.usage.prompt_tokens


def _push_in(llm: Any, *, at: int, size: int) -> None:
    """At that step a request of higher priority comes, and is gone when it has finished."""
    step, count = llm.step, itertools.count()

    def pushed() -> Any:
        if next(count) == at:
            llm.add(Request([5] * size, Sampling(max_tokens=3), priority=1))
        outputs = step()
        for output in outputs:
            if output.finished and output.seq.request.priority:
                llm.abort(output.seq)
        return outputs

    llm.step = pushed
