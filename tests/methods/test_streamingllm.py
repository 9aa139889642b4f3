"""First and newest tokens: transformers with the mask at every layer, host arithmetic, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evicted import Engine, prompt
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from twin import Twin

from agentkv import methods
from agentkv.engine.form import Held
from agentkv.engine.work import SealWork
from agentkv.errors import BadRequest, UnknownOption


@pytest.mark.parametrize(("sinks", "recent"), [(4, 20), (0, 7), (20, 3), (1, 1)])
@pytest.mark.parametrize("length", [3, 60])
def test_answers_read_the_first_and_the_newest(folder: Path, sinks: int, recent: int, length: int) -> None:
    """Two turns; the tail is trimmed while the first is answered. Prompts read what is held, which is no less."""
    twin = Twin(folder, "streamingllm", sinks=sinks, recent=recent)

    def reads(layer: int, head: int, at: int) -> set[int]:
        return {j for j in range(at + 1) if j < sinks or j > at - recent}

    for more in (prompt(length), prompt(9, seed=2)):
        turn, gap = twin.turn(more, count=40, reads=reads)
        assert gap < 1e-11
        assert len(turn.left[1]) <= recent + 17
        prompt_length = len(twin.history) - 40
        for held in (turn.kept(0, 0), turn.kept(2, 1)):
            assert held == [j for j in range(prompt_length) if j < sinks or j >= prompt_length - recent]
    assert turn.prefilled == 10


class Counting(TorchDispatchMode):
    """How many operations are dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_tail_is_trimmed_without_the_device(folder: Path) -> None:
    """Only the first seal writes; the others let go of pages."""
    engine, counts = Engine(folder, "streamingllm", sinks=4, recent=20), list[int]()
    seal = engine.llm.runner.seal

    def counted(work: SealWork) -> int:
        with Counting() as mode:
            slots = seal(work)
        counts.append(mode.count)
        return slots

    engine.llm.runner.seal = counted  # type: ignore[method-assign]
    engine.turn(prompt(60), count=60)
    assert counts[0] > 0
    assert len(counts) > 3
    assert not any(counts[1:])


def test_what_is_short_is_dense(folder: Path) -> None:
    ids = prompt(30)
    dense = Engine(folder, "dense").turn(ids, count=10)
    ours = Engine(folder, "streamingllm", sinks=4, recent=36).turn(ids, count=10)
    assert ours.tokens == dense.tokens
    assert ours.logprobs == pytest.approx(dense.logprobs, abs=1e-11)


def test_a_pruned_sink_is_gone(folder: Path) -> None:
    twin = Twin(folder, "streamingllm", sinks=4, recent=20)
    twin.turn(prompt(60), reads=lambda _, head, at: {*range(4), *range(at - 19, at + 1)})
    twin.prune(1, 3)
    turn, gap = twin.turn(prompt(9, seed=2), reads=lambda _, head, at: {0, 3, *range(at - 19, at + 1)})
    assert gap < 1e-11
    assert turn.sealed == [[[0, 3]] * 2] * 3


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 200), st.integers(0, 120))
def test_the_host_promises_what_comes(sinks: int, recent: int, length: int, more: int) -> None:
    """The engine's loop in numbers: no query misses a newest token, and the tail stays below what was promised."""
    method = methods.get("streamingllm", sinks=sinks, recent=recent)
    most = method.most(length, length + more)
    floor = slots = 0
    for tokens in range(length, length + more + 1):
        assert tokens == length or tokens - floor <= most.tail
        keep = method.keep(Held(tokens, floor, tokens - floor, slots, tokens == length))
        if keep is not None:
            assert floor < keep.floor <= tokens
            floor, slots = keep.floor, keep.slots
        assert slots == min(sinks, tokens, floor) <= most.keep.slots
        assert floor <= max(sinks, tokens - recent)
        assert floor >= min(sinks, tokens)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"sinks": -1}, "sinks=-1"), ({"recent": 0}, "recent=0"), ({"positions": "cache"}, "positions='cache'")],
)
def test_refusals(options: dict[str, object], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        methods.get("streamingllm", **options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(UnknownOption, match="window"):
        methods.get("streamingllm", window=3)
