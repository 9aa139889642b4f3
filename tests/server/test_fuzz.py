"""Whatever a client sends: a body is read or refused with an error of ours, and many clients at once leave nothing behind."""

from __future__ import annotations

import copy
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.errors import AgentkvError
from agentkv.memory.canonical import Conversation
from agentkv.server.wire import decode_object, read_chat

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"], "default": None}}, "required": ["a"]}
BODY = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "ok"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 1, "top_k": 4, "seed": 1,
    "stop": ["x"], "max_tokens": 5, "max_completion_tokens": 5, "tool_choice": "auto", "response_format": {"type": "text"},
    "n": 1, "logprobs": False, "logit_bias": {}, "modalities": ["text"], "functions": [], "chat_template_kwargs": {"a": 1},
    "prompt_cache_key": "k", "user": "u",
    "agentkv": {
        "session_id": "s", "chain_id": "c", "policy": {"prune_after": 4, "by_tool": {"f": None}}, "prune_after": {"c1": 4},
    },
}  # fmt: skip
JUNK = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        5,
        2**70,
        1.5,
        float("nan"),
        "",
        "x",
        "\ud800",
        [],
        {},
        [1],
        [None],
        ["a"],
        {"a": 1},
        [{}],
        [[]],
        {"type": []},
    ]
)
HEADERS = st.dictionaries(
    st.sampled_from(["x-agentkv-policy", "x-agentkv-session"]), st.sampled_from(["", "{}", "[", "[]", '{"a":1}'])
)


def places(value, path=()):
    """Paths to every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


PLACES = [path for path in places(BODY) if path]


def refusal(body, headers):
    """The error that a body is refused with, if it is."""
    try:
        ask = read_chat(decode_object(json.dumps(body).encode()), headers, "fake")
        Conversation.read(ask.messages, tools=ask.tools, template_args=ask.template_args)
    except AgentkvError as error:
        return error
    return None


def test_the_body_that_is_changed_below_is_read():
    assert refusal(BODY, {}) is None


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), JUNK), min_size=1, max_size=3), HEADERS)
def test_any_body_is_read_or_refused(changes, headers):
    body = json.loads(json.dumps(BODY))
    for path, junk in changes:
        inner = body
        for key in path[:-1]:
            known = (
                key in inner
                if isinstance(inner, dict)
                else isinstance(inner, list) and isinstance(key, int) and key < len(inner)
            )
            inner = inner[key] if known else {}
        if isinstance(inner, dict) or (isinstance(inner, list) and path[-1] in range(len(inner))):
            inner[path[-1]] = copy.deepcopy(junk)
    error = refusal(body, headers)
    if error is not None:
        assert error.http_status in (400, 404)
        assert json.dumps(error.to_wire())


@settings(deadline=None)
@given(st.binary(max_size=50))
def test_any_bytes_are_read_or_refused(data):
    try:
        value = decode_object(data)
    except AgentkvError:
        return
    assert isinstance(value, dict)


def test_many_clients_at_once_leave_nothing_behind(served, until):
    """Agents with shared keys, retries, edits and lost connections; afterwards every session is whole and idle."""
    runtime = served.runtime
    runtime.delay = 0.001

    def agent(seed: int) -> int:
        r = random.Random(seed)
        history = [{"role": "user", "content": r.choice(["one", "two"])}]
        answered = 0
        with httpx.Client(base_url=served.url, timeout=20) as client:
            for _ in range(8):
                body = {"messages": history, "user": r.choice("ab"), "stream": r.random() < 0.3}
                if r.random() < 0.2:
                    try:
                        client.post("/v1/chat/completions", json=body, timeout=0.004)
                    except httpx.TimeoutException:
                        continue
                    answered += 1
                    continue
                reply = client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                answered += 1
                if body["stream"]:
                    assert reply.text.endswith("data: [DONE]\n\n")
                    assert '"error"' not in reply.text
                said = f"echo: {history[-1]['content']}"
                if r.random() < 0.8:
                    history += [{"role": "assistant", "content": said}, {"role": "user", "content": r.choice(["x y", "z"])}]
                elif r.random() < 0.5:
                    history = [*history[:-1], {"role": "user", "content": "edited"}]
        return answered

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(agent, range(24))) > 100
    until(lambda: runtime.running == 0 and not any(session.busy for session in runtime.live.values()))
    for session in runtime.live.values():
        roles = [message["role"] for message in session.log]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert session.marks[-1] == len(session.log)
        for said, answer in zip(session.log[::2], session.log[1::2], strict=True):
            assert answer["content"] == f"echo: {said['content']}"
    assert len(runtime.live) == len(runtime.continuation)
