"""What counts as the same history, and what does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.errors import BadRequest, OrphanResult
from agentkv.memory.canonical import Conversation, canonical_arguments, canonical_tool

TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"mode": {"type": "string", "enum": ["a", "b"]}, "path": {"type": "string"}},
            "required": ["mode", "path"],
        },
    },
}


def user(content):
    return {"role": "user", "content": content}


def said(arguments='{"a": 1}', content="", id="c1", **more):
    call = {"id": id, "type": "function", "function": {"name": "read", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def result(content="r", id="c1", **more):
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def digest(*messages, **head):
    return Conversation.read(messages, **head).digests[-1]


SAME = [
    (user("ab"), user([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}])),
    (user(""), user(None)),
    (user(""), {"role": "user"}),
    (user("x"), user("x") | {"name": "me", "cache_control": {}, "anything": [1]}),
    (user("x"), user(["x"])),
]
SAME_CALLS = [
    said('{"a":1}'),
    said('{\n "a" : 1.0 }'),
    said(content=None),
    said(reasoning_content="thought"),
    said(reasoning="thought"),
    said(content=[{"type": "thinking", "thinking": "x"}, {"type": "text", "text": " \n"}]),
    said(provider_specific_fields={"a": 1}, refusal=None, annotations=[], audio=None, function_call=None),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_spellings_of_one_message(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize("other", SAME_CALLS)
def test_spellings_of_one_answer(other):
    assert digest(said(), result()) == digest(other, result(name="read"))


@pytest.mark.parametrize(
    "other",
    [
        said('{"a": 2}'),
        said('{"a": "1"}'),
        said('{"a": true}'),
        said(content="x"),
        said('{"a": 1'),
        said('{"a": 1, "b": null}'),
    ],
)
def test_other_answers(other):
    assert digest(said(), result()) != digest(other, result())


def test_fields_cannot_run_into_each_other():
    assert digest(user("ab"), user("c")) != digest(user("a"), user("bc"))
    assert digest(user("a"), salt="xy", template_args={}) != digest({"role": "system", "content": "y"}, user("a"), salt="x")
    assert digest(said(id="c1"), result(id="c1")) != digest(said(id="c"), result("1r", id="c"))
    assert digest(user("a")) != digest(user("a"), user(""))


def test_the_head():
    base = digest(user("x"), tools=[TOOL, other_tool()])
    assert base == digest(user("x"), tools=[other_tool(), TOOL])
    assert base == digest(user("x"), tools=[shuffled(TOOL), other_tool() | {"cache_control": {"type": "ephemeral"}}])
    assert base == digest(user("x"), tools=[TOOL, {"type": "web_search"}, other_tool()])
    assert base != digest(user("x"), tools=[TOOL])
    assert base != digest(user("x"), tools=[TOOL, other_tool()], template_args={"enable_thinking": False})
    assert base != digest(user("x"), tools=[TOOL, other_tool()], salt="tenant")
    assert base != digest({"role": "system", "content": "s"}, user("x"), tools=[TOOL, other_tool()])
    enum = json.loads(json.dumps(TOOL).replace('["a", "b"]', '["b", "a"]'))
    assert canonical_tool(enum) != canonical_tool(TOOL)
    needed = json.loads(json.dumps(TOOL).replace('["mode", "path"]', '["path", "mode"]'))
    assert canonical_tool(needed) == canonical_tool(TOOL)
    two = Conversation.read([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, user("x")])
    assert two.system == "a\n\nb"
    assert two.messages[0].index == 2


def other_tool():
    return {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}


def shuffled(value):
    if isinstance(value, dict):
        return {key: shuffled(item) for key, item in reversed(value.items())}
    return value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_arguments_survive_serialisation(value):
    spellings = [
        json.dumps(value),
        json.dumps(value, indent=2, ensure_ascii=False),
        json.dumps(dict(reversed(value.items())), separators=(",", ":")),
    ]
    assert len({canonical_arguments(text) for text in [*spellings, value]}) == 1


@settings(deadline=None)
@given(JSON, JSON)
def test_different_arguments_stay_different(one, other):
    if one != other or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        assert (canonical_arguments(json.dumps(one)) == canonical_arguments(json.dumps(other))) == (one == other)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1" * 5000, "\ud800", "nul"])
def test_arguments_that_are_no_json(text):
    assert canonical_arguments(text).startswith("?")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([result()], OrphanResult),
        ([said(), user("x")], BadRequest),
        ([said(), result(), result("other")], BadRequest),
        ([said(), result(id="c2")], OrphanResult),
        ([said() | {"tool_calls": said()["tool_calls"] * 2}], BadRequest),
        ([{"role": "function", "content": ""}], BadRequest),
        ([{"role": "tool", "content": ""}], BadRequest),
        ([{"role": "assistant", "function_call": {"name": "x"}}], BadRequest),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], BadRequest),
        ([user([{"type": "image_url"}])], BadRequest),
        ([user(5)], BadRequest),
        (["hi"], BadRequest),
    ],
)
def test_what_no_history_can_be(messages, error):
    with pytest.raises(error) as raised:
        Conversation.read([user("go"), *messages])
    assert raised.value.details["param"] == "messages"
    assert "messages[" in raised.value.message


def test_a_repeated_result_counts_once_and_open_calls_are_named():
    once = Conversation.read([user("go"), said(), result()])
    twice = Conversation.read([user("go"), said(), result(), result()])
    assert once.digests == twice.digests
    again = Conversation.read([user("go"), said(), result(), said(), result("s"), user("x")])  # ids that start anew each turn
    assert [message.role for message in again.messages] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert Conversation.read([user("go"), said()]).open_calls == ("c1",)
    assert once.open_calls == ()


def test_then_and_first_agree_with_reading_at_once():
    whole = Conversation.read([user("go"), said(), result(), user("x")])
    part = whole.first(2)
    assert part.digests == whole.digests[:3]
    assert part.then(*whole.messages[2:]).digests == whole.digests
    assert len(part.messages) == 2
