"""One engine, a session of each method, turns in turn: what each says is what it says alone."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv import Runtime

METHODS = (
    "dense",
    "adakv:capacity=96,window=16",
    "fp8_kv",
    "h2o:heavy=48,recent=48,interval=16",
    "kivi:bits=4,residual=32",
    "kvzip:keep_ratio=0.4,chunk=128",
    "omnikv:budget=64",
    "quest:budget=64",
    "snapkv:capacity=96,window=16",
    "streamingllm:sinks=4,recent=92",
)
TEXTS = tuple(" ".join(f"{chr(97 + (i * k) % 26)}{(i * i + k) % 977}" for i in range(60)) for k in (7, 11, 3))
OPTIONS: dict[str, Any] = {"db": None, "memory": "256MiB", "page_size": 16}
Said = tuple[tuple[int, ...], int]


def said(session: Any, text: str) -> Said:
    """Ids of the answer, and prompt tokens that were forwarded for it."""
    session.add_user(text)
    turn = session.generate(max_tokens=24, temperature=1.5, seed=5)  # the draws follow the logits closely
    return tuple(turn.text.encode()), turn.usage.prefilled_tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Said]]:
    found = {}
    for method in METHODS:
        with Runtime("micro", method=method, **OPTIONS) as runtime, runtime.session() as session:
            found[method] = [said(session, text) for text in TEXTS]
            runtime.check()
    return found


def test_ten_sessions_of_ten_methods_say_what_each_says_alone(alone: dict[str, list[Said]]) -> None:
    with Runtime("micro", method=METHODS[0], methods=METHODS[1:], **OPTIONS) as runtime:
        sessions = {method: runtime.session(method=method) for method in METHODS}
        together: dict[str, list[Said]] = {method: [] for method in METHODS}
        for text in TEXTS:
            for method, session in sessions.items():
                together[method].append(said(session, text))
        runtime.check()
        for session in sessions.values():
            session.close()
        runtime.check()
        arena = runtime.stats()["arena"]
        assert arena["total"] == arena["free"] + arena["radix"]
    assert together == alone


def test_later_turns_forward_their_own_tokens_only(alone: dict[str, list[Said]]) -> None:
    """Its text, the template's frame, and where an answer was cut, the end that it lacks. kvzip forwards what it chose from
    once more."""
    later = {method: [count for _, count in turns[1:]] for method, turns in alone.items()}
    for method, counts in later.items():
        if not method.startswith("kvzip"):
            assert all(0 <= count - len(text) - 20 <= 2 for count, text in zip(counts, TEXTS[1:], strict=True)), (
                method,
                counts,
            )


def test_the_budgets_bite(alone: dict[str, list[Said]]) -> None:
    """Some of the methods answer otherwise, or nothing was compared."""
    assert len({tuple(text for text, _ in turns) for turns in alone.values()}) > 3
