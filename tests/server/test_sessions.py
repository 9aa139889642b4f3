"""/v1/sessions: one route a verb, names as in Python."""

from __future__ import annotations

import json

import httpx
import pytest


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def post(http, path, code=200, **body):
    reply = http.post("/v1/sessions" + path, json=body)
    assert reply.status_code == code, reply.text
    return reply.json()


def test_a_session_from_open_to_delete(http, served):
    made = post(http, "", id="s1", system="be kind", policy={"prune_after": 2}, sampling={"temperature": 0.5})
    assert set(made) == {"id", "chain_id", "turns", "tokens", "open_calls", "usage", "tools", "system", "exactness"}
    assert (made["id"], made["turns"], made["open_calls"], made["system"]) == ("s1", 0, [], "be kind")
    assert served.runtime.resume("s1").policy.prune_after == 2
    span = post(http, "/s1/user", content='call read {"a": 1}')
    assert (span["kind"], span["turn"]) == ("user", 1)
    turn = post(http, "/s1/generate", max_tokens=5, stop=["END"])
    assert (turn["number"], turn["finish_reason"], turn["state"]) == (1, "tool_calls", "done")
    call = turn["tool_calls"][0]
    assert (call["name"], call["arguments"], call["raw"]) == ("read", {"a": 1}, '{"a": 1}')
    assert http.get("/v1/sessions/s1").json()["open_calls"] == [call]
    result = post(http, "/s1/tool_results", call_id=call["id"], content="x", prune_after=4)
    assert (result["call_id"], result["prune_after"]) == (call["id"], 4)
    assert post(http, "/s1/tool_results", call_id=call["id"], content="x")["call_id"] == call["id"]
    assert post(http, "/s1/tool_results", 409, call_id=call["id"], content="y")["error"]["code"] == "conflict"
    assert post(http, "/s1/generate")["text"] == "echo: x"
    assert [m["role"] for m in http.get("/v1/sessions/s1/messages").json()["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert len(http.get("/v1/sessions/s1/spans").json()["spans"]) == 4
    assert http.get("/v1/sessions").json()["sessions"][0]["id"] == "s1"
    assert post(http, "/s1/plan")["spans"] == []
    assert post(http, "/s1/plan", spans=["sp1"], mode="in_place")["spans"] == ["sp1"]
    assert post(http, "/s1/prune", spans=["sp1"], keep="edges:8")["pruned"][0]["span_id"] == "sp1"
    assert post(http, "/s1/pin", span="sp1")["state"] == "pinned"
    assert post(http, "/s1/unpin", span="sp1")["state"] == "live"
    assert post(http, "/s1/recall", 400, span="sp1")["error"]["code"] == "unknown_option"
    child = post(http, "/s1/fork", at=1)
    assert child["turns"] == 1
    assert child["id"] != "s1"
    assert post(http, "/s1/rollback", to=1)["turns"] == 1
    for verb in ("suspend", "cancel", "close"):
        assert post(http, f"/s1/{verb}")["id"] == "s1"
    assert http.delete("/v1/sessions/s1").json() == {"id": "s1", "deleted": True}
    assert http.get("/v1/sessions/s1").status_code == 400


def test_reject_answers_a_call(http):
    post(http, "", id="s")
    post(http, "/s/user", content='call read {"a": 1}')
    call = post(http, "/s/generate")["tool_calls"][0]
    error = post(http, "/s/generate", 409)["error"]
    assert (error["code"], error["agentkv"]["details"]["ids"], error["agentkv"]["kept"]) == ("open_calls", [call["id"]], 1)
    assert post(http, "/s/reject", call_id=call["id"], reason="no")["call_id"] == call["id"]
    assert post(http, "/s/tool_results", 400, call_id="nobody", content="")["error"]["code"] == "orphan_result"
    assert post(http, "/s/generate")["finish_reason"] == "stop"


def events(reply):
    return [line.removeprefix("data: ") for line in reply.iter_lines() if line]


def test_a_streamed_turn_is_its_events(http):
    post(http, "", id="s")
    post(http, "/s/user", content="think a b")
    with http.stream("POST", "/v1/sessions/s/generate", json={"stream": True}) as reply:
        lines = events(reply)
    assert lines[-1] == "[DONE]"
    told = [json.loads(line) for line in lines[:-1]]
    assert {event["type"] for event in told} == {"reasoning_delta", "text_delta", "turn_done"}
    turn = told[-1]["turn"]
    assert "".join(event["text"] for event in told if event["type"] == "text_delta") == turn["text"] == "echo: think a b"
    assert "".join(event["text"] for event in told if event["type"] == "reasoning_delta") == turn["reasoning"]
    post(http, "/s/user", content='call read {"a": 1}')
    with http.stream("POST", "/v1/sessions/s/generate", json={"stream": True}) as reply:
        told = [json.loads(line) for line in events(reply)[:-1]]
    assert [event["type"] for event in told] == ["tool_call", "turn_done"]
    assert told[0]["call"] == told[1]["turn"]["tool_calls"][0]
    with http.stream("POST", "/v1/sessions/s/generate", json={"stream": True}) as reply:
        reply.read()
        assert reply.status_code == 409


def test_leaving_a_stream_or_cancelling_rolls_back(http, served, until):
    runtime = served.runtime
    post(http, "", id="s")
    session = runtime.resume("s")
    post(http, "/s/user", content="word " * 1000)
    runtime.delay = 0.01
    with http.stream("POST", "/v1/sessions/s/generate", json={"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert post(http, "/s/user", 409, content="now?")["error"]["code"] == "busy"
    until(lambda: not session.busy, 2)
    assert (session.turns, len(session.log)) == (0, 1)  # what was added stays
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/sessions/s/generate", json={}, timeout=0.1)
    until(lambda: not session.busy, 2)
    with http.stream("POST", "/v1/sessions/s/generate", json={"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        post(http, "/s/cancel")
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(rest[-2])["error"]["code"] == "cancelled"
    assert session.turns == 0


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("", {"systm": "x"}, "unknown_option"),
        ("", {"sampling": {"tenant": "x"}}, "unknown_option"),
        ("", {"sampling": {"heat": 1}}, "unknown_option"),
        ("", {"policy": {"lag": 1}}, "unknown_option"),
        ("", {"policy": 3}, "bad_request"),
        ("/s/user", {"text": "x"}, "unknown_option"),
        ("/s/user", {}, "bad_request"),
        ("/s/generate", {"n": 2}, "unknown_option"),
        ("/s/generate", {"response_format": {"type": "json_object"}}, "unknown_option"),
        ("/s/prune", {"spans": "sp1"}, "bad_request"),
        ("/nobody/user", {"content": "x"}, "bad_request"),
    ],
)
def test_what_is_refused(http, path, body, code):
    post(http, "", id="s")
    error = post(http, path, 400, **body)["error"]
    assert error["code"] == code
    assert error["agentkv"]["hint"]


def test_bodies_that_are_no_objects(http, served):
    for content in (b"{", b"[1]", b'"x"', b"[" * 100_000, b"\xff"):
        assert http.post("/v1/sessions", content=content).json()["error"]["code"] == "bad_request"
    assert httpx.get(served.url + "/v2/nothing").status_code == 404
    assert httpx.get(served.url + "/v2/nothing").json()["error"]["code"] == "unknown_option"
    assert httpx.get(served.url + "/v1/chat/completions").status_code == 405
