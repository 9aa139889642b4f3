"""Eight-bit floats: transformers reading what was rounded by arithmetic, bytes, chains, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from coded import DIM, HEADS, LAYERS, Engine, Twin, make, prompt
from torch import Tensor

from agentkv import methods
from agentkv.engine.core import SLOT, Edit, Request
from agentkv.engine.sparse import Plain, StateSpec
from agentkv.errors import BadRequest
from agentkv.types import Sampling


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("fp8"), request.param)


def rounded(x: Tensor, scales: torch.dtype = torch.float32) -> Tensor:
    """Four significant bits, none finer than 2 ** -9, of amounts of amax / 448; to even at half."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).to(scales).to(x.dtype)
    amounts = x / scale
    step = 2.0 ** (amounts.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return ((amounts / step).round() * step).clamp(-448, 448) * scale


@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
def test_it_reads_what_rounding_leaves(folder: Path, scales: Any) -> None:
    """Three turns, a prune between two of them: only new tokens are forwarded."""
    dtype = getattr(torch, scales)
    twin = Twin(folder, lambda layer, k, v: (rounded(k, dtype), rounded(v, dtype)))
    engine = Engine(folder, "fp8_kv", scales=scales, step_tokens=37)
    ids, gap, edits = prompt(90), 0.0, ()
    for number in range(3):
        turn = engine.turn(ids, edits=edits)
        assert turn.prefilled == len(ids) - twin.forwarded
        gap = max(gap, twin.answer(ids, turn))
        ids = [*ids, *turn.tokens]
        if number == 1:
            assert engine.llm.prune("c", [(10, 30), (77, 80)])
            edits = (Edit(len(ids), ((10, 30), (77, 80))),)
            twin.gone |= {*range(10, 30), *range(77, 80)}
        ids = [*ids, *prompt(9, seed=number)]
    assert gap < 1e-10


def test_a_token_takes_its_codes_and_its_scales(folder: Path) -> None:
    engine = Engine(folder, "fp8_kv", memory=8 << 20)
    turn = engine.turn(prompt(160), count=1)
    assert sum(turn.bytes_held) / 160 == LAYERS * HEADS * 2 * (DIM + 4)
    plain = Engine(folder, "dense", dtype="float32").turn(prompt(160), count=1)
    assert sum(plain.bytes_held) / 160 == LAYERS * HEADS * 2 * DIM * 4


@pytest.mark.parametrize("step_tokens", [5, 16, 40])
def test_chunks_and_others_in_the_step_change_nothing(folder: Path, step_tokens: int) -> None:
    whole, cut = Engine(folder, "fp8_kv"), Engine(folder, "fp8_kv", step_tokens=step_tokens, page_size=7)
    for length in (3, 50):
        cut.llm.add(Request(prompt(length, seed=length), Sampling(max_tokens=4)))
    a, b = whole.turn(prompt(90)), cut.turn(prompt(90))
    assert a.tokens == b.tokens
    assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-9


def test_prefixes_are_shared_by_content(folder: Path) -> None:
    engine = Engine(folder, "fp8_kv")
    first = engine.turn(prompt(96), chain="a")
    again = engine.turn(prompt(96), chain="b")
    assert (again.tokens, again.prefilled) == (first.tokens, 1)


def test_a_chain_comes_back_from_host_memory(folder: Path) -> None:
    engine, alone = Engine(folder, "fp8_kv", warm=16 << 20), Engine(folder, "fp8_kv")
    ids = prompt(90)
    first = engine.turn(ids)
    engine.llm.suspend("c")
    info = engine.llm.chain_info("c")
    assert info is not None
    assert info.warm_tokens == len(ids) + len(first.tokens) - 1
    more = [*ids, *first.tokens, *prompt(9, seed=2)]
    alone.turn(ids)
    back, wanted = engine.turn(more), alone.turn(more)
    assert (back.tokens, back.prefilled) == (wanted.tokens, wanted.prefilled)


def test_a_fork_and_a_rollback_go_on_from_where_they_branched(folder: Path) -> None:
    engine, alone = Engine(folder, "fp8_kv"), Engine(folder, "fp8_kv")
    ids = prompt(90)
    first = engine.turn(ids)
    engine.llm.fork("c", "d", len(ids) + 2)
    wanted = alone.turn([*ids, *first.tokens[:2], *prompt(8, seed=4)], chain="x")
    forked = engine.turn([*ids, *first.tokens[:2], *prompt(8, seed=4)], chain="d")
    engine.llm.rollback("c", len(ids) + 2)
    back = engine.turn([*ids, *first.tokens[:2], *prompt(8, seed=4)])
    for found in (forked, back):
        assert found.tokens == wanted.tokens
        assert found.prefilled <= 9


def test_the_reference_says_the_same() -> None:
    method = methods.get("fp8_kv")
    k, v, own = (
        torch.randn(2, 9, 2, DIM, dtype=torch.float64),
        torch.randn(9, 2, DIM, dtype=torch.float64),
        torch.randn(2, 2, DIM),
    )
    read = method.reference(Plain([], [k[0]], [v], [], [], [], 1.0, [(own[0], own[1])]), 0)
    for head in range(2):
        assert list(read.positions[head]) == list(range(10))
        wanted = rounded(torch.cat((k[0][:, head], own[0, head].unsqueeze(0))))
        assert torch.equal(read.k[head], wanted)
        assert torch.equal(read.v[head][:9], rounded(v[:, head]))


@pytest.mark.parametrize(
    ("shape", "part", "beside"), [((SLOT,), "both", (SLOT,)), ((SLOT,), "tail", (2,)), ((3,), "tail", (SLOT,))]
)
def test_only_slots_of_the_tail_have_a_second_array(shape: tuple[int, ...], part: Any, beside: tuple[int, ...]) -> None:
    scope: Any = "slot" if SLOT in shape else "page"
    with pytest.raises(BadRequest, match="beside"):
        StateSpec("x", scope, "uint8", "append", shape, part, beside=("y", beside))


def test_refusals(folder: Path) -> None:
    with pytest.raises(BadRequest, match="scales='float16'"):
        methods.get("fp8_kv", scales="float16")
