"""What a window observes: transformers' tensors by brute force, closed forms, chains, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from evicted import Engine, prompt
from hypothesis import given
from hypothesis import strategies as st
from recompute import probabilities
from torch import Tensor
from twin import Twin, same_as_reference

from agentkv import methods
from agentkv.engine.core import Request
from agentkv.engine.form import Held
from agentkv.errors import BadRequest
from agentkv.types import Sampling

SETTINGS: list[dict[str, Any]] = [
    {"capacity": 40, "window": 8},
    {"capacity": 21, "window": 20, "kernel": 1},
    {"capacity": 40, "window": 8, "kernel": 7, "pool": "max"},
    {"capacity": 40, "window": 8, "kernel": 7, "pool": "max", "reduce_first": True},
    {"capacity": 70, "window": 1, "kernel": 3, "reduce": "max"},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_it_keeps_and_reads_what_the_reference_says(folder: Path, options: dict[str, Any]) -> None:
    twin = Twin(folder, "snapkv", **options, step_tokens=33)
    turn, gap = twin.turn(prompt(90))
    assert gap < 1e-11
    same_as_reference(twin, turn)
    assert all(len(turn.kept(layer, head)) == options["capacity"] for layer in range(3) for head in range(2))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 39, 40])
def test_what_fits_is_dense(folder: Path, length: int) -> None:
    ids = prompt(length)
    dense, ours = Engine(folder, "dense").turn(ids), Engine(folder, "snapkv", capacity=40, window=8).turn(ids)
    assert (ours.tokens, ours.logprobs) == (dense.tokens, dense.logprobs)
    assert ours.tail == list(range(length))


def test_one_token_more_is_one_token_less(folder: Path) -> None:
    turn = Engine(folder, "snapkv", capacity=40, window=8).turn(prompt(41))
    assert {len(turn.kept(layer, head)) for layer in range(3) for head in range(2)} == {40}


@pytest.mark.parametrize("step_tokens", [4, 7, 64])
def test_chunks_change_nothing(folder: Path, step_tokens: int) -> None:
    whole = Engine(folder, "snapkv", capacity=40, window=8).turn(prompt(90))
    assert Engine(folder, "snapkv", capacity=40, window=8, step_tokens=step_tokens).turn(prompt(90)).sealed == whole.sealed


def chosen(q: Tensor, k: Tensor, count: int, older: int, kernel: int) -> list[int]:
    """The `count` best of the first `older` keys [n, head_dim] by queries [w, group, head_dim] of the last w of them."""
    places = torch.arange(len(k))
    raw = probabilities(q, k.unsqueeze(1), places <= places[-len(q) :, None])[:, :, :older].sum(1).mean(0).tolist()
    pooled = [sum(raw[max(0, at - kernel // 2) : at + kernel // 2 + 1]) for at in range(older)]
    return sorted(sorted(range(older), key=lambda at: (-pooled[at], at))[:count])


@pytest.mark.parametrize("more", [1, 5, 30])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_next_turn_chooses_from_what_is_left(folder: Path, more: int, pruned: bool) -> None:
    """A turn forwards its own tokens and the last drawn one; where these are fewer than the window, they observe alone."""
    twin = Twin(folder, "snapkv", capacity=40, window=8, kernel=5)
    twin.turn(prompt(90))
    if pruned:
        twin.prune(20, 60)
        twin.prune(91, 94)
    held, start = dict(twin.held), twin.forwarded
    turn, gap = twin.turn(prompt(more, seed=2))
    assert gap < 1e-11
    length, observers = start + more + 1, min(8, more + 1)
    assert turn.prefilled == more + 1
    for (layer, head), before in held.items():
        tensors, there = twin.tensors[layer], sorted(before | set(range(start, length)))
        keys, queries = tensors.k[there, head], tensors.q[-observers:, 3 * head : 3 * head + 3]
        older = sum(position < length - 8 for position in there)
        best = chosen(queries, keys, 32, older, 5)
        assert turn.sealed[layer][head] == [there[at] for at in best]
        assert turn.tail == there[older:]


def test_others_in_the_step_change_nothing(folder: Path) -> None:
    alone, beside = (Engine(folder, "snapkv", capacity=40, window=8) for _ in range(2))
    for length in (3, 50, 120):
        beside.llm.add(Request(prompt(length, seed=length), Sampling(max_tokens=5)))
    found, wanted = beside.turn(prompt(90)), alone.turn(prompt(90))
    assert (found.sealed, found.tokens) == (wanted.sealed, wanted.tokens)


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 30)), min_size=1, max_size=5))
def test_the_host_promises_what_comes(name: str, turns: list[tuple[int, int]]) -> None:
    """Turns of a chain in numbers: new tokens, and the answer that is forwarded."""
    method = methods.get(name, capacity=40, window=8)
    tokens = floor = slots = 0
    for new, answer in turns:
        tokens += new
        most = method.most(tokens, tokens + answer)
        held = Held(tokens, floor, tokens - floor, slots, True)
        keep = method.keep(held)
        assert (keep is None) is (tokens <= 40)
        if keep is not None:
            assert floor <= keep.floor == tokens - 8
            assert keep.slots <= held.slots + held.tail
            floor, slots = keep.floor, keep.slots
        tokens += answer
        assert tokens - floor <= most.tail
        assert slots <= most.keep.slots
        assert method.keep(Held(tokens, floor, tokens - floor, slots, False)) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0}, "window=0"),
        ({"capacity": 32}, "capacity=32: give more than window=32"),
        ({"kernel": 4}, "kernel=4: give an odd"),
        ({"kernel": 1027}, "kernel=1027: give an odd number of 1 to 1025"),
        ({"pool": "sum"}, "pool='sum'"),
        ({"reduce": "sum"}, "reduce='sum'"),
    ],
)
def test_refusals(options: dict[str, object], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        methods.get("snapkv", **options)


def test_room_for_a_second_sealed_part_is_set_aside_only_until_the_next_one_is_written(folder: Path) -> None:
    """32 tokens before the window are two units. A later turn's choice stands beside the earlier one for a moment; while an
    answer is decoded there is no seal to come."""
    llm = Engine(folder, "snapkv", capacity=40, window=8, step_tokens=33).llm
    group = llm.runner.forms[0].sealed[0]
    seen: list[list[tuple[int, int]]] = []
    ids = prompt(90)
    for _ in range(2):
        sequence = llm.add(Request(ids, Sampling(max_tokens=8, temperature=0), chain_id="c"))
        steps = []
        while llm.has_work:
            llm.step()
            llm.check()
            if sequence.reserved_units and sequence.state is not None:
                steps.append((len(sequence.state.sealed[0].units), sequence.reserved_units.counts[group]))
        made = sequence.token_ids[len(ids) :]
        llm.commit(sequence, made)
        ids = [*ids, *made, *prompt(60, seed=3)]
        seen.append(sorted(set(steps)))
    assert seen == [[(0, 2), (2, 0)], [(2, 0), (2, 2)]]
