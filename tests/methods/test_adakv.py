"""Budgets shared by the heads of a layer: the reference over transformers' tensors, closed forms, memory, refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from evicted import PAGE, Engine, prompt
from torch import Tensor
from twin import Twin, same_as_reference

from agentkv import methods
from agentkv.engine.form import Held, Seal
from agentkv.engine.sealed import Candidates
from agentkv.engine.sparse import ModelShape
from agentkv.engine.work import SealWork
from agentkv.errors import BadRequest

SETTINGS: list[dict[str, Any]] = [
    {"capacity": 40, "window": 8},
    {"capacity": 40, "window": 8, "safeguard": 0.0},
    {"capacity": 60, "window": 4, "safeguard": 0.7, "kernel": 5, "pool": "avg"},
    {"capacity": 40, "window": 8, "safeguard": 1.0, "reduce": "max", "reduce_first": False},
    {"capacity": 40, "window": 8, "safeguard": 0.5, "allocation": "blend"},
    {"capacity": 51, "window": 8, "safeguard": 0.3, "allocation": "blend", "kernel": 1},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_it_keeps_and_reads_what_the_reference_says(folder: Path, options: dict[str, Any]) -> None:
    twin = Twin(folder, "adakv", **options, step_tokens=33)
    turn, gap = twin.turn(prompt(90))
    assert gap < 1e-11
    same_as_reference(twin, turn)


@pytest.mark.parametrize("options", SETTINGS)
def test_memory_is_saved(folder: Path, options: dict[str, Any]) -> None:
    """What is held is what the counts say, and at most a page a head more; rounded counts have three tokens' room."""
    engine = Engine(folder, "adakv", **options)
    turn = engine.turn(prompt(90))
    counts = [len(head) for heads in turn.sealed for head in heads]
    page_bytes = -(-PAGE * (2 * 12 * 8 + 4) // 256) * 256  # K and V of a head in float64, and positions
    room = 3 * (options.get("allocation") == "blend")
    assert sum(counts) <= turn.sealed_bytes / page_bytes * PAGE <= sum(counts) + len(counts) * (PAGE + room)
    share = options["capacity"] - options["window"]
    for heads in turn.sealed:
        total = sum(len(head) for head in heads)
        assert total == 2 * share or (options.get("allocation") == "blend" and abs(total - 2 * share) <= 2)
    dense = Engine(folder, "dense").turn(prompt(90))
    assert turn.bytes_held < dense.bytes_held


def test_no_head_is_said_to_hold_more_than_its_layer(folder: Path) -> None:
    (form,) = Engine(folder, "adakv", capacity=40, window=8).llm.runner.forms
    assert form.seal is not None
    seal = form.seal(Held(900, 0, 900, 0, True))
    assert seal == Seal(892, 2 * 32, ((6 * (32 + 15)) // 16, 1), (0, 0))


@pytest.mark.parametrize("length", [1, 8, 39, 40])
def test_what_fits_is_dense(folder: Path, length: int) -> None:
    ids = prompt(length)
    dense, ours = Engine(folder, "dense").turn(ids), Engine(folder, "adakv", capacity=40, window=8).turn(ids)
    assert (ours.tokens, ours.logprobs) == (dense.tokens, dense.logprobs)


@pytest.mark.parametrize("more", [1, 30])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_next_turn_reads_only_its_tokens(folder: Path, more: int, pruned: bool) -> None:
    twin = Twin(folder, "adakv", capacity=40, window=8)
    twin.turn(prompt(90))
    if pruned:
        twin.prune(20, 60)
    held, start = dict(twin.held), twin.forwarded
    turn, gap = twin.turn(prompt(more, seed=2))
    assert gap < 1e-11
    assert turn.prefilled == more + 1
    for (layer, head), before in held.items():
        assert set(turn.kept(layer, head)) <= before | set(range(start, start + more + 1))
    for layer, heads in enumerate(turn.sealed):
        there = sum(len(held[layer, head]) + more + 1 - 8 for head in range(2))
        assert sum(len(head) for head in heads) == min(64, there)


def test_an_even_share_is_each_head_for_itself(folder: Path) -> None:
    """What every head is sure of is its whole share: then each keeps its own best."""
    common: dict[str, Any] = {"capacity": 40, "window": 8, "kernel": 5, "pool": "avg", "reduce_first": False}
    alone = Engine(folder, "snapkv", **common).turn(prompt(90))
    for allocation in ("floor", "blend"):
        shared = Engine(folder, "adakv", **common, safeguard=1.0, allocation=allocation).turn(prompt(90))
        assert (shared.sealed, shared.tokens) == (alone.sealed, alone.tokens)


@dataclass
class Job:
    """A seal of one layer with a query and a key dim of one, so that each head's attention is what is given; the window is one
    token that gets next to none."""

    given: list[list[float]]

    def __post_init__(self) -> None:
        length = len(self.given[0]) + 1
        held = Held(length, 0, length, 0, True)
        self.work = SealWork(0, 0, held, Seal(length - 1, length - 1, (1, 1)), ((0, length),), (), (), ())
        self.shape = ModelShape(1, len(self.given), len(self.given), 1, 1, "float64", 16, 1.0)

    def candidates(self, layer: int) -> Candidates:
        k = torch.tensor([[math.log(p) for p in head] + [-60.0] for head in self.given], dtype=torch.float64).unsqueeze(-1)
        positions = torch.arange(k.shape[1], dtype=torch.int32).expand(k.shape[:2])
        return Candidates(lambda part: k, positions, torch.ones_like(positions, dtype=torch.bool), 0)

    def observed(self, layers: range) -> None:
        return None

    def queries(self, layer: int) -> Tensor:
        return torch.ones(1, len(self.given), 1, dtype=torch.float64)


CARD = [[0.4, 0.3, 0.2, 0.1], [0.9, 0.05, 0.03, 0.02]]


@pytest.mark.parametrize(
    ("given", "safeguard", "allocation", "counts"),
    [
        (CARD, 0.0, "floor", [3, 1]),
        (CARD, 0.0, "blend", [3, 1]),
        (CARD, 0.5, "blend", [2, 2]),  # 2.5 and 1.5 are both rounded to 2
        (CARD, 1.0, "floor", [2, 2]),
        (CARD, 1.0, "blend", [2, 2]),
        ([CARD[0]] * 3, 0.0, "floor", [2, 2, 2]),
        ([[0.25] * 4] * 2, 0.0, "floor", [4, 0]),  # ties go to the lower head
        ([[0.25] * 4] * 2, 0.7, "floor", [3, 1]),  # int(3 * 0.7) = 2 are sure, one of which is the window
    ],
)
def test_closed_forms(given: list[list[float]], safeguard: float, allocation: str, counts: list[int]) -> None:
    method = methods.get("adakv", capacity=3, window=1, kernel=1, safeguard=safeguard, allocation=allocation)
    kept = method.seal(Job(given))  # type: ignore[arg-type]
    assert kept is not None
    assert kept.counts.tolist() == [counts]
    for head, count in enumerate(counts):
        best = sorted(sorted(range(4), key=lambda at, head=head: (-given[head][at], at))[:count])  # type: ignore[misc]
        assert kept.indices[0, head, :count].tolist() == best


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0}, "window=0"),
        ({"capacity": 8, "window": 8}, "capacity=8"),
        ({"kernel": 2}, "kernel=2"),
        ({"safeguard": 1.5}, "safeguard=1.5: give 0 to 1"),
        ({"allocation": "mean"}, "allocation='mean'"),
        ({"pool": "sum"}, "pool='sum'"),
        ({"reduce": "sum"}, "reduce='sum'"),
    ],
)
def test_refusals(options: dict[str, object], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        methods.get("adakv", **options)
