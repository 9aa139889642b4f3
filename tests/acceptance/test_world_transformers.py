"""`micro` in agentkv and in transformers: the same verdict and the same greedy tokens in every turn of a task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentkv.runtime import Runtime
from agentkv.runtime_engine import model_path
from agentkv.types import TurnDone
from agentkv.world.dialect import DIALECTS
from agentkv.world.env import World
from agentkv.world.reference_play import play_with_transformers
from agentkv.world.task import FAMILIES, make_task

PAIRS = [(dialect, family) for dialect in DIALECTS for family in FAMILIES]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime("micro", db=None) as runtime:
        yield runtime


def _ours(runtime: Runtime, seed: int, family: str, dialect: str, max_bytes: int) -> tuple[bool, list[list[int]]]:
    """The verdict, and the ids that were drawn in each turn, from their log-probabilities."""
    turns: list[list[int]] = []

    def see(event: Any) -> None:
        if isinstance(event, TurnDone):
            turns.append([token.id for token in event.turn.logprobs or ()])

    style = DIALECTS[dialect]
    with World(make_task(seed, family, max_bytes, dialect=style), style) as world:
        with runtime.session(system=style.system, tools=world.tools, logprobs=True) as session:
            session.add_user(world.prompt)
            session.run(max_turns=24, on_event=see)
        return world.verdict(), turns


def _same(runtime: Runtime, seed: int, family: str, dialect: str, max_bytes: int) -> None:
    solved, turns = _ours(runtime, seed, family, dialect, max_bytes)
    drawn: list[list[int]] = []
    style = DIALECTS[dialect]
    theirs = play_with_transformers(model_path("micro"), seed, max_bytes=max_bytes, family=family, dialect=style, drawn=drawn)
    assert turns == drawn
    assert solved == theirs
    assert all(turns)


@pytest.mark.parametrize(("dialect", "family"), [("native", "join"), ("mini-swe-agent", "again"), ("openhands", "update")])
def test_the_same_tokens_and_verdict(runtime: Runtime, dialect: str, family: str) -> None:
    _same(runtime, 2150, family, dialect, 2200)


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "family"), PAIRS)
@pytest.mark.parametrize(("seed", "max_bytes"), [(2100, 3000), (2101, 8192)])
def test_the_same_tokens_and_verdict_in_every_pair(
    runtime: Runtime, seed: int, max_bytes: int, dialect: str, family: str
) -> None:
    _same(runtime, seed, family, dialect, max_bytes)
