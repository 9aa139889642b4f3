"""Sessions with different methods in one engine, from the face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from agentkv import Runtime, methods
from agentkv.engine.form import Held
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Keep, Kept, Most, SparseMethod
from agentkv.errors import BadRequest, UnknownOption
from agentkv.types import Exactness

TEXTS = ("the quick brown fox jumps over the lazy dog; " * 4, "and then? " * 3)


@dataclass(frozen=True)
class First(SparseMethod):
    """Keeps the first `count` tokens and the newest `count`."""

    count: int = 24
    evicts: ClassVar[bool] = True
    exactness: ClassVar[Exactness] = "lossy"
    reuse: ClassVar[Any] = "chain"
    seals_into: ClassVar[Any] = "stripe"

    def keep(self, held: Held) -> Keep | None:
        if not held.prompt_end or held.slots + held.tail <= 2 * self.count:
            return None
        return Keep(held.tokens - self.count, self.count)

    def most(self, prompt: int, tokens: int) -> Most:
        return Most(tokens - prompt + 2 * self.count, Keep(0, self.count))

    def seal(self, job: SealJob) -> Kept:
        shape = job.shape.num_layers, job.shape.num_kv_heads
        first = torch.arange(self.count).expand(*shape, self.count)
        return Kept(first, torch.full(shape, self.count, dtype=torch.int32))


@dataclass(frozen=True)
class Second(First):
    count: int = 40


def said(session: Any) -> list[tuple[str, int, int]]:
    turns = []
    for text in TEXTS:
        session.add_user(text)
        turn = session.generate(max_tokens=20)
        turns.append((turn.text, turn.usage.prefilled_tokens, turn.usage.evicted_tokens))
    return turns


def test_sessions_of_three_methods_at_once_say_what_each_says_alone(tmp_path: Path) -> None:
    alone = []
    for method in ("dense", First(), Second()):
        with Runtime("micro", db=None, memory="64MiB", method=method) as runtime, runtime.session() as session:
            alone.append(said(session))
    with Runtime("micro", db=tmp_path / "db", memory="64MiB", methods=[First(), Second()]) as runtime:
        assert runtime.methods == ("dense", "first", "second")
        sessions = [runtime.session(method=name, id=name) for name in runtime.methods]
        together: dict[str, list[Any]] = {name: [] for name in runtime.methods}
        for text in TEXTS:
            for session in sessions:
                session.add_user(text)
                turn = session.generate(max_tokens=20)
                together[session.id].append((turn.text, turn.usage.prefilled_tokens, turn.usage.evicted_tokens))
                assert turn.exactness == ("exact" if session.id == "dense" else "lossy")
        assert list(together.values()) == alone
        assert [evicted for _, _, evicted in alone[0]] == [0, 0]
        assert all(second[2] > first[2] > 0 for first, second in alone[1:])
        runtime.check()
        sessions[1].close()
        again = runtime.resume("first")
        again.add_user("more")
        assert again.generate(max_tokens=4).exactness == "lossy"


def test_a_method_that_the_runtime_has_not_is_refused() -> None:
    with Runtime("micro", db=None, memory="64MiB") as runtime, pytest.raises(BadRequest, match="serves dense"):
        runtime.session(method="first")


def test_two_methods_of_one_name_are_refused() -> None:
    with pytest.raises(BadRequest, match="two methods are called 'first'"):
        Runtime("micro", db=None, methods=[First(), First(3)])


@pytest.mark.parametrize("text", ["dense:", "dense"])
def test_a_method_as_people_write_it(text: str) -> None:
    assert methods.parse(text) == methods.get("dense")


def test_options_that_are_none() -> None:
    with pytest.raises(BadRequest, match="no option=value"):
        methods.parse("dense:budget")
    with pytest.raises(UnknownOption, match="budget"):
        methods.parse("dense:budget=(1, 2),other=x")


@pytest.mark.parametrize(
    "text",
    [
        "streamingllm:recent=92.5",
        "kivi:group=32.0",
        "snapkv:reduce_first=maybe",
        "snapkv:capacity=abc",
        "kvzip:keep_ratio=True",
        "omnikv:observers=(0.5,)",
    ],
)
def test_an_option_of_another_type_is_refused_by_its_name(text: str) -> None:
    option, value = text.partition(":")[2].split("=", 1)
    with pytest.raises(BadRequest, match=f"{option}=.*{value.strip('()').rstrip(',')}") as caught:
        methods.parse(text)
    assert caught.value.param == option


def test_instances_are_looked_at_too() -> None:
    with pytest.raises(BadRequest, match=r"count=2\.5"):
        Runtime("micro", db=None, method=First(2.5))  # type: ignore[arg-type]
    for none in (None, 5, First):
        with pytest.raises(BadRequest, match="an instance"):
            Runtime("micro", db=None, method=none)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["h2o:heavy=48,recent=48", "h2o:heavy=0.2,recent=0.2", "omnikv:observers=[0, 2]", "kvzip:keep_ratio=1"]
)
def test_whole_numbers_and_lists_are_fine(text: str) -> None:
    assert methods.parse(text).fingerprint


def test_a_ratio_of_next_to_nothing_keeps_a_token() -> None:
    with Runtime("micro", db=None, memory="64MiB", method="kvzip:keep_ratio=1e-9") as runtime, runtime.session() as session:
        assert said(session)
        runtime.check()
