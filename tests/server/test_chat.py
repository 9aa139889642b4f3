"""Plain chat.completions with stock clients: shapes, continuation, refusal, disconnect."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from agentkv.types import PrunedSpan

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
    for name in ("read", "write")
]


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client, messages, **options):
    return client.chat.completions.create(model="fake", messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


def test_the_response_has_the_openai_shape(client, served):
    answer = ask(client, [{"role": "system", "content": "be short"}, user("think hello world")])
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == "echo: think hello world"
    assert choice.message.reasoning_content == "\nhm, hello world\n"
    details = answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens == details.cached_tokens + details.agentkv_prefilled_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert set(answer.agentkv) == {"chain_id", "session_id", "miss", "exactness", "pruned_now", "resident_tokens"}
    assert len(served.lines) == 1
    assert " prompt · " in served.lines[0]
    assert served.lines[0].startswith("turn 1 · ")


def test_calls_have_null_content_and_json_arguments(client):
    answer = ask(client, [user('call read {"a":  "x"} & call write {"a": "y"}')], tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("read", {"a": "x"}),
        ("write", {"a": "y"}),
    ]
    assert len({c.id for c in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("prompt", ["think hello there", 'call read {"a": "x"} & call write {"b": [1, 2]}', "plain answer"])
def test_streamed_equals_not_streamed(client, prompt):
    whole = ask(client, [user(prompt)], tools=TOOLS)
    chunks = list(ask(client, [user(prompt)], tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    assert set(chunks[0].agentkv) == set(whole.agentkv)
    assert all("agentkv" not in (chunk.model_extra or {}) for chunk in chunks[1:])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == (
        getattr(message, "reasoning_content", None) or ""
    )
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls or ()
    ]
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_prunes_are_told_on_the_first_chunk(client, served):
    served.runtime.pruned = (PrunedSpan(span_id="sp1", call_id="c", tokens=9, why="lag 4"),)
    told = [{"span_id": "sp1", "call_id": "c", "tokens": 9, "why": "lag 4"}]
    assert ask(client, [user("x")]).agentkv["pruned_now"] == told
    first = next(iter(ask(client, [user("x")], stream=True)))
    assert first.agentkv["pruned_now"] == told
    assert first.agentkv["resident_tokens"] == 7
    assert " · 1 pruned · " in served.lines[0]


def test_length_gives_no_half_call(client):
    answer = ask(client, [user("one two three four five six")], max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None


def test_a_resent_history_continues_its_session(client, served):
    history = [{"role": "system", "content": "s"}, user('call read {"a":  "x", "n": 1.0}')]
    sessions = set()
    reusable = 0
    for step in range(6):
        answer = ask(client, history, tools=TOOLS, extra_body={"prompt_cache_key": "conv"})
        sessions.add(answer.agentkv["session_id"])
        assert answer.agentkv["miss"] is None
        assert answer.usage.prompt_tokens_details.cached_tokens == reusable
        message = answer.choices[0].message
        history.append(respelled(message))
        history += [
            {
                "role": "tool",
                "tool_call_id": c.id,
                "name": "read",
                "content": [{"type": "text", "text": f'call read {{"a": {step}}}'}],
            }
            for c in message.tool_calls
        ]
        reusable = served.runtime.resume(answer.agentkv["session_id"]).tokens
    assert len(sessions) == 1
    assert served.runtime.resume(sessions.pop()).turns == 6


def respelled(message):
    """The assistant message as OpenHands sends it back: parts, re-serialised arguments, no reasoning."""
    sent = {"role": "assistant"}
    if message.content:
        sent["content"] = [{"type": "text", "text": message.content, "cache_control": {"type": "ephemeral"}}]
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {
                    "name": c.function.name,
                    "arguments": json.dumps(json.loads(c.function.arguments), indent=1, sort_keys=True),
                },
            }
            for c in message.tool_calls
        ]
    return sent


def test_without_a_key_an_issued_call_id_proves_the_chain(client, served):
    first = ask(client, [user('call read {"a": "x"}')], tools=TOOLS)
    call = first.choices[0].message.tool_calls[0]
    history = [user('call read {"a": "x"}'), respelled(first.choices[0].message)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "file"})
    second = ask(client, history, tools=list(reversed(TOOLS)))
    assert second.agentkv["session_id"] == first.agentkv["session_id"]
    assert second.agentkv["chain_id"] == first.agentkv["chain_id"]
    # without calls and without a key nothing proves it
    third = ask(client, [user("hi"), {"role": "assistant", "content": "echo: hi"}, user("more")])
    assert third.agentkv["session_id"] != second.agentkv["session_id"]
    assert third.agentkv["miss"]["reason"] == "new"


def test_a_side_call_with_the_same_key_is_a_session_of_its_own(client, served):
    key = {"extra_headers": {"x-litellm-session-id": "conv"}}
    main = [{"role": "system", "content": "agent"}, user("one")]
    first = ask(client, main, tools=TOOLS, **key)
    side = ask(client, [{"role": "system", "content": "summarise"}, user("dump")], **key)
    assert side.agentkv["session_id"] != first.agentkv["session_id"]
    assert side.agentkv["miss"]["field"] == "system"
    assert side.agentkv["miss"]["message_index"] == 0
    main += [{"role": "assistant", "content": "echo: one"}, user("two")]
    assert ask(client, main, tools=TOOLS, **key).agentkv["session_id"] == first.agentkv["session_id"]


def test_a_deleted_assistant_turn_forks_at_the_earlier_boundary(client, served):
    key = {"extra_body": {"prompt_cache_key": "mini"}}
    history = [user("one")]
    first = ask(client, history, **key)
    history += [{"role": "assistant", "content": "echo: one"}, user("two")]
    second = ask(client, history, **key)
    history.append(user("that was not parseable"))  # mini never appends the answer it could not parse
    third = ask(client, history, **key)
    assert second.agentkv["session_id"] == first.agentkv["session_id"] != third.agentkv["session_id"]
    assert third.agentkv["miss"] is None
    assert served.runtime.resume(first.agentkv["session_id"]).turns == 2
    assert served.runtime.resume(third.agentkv["session_id"]).turns == 2
    assert third.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens_details.cached_tokens


def test_a_changed_message_is_a_miss_that_names_it(client):
    key = {"extra_body": {"user": "u"}}
    ask(client, [user("one")], **key)
    again = [user("one!"), {"role": "assistant", "content": "echo: one"}, user("two")]
    miss = ask(client, again, **key).agentkv["miss"]
    assert (miss["reason"], miss["message_index"], miss["field"]) == ("diverged", 0, "content")
    assert (miss["ours"], miss["theirs"]) == ("one", "one!")
    assert miss["tokens"] > 0


def test_a_busy_chain_is_forked_and_an_explicit_one_answers_409(client, served, until):
    first = ask(client, [user("one")], extra_body={"prompt_cache_key": "k"})
    history = [user("one"), {"role": "assistant", "content": "echo: one"}, user("slow " * 20)]
    served.runtime.delay = 0.2
    replies = []
    work = threading.Thread(target=lambda: replies.append(ask(client, history, extra_body={"prompt_cache_key": "k"})))
    work.start()
    until(lambda: served.runtime.running == 1)
    explicit = {"agentkv": {"chain_id": first.agentkv["chain_id"]}}
    with pytest.raises(openai.ConflictError) as error:
        ask(client, history[:2] + [user("three")], extra_body=explicit)
    assert error.value.body["code"] == "busy"
    assert error.value.body["agentkv"]["kept"] == 1
    quick = ask(client, history[:2] + [user("three")], extra_body={"prompt_cache_key": "k"})
    assert quick.agentkv["session_id"] != first.agentkv["session_id"]
    assert quick.usage.prompt_tokens_details.cached_tokens > 0
    served.runtime.delay = 0.0
    work.join()
    assert replies[0].agentkv["session_id"] == first.agentkv["session_id"]


def test_equal_requests_at_once_never_share_a_session(client, served):
    served.runtime.delay = 0.002
    first = ask(client, [user("one")], extra_body={"prompt_cache_key": "k"})
    history = [user("one"), {"role": "assistant", "content": "echo: one"}, user("a b c d e")]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: ask(client, history, extra_body={"prompt_cache_key": "k"}), range(8)))
    ids = [reply.agentkv["session_id"] for reply in replies]
    assert len(set(ids)) == 8
    assert ids.count(first.agentkv["session_id"]) <= 1
    assert {reply.choices[0].message.content for reply in replies} == {"echo: a b c d e"}


def test_an_explicit_session_id_makes_and_keeps_that_session(client, served):
    body = {"agentkv": {"session_id": "mine"}}
    first = ask(client, [user("one")], extra_body=body)
    assert first.agentkv["session_id"] == "mine"
    history = [user("one"), {"role": "assistant", "content": "echo: one"}, user("two")]
    second = ask(client, history, extra_body={"agentkv": {"session_id": "mine", "chain_id": first.agentkv["chain_id"]}})
    assert second.agentkv["session_id"] == "mine"
    side = ask(client, [{"role": "system", "content": "other"}, user("x")], extra_body=body)
    assert side.agentkv["session_id"] != "mine"
    assert served.runtime.resume("mine").turns == 2
    stale = ask(client, [user("one")], extra_body={"agentkv": {"chain_id": "ch_gone"}})
    assert stale.choices[0].message.content == "echo: one"
    assert stale.agentkv["miss"]["field"] == "agentkv.chain_id"


def test_a_session_opened_elsewhere_can_be_continued(client, served):
    served.runtime.session(id="opened", system="s")
    answer = ask(client, [{"role": "system", "content": "s"}, user("one")], extra_body={"agentkv": {"session_id": "opened"}})
    assert answer.agentkv["session_id"] == "opened"
    session = served.runtime.resume("opened")
    httpx.post(served.url + "/v1/sessions/opened/user", json={"content": "two"})
    httpx.post(served.url + "/v1/sessions/opened/generate", json={})
    assert session.turns == 2
    history = [{"role": "system", "content": "s"}]
    history += [{k: m[k] for k in ("role", "content")} for m in session.messages()] + [user("three")]
    answer = ask(client, history, extra_body={"agentkv": {"session_id": "opened"}})
    assert answer.agentkv["session_id"] == "opened"
    assert session.turns == 3


def test_after_a_restart_chat_sessions_are_found_again(serve, served):
    runtime = served.runtime

    def post(server, messages, **body):
        return httpx.post(server.url + "/v1/chat/completions", json={"messages": messages, "tools": TOOLS, **body}).json()

    keyed = post(served, [user("one")], user="me")
    free = post(served, [user('call read {"a": 1}')])
    call = free["choices"][0]["message"]["tool_calls"][0]
    runtime.resume(keyed["agentkv"]["session_id"]).add_user("lost in the crash")
    runtime.continuation = type(runtime.continuation)()
    again = serve(runtime)
    history = [user("one"), {"role": "assistant", "content": "echo: one"}, user("two")]
    answer = post(again, history, user="me")
    assert answer["agentkv"]["session_id"] == keyed["agentkv"]["session_id"]
    assert [m["content"] for m in runtime.resume(keyed["agentkv"]["session_id"]).log] == [
        "one",
        "echo: one",
        "two",
        "echo: two",
    ]
    history = [
        user('call read {"a": 1}'),
        free["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "x"},
    ]
    assert post(again, history)["agentkv"]["session_id"] == free["agentkv"]["session_id"]


def test_history_from_elsewhere_is_taken_in(client, served):
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}
    turn = [{"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}]
    turn.append({"role": "tool", "tool_call_id": "call_1", "content": "r"})
    answer = ask(client, [user("go"), *turn, turn[1], *turn, user("so?")], tools=TOOLS)
    session = served.runtime.resume(answer.agentkv["session_id"])
    assert [m["role"] for m in session.log] == ["user", "assistant", "tool", "assistant", "tool", "user", "assistant"]
    assert [m["tool_call_id"] for m in session.log if m["role"] == "tool"] == ["call_1", "call_1#2"]
    assert session.log[1]["reasoning_content"] == "hm"


def test_policy_is_sticky_and_the_body_wins(client, served, serve):
    key = {"prompt_cache_key": "k"}
    header = {"X-AgentKV-Policy": '{"prune_after": 3}'}
    first = ask(client, [user("one")], extra_body=key, extra_headers=header)
    session = served.runtime.resume(first.agentkv["session_id"])
    assert session.policy.prune_after == 3
    history = [user("one"), {"role": "assistant", "content": "echo: one"}, user("two")]
    ask(client, history, extra_body=key)
    assert session.policy.prune_after == 3
    history += [{"role": "assistant", "content": "echo: two"}, user("three")]
    ask(client, history, extra_body=key | {"agentkv": {"policy": {"prune_after": 1}}}, extra_headers=header)
    assert session.policy.prune_after == 1
    from agentkv.types import Policy

    other = serve(policy=Policy(prune_after=7))
    made = httpx.post(other.url + "/v1/chat/completions", json={"messages": [user("x")]}).json()["agentkv"]["session_id"]
    assert other.runtime.resume(made).policy.prune_after == 7


def test_lags_by_call_id_ride_with_the_result(client, served):
    first = ask(client, [user('call read {"a": "x"}')], tools=TOOLS)
    call = first.choices[0].message.tool_calls[0]
    history = [user('call read {"a": "x"}'), first.choices[0].message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "file"})
    ask(client, history, tools=TOOLS, extra_body={"agentkv": {"prune_after": {call.id: 4, "gone": 2}}})
    assert served.runtime.resume(first.agentkv["session_id"]).lags == {call.id: 4}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"agentkv": {"polcy": {}}}, "unknown_option", "polcy"),
        ({"agentkv": {"policy": {"prune_afer": 1}}}, "unknown_option", "prune_afer"),
        ({"agentkv": {"prune_after": {"c": -1}}}, "bad_request", "prune_after"),
        ({"agentkv": []}, "bad_request", "agentkv"),
        ({"response_format": {"type": "yaml"}}, "bad_request", "response_format"),
        ({"response_format": "json"}, "bad_request", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "bad_request", "response_format"),
        ({"response_format": {"type": "regex"}}, "bad_request", "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a" * 300_000}}, "bad_request", "response_format"),
        ({"guided_json": "{"}, "bad_request", "guided_json"),
        ({"guided_choice": []}, "bad_request", "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "bad_request", "response_format"),
        ({"structured_outputs": {"xml": "a"}}, "bad_request", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "bad_request", "structured_outputs"),
        ({"tool_choice": "required"}, "bad_request", "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "bad_request", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "bad_request", "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "bad_request", "tool_choice"),
        ({"logprobs": 1}, "bad_request", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "bad_request", "top_logprobs"),
        ({"top_logprobs": 2}, "bad_request", "top_logprobs"),
        ({"n": 0}, "bad_request", "n"),
        ({"n": 17}, "bad_request", "n"),
        ({"n": True}, "bad_request", "n"),
        ({"n": "2"}, "bad_request", "n"),
        ({"logit_bias": {"x": 5}}, "bad_request", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "bad_request", "logit_bias"),
        ({"logit_bias": [1]}, "bad_request", "logit_bias"),
        ({"presence_penalty": 2.5}, "bad_request", "presence_penalty"),
        ({"frequency_penalty": "x"}, "bad_request", "frequency_penalty"),
        ({"repetition_penalty": 0}, "bad_request", "repetition_penalty"),
        ({"min_p": 1.5}, "bad_request", "min_p"),
        ({"temperature": -1}, "bad_request", "temperature"),
        ({"temperature": "hot"}, "bad_request", "temperature"),
        ({"stop": [1]}, "bad_request", "stop"),
        ({"seed": 2**70}, "bad_request", "seed"),
        ({"messages": []}, "bad_request", "messages"),
        ({"messages": "hi"}, "bad_request", "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "bad_request", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "bad_request", "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]}, "orphan_result", "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "bad_request", "messages"),
        ({"model": "gpt-9"}, "model_not_found", "model"),
        ({"tools": [{"type": "function", "function": {}}]}, "bad_request", "tools"),
    ],
)
def test_what_is_refused(served, body, code, param):
    reply = httpx.post(served.url + "/v1/chat/completions", json={"messages": [user("x")], **body}, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == (404 if code == "model_not_found" else 400)
    assert (error["code"], error["param"]) == (code, param)
    assert error["agentkv"]["hint"]
    assert served.runtime.live == {}


def test_what_is_ignored_or_harmless(served):
    body = {
        "model": None, "messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": None}, user("x")],
        "n": 1, "logprobs": False, "presence_penalty": 0, "response_format": {"type": "text"}, "tool_choice": "auto",
        "stop": "END",
        "parallel_tool_calls": True, "reasoning_effort": "high", "metadata": {"a": 1}, "store": False, "foo": 1, "seed": 3,
        "max_completion_tokens": 50, "top_k": -1, "min_p": 0.1, "stream": False, "stream_options": None, "service_tier": "auto",
        "logit_bias": {"7": -3}, "frequency_penalty": 1.5, "repetition_penalty": 1.1, "agentkv": None,
    }  # fmt: skip
    reply = httpx.post(served.url + "/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    options = served.runtime.resume(reply.json()["agentkv"]["session_id"]).options["last"]
    assert options == {
        "tool_choice": "auto", "max_tokens": 50, "top_k": 0, "min_p": 0.1, "seed": 3, "stop": ("END",), "logit_bias": {7: -3.0},
        "presence_penalty": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.1, "logprobs": False,
    }  # fmt: skip


def test_tool_choice_none_renders_tools_but_parses_no_call(client, served):
    answer = ask(client, [user('call read {"a": 1}')], tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert served.runtime.resume(answer.agentkv["session_id"]).tools == TOOLS


def test_overflow_and_capacity_say_what_clients_look_for(client, served):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, [user("word " * 20_000)], stream=stream)
        assert error.value.code == "context_length_exceeded"
        assert "maximum context length" in error.value.message
        assert error.value.body["agentkv"]["details"]["limit"] == 10_000
    served.runtime.full = True
    with pytest.raises(openai.InternalServerError) as refused:
        ask(client, [user("hi")], stream=True)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"] == "2"
    assert served.runtime.live == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_stops_the_generation(served, until, stream):
    runtime = served.runtime
    first = httpx.post(served.url + "/v1/chat/completions", json={"messages": [user("one")], "user": "u"}).json()
    session = runtime.resume(first["agentkv"]["session_id"])
    history = [user("one"), {"role": "assistant", "content": "echo: one"}, user("word " * 2000)]
    runtime.delay = 0.01
    made = runtime.made
    body = {"messages": history, "user": "u", "stream": stream}
    if stream:
        with httpx.stream("POST", served.url + "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(served.url + "/v1/chat/completions", json=body, timeout=0.15)
    until(lambda: not session.busy and runtime.running == 0, 2)
    assert runtime.made - made < 200
    until(lambda: len(session.log) == 2)
    assert session.turns == 1
    runtime.delay = 0
    again = httpx.post(served.url + "/v1/chat/completions", json={"messages": [*history[:2], user("two")], "user": "u"}).json()
    assert again["agentkv"]["session_id"] == session.id
    assert [m["content"] for m in session.log] == ["one", "echo: one", "two", "echo: two"]


def test_an_error_in_mid_stream_is_an_event(served):
    from agentkv.errors import EngineFault

    runtime = served.runtime
    runtime.delay = 0.001
    lines = []
    with httpx.stream(
        "POST", served.url + "/v1/chat/completions", json={"messages": [user("a b c d e f g h")], "stream": True}
    ) as reply:
        for line in reply.iter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
            if len(lines) == 3:
                for session in runtime.live.values():
                    session.check = fail(EngineFault("broken", kept=0))
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["error"]["code"] == "engine_fault"
    assert runtime.live == {}


def fail(error):
    def check():
        raise error

    return check


def test_half_a_surrogate_pair_does_not_break_a_request(served):
    body = b'{"messages": [{"role": "user", "content": "a \\ud83d b \\ud83d\\ude00"}]}'
    reply = httpx.post(served.url + "/v1/chat/completions", content=body)
    assert reply.json()["choices"][0]["message"]["content"] == "echo: a ? b \U0001f600"
