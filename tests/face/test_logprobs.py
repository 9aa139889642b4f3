"""Log-probabilities over every way in: what is returned, how it rides in a stream, and what is kept of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch

import agentkv
from agentkv import AsyncClient, Runtime
from agentkv.types import TokenLogprob, Turn

ASK = {"logprobs": True, "top_logprobs": 2}
WILD = {"temperature": 1.6, "max_tokens": 50}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


def turn_of(face: Any, **options: Any) -> tuple[Turn, list[TokenLogprob]]:
    """A streamed turn, and the entries that came with its events."""
    session = face.session(tools=TOOLS)
    session.add_user("hi")
    rode: list[TokenLogprob] = []
    with session.stream(**options) as stream:
        for event in stream:
            rode += getattr(event, "logprobs", ())
    session.close()
    return stream.turn, rode


def test_every_drawn_token_has_its_log_probability(face: Any, runtime: Runtime) -> None:
    """Against transformers' logits of the same ids."""
    from transformers import AutoModelForCausalLM

    session = face.session()
    session.add_user("list the files")
    turn = session.generate(max_tokens=8, temperature=1.2, seed=3, **ASK)
    assert turn.logprobs is not None
    assert len(turn.logprobs) == turn.usage.completion_tokens
    ids = list(runtime.resume(session.id)._branch.ledger.ids)
    made = [each.id for each in turn.logprobs]
    assert made == ids[-len(made) :]
    twin = AutoModelForCausalLM.from_pretrained(Path(agentkv.__file__).parent / "data" / "micro", dtype=torch.float32).eval()
    with torch.inference_mode():
        want = twin(torch.tensor([ids])).logits[0].double().log_softmax(-1)[-len(made) - 1 : -1]
    for line, entry in zip(want, turn.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(line[entry.id]), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(line.topk(2).values.tolist(), abs=1e-3)
    text = b"".join(bytes(each.bytes) for each in turn.logprobs if each.bytes is not None)
    assert text.decode("utf-8", "replace").strip() == turn.text.strip()
    session.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_streamed_is_the_beginning_of_the_turn(runtime: Runtime, seed: int) -> None:
    """At a temperature that writes half characters and half calls, with stop strings that cut tokens."""
    counts = []
    noise = {257: -100.0, 258: -100.0}  # no end of turn and no call
    for options in (
        {"logit_bias": noise},
        {"logit_bias": noise, "stop": ("e", "ab", "\n", " ")},
        {"logit_bias": {257: -100.0, 258: -20.0}},
        {"logit_bias": noise | {0xF0: 40.0, 0x9F: 40.0, 0x98: 40.0}},
    ):
        turn, rode = turn_of(runtime, temperature=10.0, max_tokens=50, seed=seed, **ASK, **options)
        assert turn.logprobs is not None
        assert tuple(rode) == turn.logprobs[: len(rode)]
        assert len(turn.logprobs) <= turn.usage.completion_tokens
        counts.append(len(rode))
    assert max(counts) > 5


def test_without_asking_there_are_none_and_nothing_is_kept(face: Any, runtime: Runtime) -> None:
    plain, rode = turn_of(face, max_tokens=4)
    assert (plain.logprobs, rode) == (None, [])
    asked, rode = turn_of(face, max_tokens=4, **ASK)
    assert asked.text == plain.text
    assert asked.logprobs is not None
    assert asked.logprobs[: len(rode)] == tuple(rode)
    session = face.session(**ASK)
    session.add_user("hi")
    assert session.generate(max_tokens=2).logprobs is not None
    kept = runtime.resume(session.id).last_turn
    assert kept is not None
    assert kept.logprobs is None
    assert runtime._store.load(session.id).turns[0].turn == kept  # type: ignore[union-attr]
    session.add_user("more")
    assert session.generate(max_tokens=2, logprobs=False).logprobs is None
    session.close()


def test_a_turn_stored_before_there_were_logprobs_is_read() -> None:
    old = b'{"number":1,"text":"x","usage":{},"finish_reason":"stop","state":"done","chain_id":"c"}'
    assert msgspec.json.decode(old, type=Turn).logprobs is None


def test_async_has_them(base_url: str) -> None:
    async def say() -> Turn:
        async with AsyncClient(base_url) as client:
            session = await client.session()
            await session.add_user("hi")
            turn = await session.generate(max_tokens=3, **ASK)
            await session.close()
            return turn

    turn = asyncio.run(say())
    assert turn.logprobs is not None
    assert [len(each.top_logprobs) for each in turn.logprobs] == [2] * len(turn.logprobs)


def test_chat_has_openai_shapes_streamed_and_not(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "micro", "messages": [{"role": "user", "content": "hi"}], "seed": 2, **WILD}
        plain = client.chat.completions.create(**ask)
        assert plain.choices[0].logprobs is None
        whole = client.chat.completions.create(**ask, **ASK).choices[0]
        assert whole.message.content == plain.choices[0].message.content
        assert whole.logprobs is not None
        content = whole.logprobs.content
        assert content
        for entry in content:
            assert set(entry.model_dump()) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= -1e9
            assert entry.logprob <= entry.top_logprobs[0].logprob
        streamed, text = [], ""
        for chunk in client.chat.completions.create(**ask, **ASK, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.logprobs is not None:
                    streamed += choice.logprobs.content or []
        assert text == whole.message.content
        assert [entry.token for entry in streamed] == [entry.token for entry in content]
        # a chunk is prefilled beside other rows the second time, so float32 may differ in its last places
        assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-4)
        assert b"".join(bytes(each.bytes or ()) for each in content).decode("utf-8", "replace").strip() == text.strip()
