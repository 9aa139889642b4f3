"""`lookup=` from the face: what is refused, who guesses, and that a session says the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from agentkv import Runtime
from agentkv.engine.sparse import ModelShape, SparseMethod, StateSpec
from agentkv.errors import BadRequest
from agentkv.types import Exactness

TEXT = "the quick brown fox jumps over the lazy dog; " * 4


@pytest.mark.parametrize("lookup", [-1, 9, True, 2.5, "8", None])
def test_a_size_that_is_none_is_refused(lookup: Any) -> None:
    with pytest.raises(BadRequest, match="lookup") as caught:
        Runtime("micro", db=None, lookup=lookup)
    assert caught.value.param == "lookup"


@dataclass(frozen=True)
class Lossy(SparseMethod):
    exactness: ClassVar[Exactness] = "lossy"


@dataclass(frozen=True)
class Evicting(SparseMethod):
    evicts: ClassVar[bool] = True


@dataclass(frozen=True)
class Counting(SparseMethod):
    counts_on_host: ClassVar[bool] = False


@dataclass(frozen=True)
class Remembering(SparseMethod):
    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return (StateSpec("seen", "slot", "float32", "mutable"),)


@dataclass(frozen=True)
class Writing(SparseMethod):
    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return (StateSpec("seen", "slot", "float32", "append"),)


def test_only_what_can_be_cut_back_truncates() -> None:
    methods = [Writing(), Lossy(), Evicting(), Counting(), Remembering()]
    with Runtime("micro", db=None, memory="64MiB", methods=methods) as runtime:
        forms = dict(zip(runtime.methods, runtime._engine.worker.llm.pools.forms, strict=True))
    assert {name: form.truncates for name, form in forms.items()} == {
        "dense": True, "writing": True, "lossy": False, "evicting": False, "counting": False, "remembering": False,
    }  # fmt: skip


def test_a_session_says_the_same_with_guesses_and_without() -> None:
    """Greedy and sampled; a method that cannot be cut back never guesses, whatever is asked for."""
    told, counts = [], []
    for options in ({"lookup": 0}, {}, {"lookup": 2}, {"method": Lossy(), "lookup": 8}):
        with Runtime("micro", db=None, memory="64MiB", **options) as runtime:
            texts = []
            for sampling in ({}, {"temperature": 0.3, "seed": 5}):
                with runtime.session(**sampling) as session:
                    session.add_user(TEXT)
                    turn = session.generate(max_tokens=60)
                    texts.append((turn.text, turn.finish_reason, turn.usage))
                    assert turn.usage.completion_tokens <= 60
            runtime.check()
            told.append(texts)
            counts.append(runtime.stats()["decoding"])
    assert told[0] == told[1] == told[2] == told[3]
    assert counts[0]["drafted"] == counts[3]["drafted"] == 0
    assert counts[1]["drafted"] >= counts[1]["accepted"]
    assert counts[1]["tokens"] == counts[0]["tokens"] == counts[0]["steps"]
