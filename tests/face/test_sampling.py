"""Sampling options over every way in: a session's defaults, a call's, async, and chat requests."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agentkv import AsyncClient, AsyncRuntime, Runtime
from agentkv.errors import BadRequest, UnknownOption
from agentkv.types import Sampling

A, B = 65, 66  # micro's ids of "A" and "B"
FORCED = {A: 100.0, B: 90.0}
"""No other token comes near, and A wins until it has been punished enough."""
REST = {"min_p": 0.25, "presence_penalty": -1.5, "repetition_penalty": 1.25, "top_p": 0.5, "top_k": 7, "seed": 3}


def told(session: Any, **options: Any) -> str:
    session.add_user("hi")
    return str(session.generate(**{"max_tokens": 4} | options).text)


def mixed(text: str) -> bool:
    """Is it A for a while, and then both?"""
    return text.startswith("AAA") and set(text) == {"A", "B"} and abs(text[20:].count("A") - text[20:].count("B")) < 8


@pytest.fixture
def seen(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[Sampling]:
    """The sampling of each generation of the runtime, which the client's server has, too."""
    made: list[Sampling] = []
    backend = runtime._engine.backend
    generate = backend.generate

    def spy(chain_id: str, history: Any, suffix: Any, sampling: Sampling, **more: Any) -> Any:
        made.append(sampling)
        return generate(chain_id, history, suffix, sampling, **more)

    monkeypatch.setattr(backend, "generate", spy)
    return made


def test_penalties_and_biases_reach_the_draw(face: Any, seen: list[Sampling]) -> None:
    session = face.session(logit_bias=FORCED)
    assert told(session) == "AAAA"
    assert mixed(told(session, frequency_penalty=2.0, max_tokens=60))
    assert told(session, logit_bias={B: 100}) == "BBBB"
    told(session, **REST)
    assert seen[-1] == Sampling(logit_bias=FORCED, max_tokens=4, **REST)
    session.close()


def test_defaults_of_a_session_are_kept_with_it(face: Any, runtime: Runtime) -> None:
    session = face.session(logit_bias=FORCED, frequency_penalty=2.0, **REST)
    session.suspend()
    stored = runtime._store.load(session.id).settings.sampling  # type: ignore[union-attr]
    assert stored == Sampling(logit_bias=FORCED, frequency_penalty=2.0, **REST)
    again = face.resume(session.id)
    assert mixed(told(again, max_tokens=60, presence_penalty=0.0))
    assert told(again, frequency_penalty=0.0) == "AAAA"
    session.close()


def test_min_p_leaves_the_likeliest_token(face: Any) -> None:
    greedy, drawn = face.session(), face.session(temperature=3.0, seed=2, min_p=1.0)
    assert told(greedy) == told(drawn)
    greedy.close()
    drawn.close()


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 2.0},
        {"presence_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"logit_bias": {1: 200.0}},
        {"logit_bias": {9999: 1.0}},
    ],
)
def test_what_is_out_of_range_is_refused(face: Any, options: dict[str, Any]) -> None:
    session = face.session()
    session.add_user("hi")
    with pytest.raises(BadRequest) as raised:
        session.generate(**options)
    assert raised.value.param == next(iter(options))
    assert session.turns == 0
    with pytest.raises(UnknownOption):
        session.generate(min_q=0.5)
    session.close()


def test_async_has_the_same_options(runtime: Runtime, base_url: str) -> None:
    async def say(face: Any) -> str:
        session = await face.session(logit_bias=FORCED)
        await session.add_user("hi")
        text = str((await session.generate(max_tokens=60, frequency_penalty=2.0)).text)
        await session.close()
        return text

    async def over_http() -> str:
        async with AsyncClient(base_url) as client:
            return await say(client)

    async def in_process() -> str:
        async with AsyncRuntime("micro", memory="64MiB", db=None) as opened:
            return await say(opened)

    text = asyncio.run(over_http())
    assert mixed(text)
    assert asyncio.run(in_process()) == text


def test_chat_requests_have_them(base_url: str, seen: list[Sampling]) -> None:
    bias = {str(token): value for token, value in FORCED.items()}

    def chat(**options: Any) -> str:
        body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": bias, **options}
        reply = httpx.post(base_url + "/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    assert chat(max_tokens=4) == "AAAA"
    assert mixed(chat(frequency_penalty=2, max_tokens=60))
    chat(max_tokens=4, **REST)
    assert seen[-1] == Sampling(logit_bias=FORCED, max_tokens=4, **REST)
