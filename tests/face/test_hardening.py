"""Faults that were found by trying to break it; each stays fixed."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentkv import Client, Runtime
from agentkv.errors import AgentkvError, BadRequest, Busy, Cancelled, Conflict

WRONG_SAMPLING = [
    {"top_k": 10**30}, {"top_k": 1.5}, {"top_k": True}, {"seed": 1.5}, {"seed": "3"}, {"seed": 2**70}, {"stop": (5,)},
    {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": "1"}, {"max_tokens": 1.5}, {"max_tokens": True},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_SAMPLING, ids=str)
def test_a_wrong_sampling_value_is_refused_and_other_turns_go_on(runtime: Runtime, wrong: dict[str, Any]) -> None:
    with runtime.session() as other, runtime.session() as session:
        other.add_user("babble")
        session.add_user("hello")
        with other.stream(max_tokens=12, temperature=2.0, seed=1) as stream:
            with pytest.raises(BadRequest):
                session.generate(**{"temperature": 1.0, **wrong})
            assert list(stream)[-1].turn.number == 1
        with pytest.raises(BadRequest):
            runtime.session(**wrong)


def test_a_template_from_the_client_is_not_run(base_url: str) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    for arguments in ({"chat_template": endless}, {"tokenize": True}, {"return_tensors": "pt"}, {"self": 1}):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": arguments}
        answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=20)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "bad_request"


def test_closing_while_a_turn_starts_leaves_nothing_behind(runtime: Runtime) -> None:
    for attempt in range(40):
        session = runtime.session()
        session.add_user("babble")
        ended: list[BaseException | None] = []

        def generate(session: Any = session, ended: list[BaseException | None] = ended) -> None:
            try:
                session.generate(max_tokens=200, temperature=2.0, seed=1)
                ended.append(None)
            except AgentkvError as error:
                ended.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        while attempt % 2 and not session.running and thread.is_alive():
            pass
        session.close()
        thread.join(timeout=30)
        assert not thread.is_alive()
        assert ended[0] is None or isinstance(ended[0], Cancelled | BadRequest | Busy)
        assert session.closed
        reopened = runtime.resume(session.id)
        assert not reopened.closed
        runtime.delete(session.id)
    stats = runtime.stats()
    assert stats["arena"]["active"] == 0
    runtime.check()


def test_a_miss_counts_what_was_there_before(tmp_path: Path) -> None:
    """Another process prefills the whole prompt, of which the new message could not have been cached anyway."""
    given: dict[str, Any] = {"db": tmp_path / "sessions.db", "memory": "32MiB"}
    with Runtime("micro", **given) as before, before.session(system="s") as session:
        session.add_user("hello")
        first = session.generate(max_tokens=4).usage
    with Runtime("micro", **given) as after:
        again = after.resume(session.id)
        again.add_user("and again")
        turn = again.generate(max_tokens=4)
        assert turn.miss is not None
        assert (turn.miss.reason, turn.usage.cached_tokens) == ("reclaimed", 0)
        assert turn.miss.tokens == turn.usage.reusable_tokens == first.prompt_tokens + first.completion_tokens


def test_a_fork_cannot_take_a_name_that_is_taken(runtime: Runtime) -> None:
    first, second = runtime.session(id="taken"), runtime.session()
    for bad, error in (("taken", Conflict), (second.id, Conflict), ("a/b", BadRequest), ("a\0b", BadRequest), (5, BadRequest)):
        with pytest.raises(error):
            second.fork(session_id=bad)  # type: ignore[arg-type]
    assert runtime.resume("taken") is first
    runtime.delete("taken")


def test_session_names_are_each_tenants_own(tmp_path: Path, serve: Any) -> None:
    with Runtime("micro", memory="64MiB", db=tmp_path / "t.db") as runtime:
        with serve(runtime, api_keys=("one", "two")) as url:
            answers = {}
            for key in ("one", "two"):
                with Client(url, api_key=key) as client:
                    session = client.session(id="main")
                    session.add_user(f"I am {key}")
                    session.generate(max_tokens=4)
                    answers[key] = client.resume("main").messages()[0]["content"]
                    assert [row.id for row in client.sessions()] == ["main"]
            assert answers == {"one": "I am one", "two": "I am two"}


WRONG_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("plan", {"spans": 5}),
    ("prune", {"spans": 5}),
    ("prune", {"spans": ["x"], "keep": 5}),
    ("rollback", {"to": "x"}),
    ("generate", {"max_tokens": "x"}),
    ("generate", {"timeout": "x"}),
    ("generate", {"stop": 5}),
]


def test_wrong_types_over_http_have_the_error_body(base_url: str) -> None:
    with Client(base_url) as client:
        session = client.session()
        session.add_user("x")
        url = f"{base_url}/v1/sessions/{session.id}"
        for verb, body in WRONG_BODIES:
            answer = httpx.post(f"{url}/{verb}", json=body, timeout=20)
            assert answer.json()["error"]["message"], (verb, body)
            assert answer.status_code == 400, (verb, body, answer.text)
        for body in ({"id": []}, {"tools": 5}, {"sampling": {"self": 5}}, {"sampling": {"top_k": 10**30}}):
            answer = httpx.post(f"{base_url}/v1/sessions", json=body, timeout=20)
            assert answer.status_code == 400, (body, answer.text)
        with pytest.raises(BadRequest):
            session.add_tool_result("c1", "x", prune_after=2**63)


def test_a_session_that_another_process_edited_is_reopened(tmp_path: Path) -> None:
    with (
        Runtime("micro", memory="32MiB", db=tmp_path / "s.db") as one,
        Runtime("micro", memory="32MiB", db=tmp_path / "s.db") as two,
    ):
        session = one.session()
        session.add_user("hello")
        session.generate(max_tokens=4)
        elsewhere = two.resume(session.id)
        elsewhere.add_user("from the other side")
        with pytest.raises(Conflict):
            session.add_user("from this side")
        again = one.resume(session.id)
        assert again is not session
        assert again.messages()[-1]["content"] == "from the other side"
        two.delete(session.id)
        with pytest.raises(BadRequest, match="no session"):
            one.resume(session.id)
        assert session.id not in [row.id for row in one.sessions()]
        one.check()


def test_a_temperature_near_zero_is_greedy(runtime: Runtime) -> None:
    texts = []
    for temperature in (0.0, 1e-310):
        session = runtime.session()
        session.add_user("code of abc?")
        texts.append(session.generate(max_tokens=16, temperature=temperature).text)
        session.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "options", [{"window": "3"}, {"memory": float("inf")}, {"device": "foo"}, {"device": "cuda:99"}], ids=str
)
def test_a_runtime_of_wrong_types_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Runtime("micro", db=None, **options)


def test_a_forgotten_stream_may_be_collected_on_the_engines_thread() -> None:
    """The collector runs where it likes; there it must not wait for a session that waits for the engine."""
    with Runtime("micro", db=None, memory="64MiB", step_timeout=60) as runtime, runtime.session() as session:
        session.add_user("hi")
        session.generate(max_tokens=4)

        def forget() -> None:
            session.add_user("q")
            stream = session.stream(max_tokens=50)
            stream.__enter__()
            next(stream)
            cycle: list[Any] = [stream]
            cycle.append(cycle)

        fork = runtime._engine.worker.llm.fork

        def collecting(*given: Any) -> None:
            gc.collect()
            fork(*given)

        gc.disable()
        try:
            forget()
            runtime._engine.worker.llm.fork = collecting  # type: ignore[method-assign]
            verb = threading.Thread(target=lambda: session.fork().close(), daemon=True)
            verb.start()
            verb.join(20)
            assert not verb.is_alive()
        finally:
            gc.enable()
        assert runtime.trouble() is None
        for _ in range(500):  # it is given back in a thread of its own
            if not session.running:
                break
            time.sleep(0.01)
        session.generate(max_tokens=4)
        runtime.check()
