"""Answers of a given form over every way in, and several answers to one prompt; judged by jsonschema, `re`, openai's client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from agentkv import AsyncClient, Runtime
from agentkv.errors import BadRequest, Cancelled

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "kind", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


COUNT = tool("count", low={"type": "integer", "minimum": 1, "maximum": 9}, path={"$ref": "#/$defs/path"})
COUNT["function"]["parameters"]["$defs"] = {"path": {"type": "string", "pattern": "^[a-z]{1,8}$"}}
TOOLS = [COUNT, tool("wait", seconds={"enum": [1, 2, 3]})]
UNIQUE = {"type": "array", "uniqueItems": True}
HOT = {"temperature": 1.5, "seed": 11, "max_tokens": 400}


def valid_call(call: Any) -> bool:
    schema = next(each for each in TOOLS if each["function"]["name"] == call.name)["function"]["parameters"]
    jsonschema.validate(call.arguments, schema)
    return True


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forms_hold_over_every_way_in(face: Any, temperature: float) -> None:
    session = face.session(temperature=temperature, seed=4, max_tokens=250)
    asked: dict[str, Any] = {
        "json_schema": FORM,
        "json_object": {"type": "json_object"},
        "regex": {"type": "regex", "pattern": "[ab]{3,5}c"},
        "grammar": {"type": "grammar", "grammar": 'start: "<" inner{2} ">"\ninner: "x" | "y"\n'},
        "choice": {"type": "choice", "choices": ["yes", 'no "way"']},
    }
    told = {}
    for name, form in asked.items():
        session.add_user(name)
        turn = session.generate(response_format=form)
        assert turn.finish_reason == "stop" or name == "json_object", turn.text
        told[name] = turn.text
    jsonschema.validate(json.loads(told["json_schema"]), SCHEMA)
    assert told["json_object"].startswith("{")
    assert re.fullmatch("[ab]{3,5}c", told["regex"])
    assert re.fullmatch("<[xy]{2}>", told["grammar"])
    assert told["choice"] in ("yes", 'no "way"')
    session.close()


def test_a_tool_choice_is_kept(face: Any) -> None:
    session = face.session(tools=TOOLS, **HOT)
    for choice, number in (("required", None), ({"type": "required", "parallel": False}, 1)):
        session.add_user("go")
        turn = session.generate(tool_choice=choice, logprobs=True)
        assert turn.tool_calls
        assert all(valid_call(call) for call in turn.tool_calls)
        assert turn.text == ""
        if number is not None:
            assert (len(turn.tool_calls), turn.finish_reason) == (number, "tool_calls")
        for call in turn.tool_calls:
            session.add_tool_result(call.id, "done")
    for name in ("wait", "count"):
        session.add_user("go")
        turn = session.generate(tool_choice={"type": "function", "function": {"name": name}})
        assert [call.name for call in turn.tool_calls] == [name]
        assert valid_call(turn.tool_calls[0])
        session.add_tool_result(turn.tool_calls[0].id, "done")
    session.add_user("go")
    with session.stream(tool_choice="required") as stream:
        events = list(stream)
    assert [event.call for event in events if hasattr(event, "call")] == list(stream.turn.tool_calls)
    session.close()


def test_a_form_leaves_room_for_calls(face: Any) -> None:
    session = face.session(tools=TOOLS, **HOT)
    session.add_user("go")
    turn = session.generate(response_format=FORM)
    if turn.tool_calls:
        assert all(valid_call(call) for call in turn.tool_calls)
    else:
        jsonschema.validate(json.loads(turn.text), SCHEMA)
    session.close()


def test_a_stop_string_and_a_length_cut_a_form_honestly(face: Any) -> None:
    session = face.session()
    session.add_user("go")
    assert session.generate(response_format=FORM, stop=['"kind"']).finish_reason == "stop"
    session.add_user("go")
    turn = session.generate(response_format=FORM, max_tokens=5)
    assert (turn.finish_reason, turn.usage.completion_tokens) == ("length", 5)
    session.close()


def test_thousands_of_choices_and_odd_characters(face: Any) -> None:
    session = face.session(**HOT)
    for choices in ([f"v{number}" for number in range(3000)], ["\x00\b\f\x7f\x85\u2028", '/"\\\n\t']):
        session.add_user("go")
        turn = session.generate(response_format={"type": "choice", "choices": choices})
        assert turn.finish_reason == "stop"
        assert turn.text in choices
    session.close()


def test_a_form_that_shows_on_the_way_that_it_is_too_large(face: Any) -> None:
    session = face.session()
    session.add_user("go")
    with pytest.raises(BadRequest, match="too complex") as raised:
        session.generate(response_format={"type": "grammar", "grammar": 'start: x\nx: "a" y\ny: x'})
    assert (raised.value.param, raised.value.kept) == ("response_format", 0)
    assert session.generate(max_tokens=2).number == 1
    session.close()


@pytest.mark.parametrize("parameters", [{}, {"properties": {"to": {}}}, {"anyOf": [{"type": "string"}, {"required": ["to"]}]}])
def test_arguments_are_an_object_whatever_their_schema_leaves_open(face: Any, parameters: dict[str, Any]) -> None:
    session = face.session(tools=[{"type": "function", "function": {"name": "go", "parameters": parameters}}])
    session.add_user("go")
    bias = {ord(char): 100 for char in '"t'}  # what would begin a text or a truth value
    turn = session.generate(tool_choice="required", temperature=1, logit_bias=bias, max_tokens=60)
    said = turn.tool_calls[0].raw if turn.tool_calls else turn.text
    assert turn.tool_calls or turn.finish_reason == "length", said
    session.close()


def test_arguments_that_can_be_no_object_are_refused(face: Any) -> None:
    session = face.session(tools=[{"type": "function", "function": {"name": "go", "parameters": {"type": "string"}}}])
    session.add_user("go")
    with pytest.raises(BadRequest) as raised:
        session.generate(tool_choice="required")
    assert raised.value.param == "tools"
    session.close()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "(a"}}, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "begin: /a/"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(face: Any, options: dict[str, Any], param: str) -> None:
    session = face.session(tools=TOOLS)
    session.add_user("go")
    with pytest.raises(BadRequest) as raised:
        session.generate(**options)
    assert raised.value.param == param
    assert raised.value.hint
    assert session.turns == 0
    session.close()


def test_a_tool_whose_schema_cannot_be_kept_is_named(face: Any) -> None:
    session = face.session(tools=[tool("odd", items=UNIQUE)])
    session.add_user("go")
    for options in ({"tool_choice": "required"}, {"response_format": FORM}):
        with pytest.raises(BadRequest, match="uniqueItems") as raised:
            session.generate(**options)
        assert raised.value.param == "tools"
    session.close()


def test_async_has_the_same(base_url: str) -> None:
    async def say() -> str:
        async with AsyncClient(base_url) as client:
            session = await client.session()
            await session.add_user("go")
            return str((await session.generate(response_format={"type": "regex", "pattern": "[xy]{4}"})).text)

    assert re.fullmatch("[xy]{4}", asyncio.run(say()))


# -- several answers


def test_choices_of_a_session(runtime: Runtime) -> None:
    def texts(**options: Any) -> list[str]:
        session = runtime.session(system="s" * 200)
        session.add_user("go")
        with session.choices(
            3, response_format={"type": "regex", "pattern": "[a-z]{12}"}, temperature=5.0, **options
        ) as choices:
            seen = [index for index, _ in choices]
        assert set(seen) == {0, 1, 2}
        assert choices.sessions[0] is session
        made = [each.last_turn for each in choices.sessions]
        assert list(choices.turns) == made
        usages = [turn.usage for turn in made if turn is not None]
        assert [usage.prefilled_tokens for usage in usages[1:]] == [1, 1]
        assert all(usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens for usage in usages)
        for each in choices.sessions[1:]:
            each.add_user("and then?")
            assert each.generate(max_tokens=2).usage.reusable_share > 0.95
            each.erase()
        session.erase()
        return [turn.text for turn in choices.turns]

    first = texts(seed=5)
    assert len(set(first)) == 3
    noise = runtime.session()
    noise.add_user("something else in the batch")
    with noise.stream(max_tokens=3000, temperature=1.0, logit_bias={257: -100.0}) as stream:
        next(stream)
        assert texts(seed=5) == first
    noise.close()
    assert texts(seed=6) != first
    assert len(set(texts())) == 3
    runtime.check()


@pytest.mark.parametrize("error", [False, True])
def test_choices_are_all_or_nothing(runtime: Runtime, error: bool) -> None:
    session = runtime.session()
    session.add_user("go")
    before = len(runtime.sessions())
    options: dict[str, Any] = {"timeout": 0.2} if error else {}
    try:
        with session.choices(3, temperature=1.0, logit_bias={257: -100.0}, max_tokens=3000, **options) as choices:
            for _ in choices:
                if not error:
                    break
    except Cancelled:
        assert error
    assert session.turns == 0
    assert len(runtime.sessions()) == before
    assert session.generate(max_tokens=2).number == 1
    session.erase()
    runtime.check()


# -- the openai client


class Answer(pydantic.BaseModel):
    ok: bool
    kind: Literal["a", "b"]
    tags: list[Literal["x", "y"]]


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def say(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="micro", messages=[{"role": "user", "content": "go"}], **HOT | options)


def test_the_openai_client_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    asked: Any = {"model": "micro", "messages": [{"role": "user", "content": "go"}], "response_format": Answer}
    parsed = client.chat.completions.parse(**asked, **HOT).choices[0].message.parsed
    assert isinstance(parsed, Answer)
    with client.chat.completions.stream(**asked, **HOT) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed


def test_the_openai_client_gets_the_calls_it_wants(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "wait"}}):
        message = say(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls
        schema = next(each for each in TOOLS if each["function"]["name"] == call.function.name)["function"]["parameters"]
        jsonschema.validate(json.loads(call.function.arguments), schema)
    chunks = list(say(client, tools=TOOLS, tool_choice="required", stream=True))
    assert {chunk.choices[0].finish_reason for chunk in chunks} <= {None, "tool_calls", "length"}
    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "[xy]{4}"},
        {"structured_outputs": {"regex": "[xy]{4}"}},
        {"guided_choice": ["xxyy", "yyxx"]},
        {"guided_grammar": "start: /[xy]{4}/"},
        {"guided_json": {"enum": ["xyxy"]}},
        {"structured_outputs": {"json": json.dumps({"const": "xxxx"})}},
    ],
)
def test_the_names_of_other_servers(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    assert re.fullmatch('"?[xy]{4}"?', say(client, extra_body=extra).choices[0].message.content)


def test_three_choices_streamed_and_not(client: openai.OpenAI) -> None:
    whole = say(client, n=3, extra_body={"guided_regex": "[a-z]{9}"})
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert all(re.fullmatch("[a-z]{9}", text) for text in texts)
    usage = whole.usage
    assert usage.completion_tokens == 3 * 10
    details = usage.prompt_tokens_details
    assert usage.prompt_tokens == details.cached_tokens + details.agentkv_prefilled_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    options: dict[str, Any] = {"n": 3, "extra_body": {"guided_regex": "[a-z]{9}"}, "stream_options": {"include_usage": True}}
    chunks = list(say(client, stream=True, **options))
    streamed, ends = ["", "", ""], {}
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert streamed == texts
    assert ends == {0: "stop", 1: "stop", 2: "stop"}
    assert chunks[-1].usage.completion_tokens == 3 * 10
    assert sum("agentkv" in (chunk.model_extra or {}) for chunk in chunks) == 1
    assert say(client, extra_body={"guided_regex": "[a-z]{9}"}).choices[0].message.content == texts[0]


def test_any_choice_can_be_continued(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "go " * 30}
    key = {"prompt_cache_key": "choices"}
    first = client.chat.completions.create(
        model="micro", messages=[question], n=3, extra_body={"guided_regex": "[a-z]{9}"}, **HOT, **key
    )
    for choice in first.choices:
        history: Any = [question, {"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "more"}]
        answer = client.chat.completions.create(model="micro", messages=history, max_tokens=2, **key)
        assert answer.model_extra is not None
        assert answer.model_extra["agentkv"]["miss"] is None
        details: Any = answer.usage.prompt_tokens_details if answer.usage else None
        assert details.agentkv_prefilled_tokens < 40


@pytest.mark.parametrize("body", [{"n": 0}, {"n": 99}, {"n": 2, "agentkv": {"session_id": "named-choices"}}])
def test_numbers_of_choices(base_url: str, runtime: Runtime, body: dict[str, Any]) -> None:
    before = len(runtime.sessions())
    ask = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 3, **body}
    reply = httpx.post(base_url + "/v1/chat/completions", json=ask)
    if "agentkv" in body:
        assert reply.status_code == 200, reply.text
        assert runtime.resume("named-choices").turns == 1  # the first choice is the session's own turn
        return
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "n")
    assert error["agentkv"]["hint"]
    assert len(runtime.sessions()) == before
