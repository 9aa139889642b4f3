"""A stock openai client that resends its whole history continues the chain, also with arguments re-serialised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from agentkv import Runtime
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import make_task

SEEDS = (6, 7)


def as_sent(arguments: str) -> str:
    return arguments


def re_serialised(arguments: str) -> str:
    """The same JSON in another spelling."""
    return json.dumps(json.loads(arguments), indent=2, separators=(" ,", " : "))


def play(client: openai.OpenAI, world: World, spell: Callable[[str], str], **extra: Any) -> list[Any]:
    """The tool loop as any agent framework writes it; returns the responses."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": NATIVE.system},
        {"role": "user", "content": world.task.prompt},
    ]
    responses = []
    for _ in range(24):
        response = client.chat.completions.create(
            model="micro", messages=messages, tools=list(NATIVE.tools), temperature=0, **extra
        )
        responses.append(response)
        said = response.choices[0].message
        if not said.tool_calls:
            break
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": spell(call.function.arguments)},
            }
            for call in said.tool_calls
        ]
        messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
        for call in said.tool_calls:
            result = world.bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return responses


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spell", [as_sent, re_serialised])
@pytest.mark.parametrize("key", [{}, {"prompt_cache_key": "conversation-1"}], ids=["no key", "key"])
def test_only_new_tokens_are_prefilled(base_url: str, seed: int, spell: Callable[[str], str], key: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    extra = {"prompt_cache_key": f"{key['prompt_cache_key']}-{seed}-{spell.__name__}"} if key else {}
    with World(make_task(seed)) as world:
        responses = play(client, world, spell, **extra)
        assert world.verdict()
    assert len(responses) >= 4
    chains = {response.model_extra["agentkv"]["chain_id"] for response in responses}
    assert len(chains) == 1
    boundary = 0
    for index, response in enumerate(responses):
        usage = response.usage
        details = usage.prompt_tokens_details
        assert usage.prompt_tokens == details.cached_tokens + details.agentkv_prefilled_tokens
        if index:
            assert details.cached_tokens / boundary >= 0.995, f"request {index}: {response.model_extra['agentkv']}"
            assert response.model_extra["agentkv"]["miss"] is None
        boundary = usage.prompt_tokens + usage.completion_tokens


def test_streamed_is_not_streamed(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    task = make_task(SEEDS[0])
    ask: dict[str, Any] = {
        "model": "micro",
        "messages": [{"role": "system", "content": NATIVE.system}, {"role": "user", "content": task.prompt}],
        "tools": list(NATIVE.tools),
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert json.loads(arguments) == json.loads(whole.choices[0].message.tool_calls[0].function.arguments)
    assert "".join(delta.content or "" for delta in deltas) == (whole.choices[0].message.content or "")
    assert chunks[0].model_extra["agentkv"]["chain_id"]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_overflow_is_a_400_with_the_openai_code(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="micro", messages=[{"role": "user", "content": "x" * 70_000}])
    assert raised.value.code == "context_length_exceeded"
    assert "maximum context length" in str(raised.value)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_the_generation(base_url: str, runtime: Runtime, stream: bool) -> None:
    def active() -> int:
        running: int = runtime.stats()["queue"]["running"]
        return running

    body = {
        "model": "micro",
        "messages": [{"role": "user", "content": "count for ever"}],
        "max_tokens": 4000,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 5,
        "stream": stream,
    }
    with httpx.Client(timeout=1.0 if not stream else 30) as client:
        try:
            with client.stream("POST", f"{base_url}/v1/chat/completions", json=body) as response:
                for _ in response.iter_raw():
                    break
        except httpx.ReadTimeout:
            assert not stream
    deadline = time.monotonic() + 10
    while active() and time.monotonic() < deadline:
        time.sleep(0.05)
    stats = runtime.stats()
    assert stats["queue"]["running"] == 0
    assert stats["arena"]["active"] == 0
    assert stats["reserved_bytes"] == 0
    runtime.check()
