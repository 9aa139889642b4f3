"""Scores that slots keep, against loops over lists: in torch, in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from devices import NoWaiting, numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

from agentkv.kernels.kept_scores import ScorePages, grow, hiding, strike_lowest

LAYERS, HEADS, MOST = 2, 3, 5
STRIDE = 64
"""Elements from one granule to the next; a unit is longer."""


@dataclass
class Place:
    """Units of some rows in an arena, in random order; what lies between them is nobody's."""

    arena: Tensor
    size: int
    pages: list[list[int]]
    firsts: list[int]
    ends: list[list[list[int]]]

    def at(self, row: int, layer: int, head: int, slot: int) -> int:
        return self.pages[row][slot // self.size] * STRIDE + (layer * HEADS + head) * self.size + slot % self.size

    def slots(self, row: int, layer: int, head: int) -> range:
        return range(self.firsts[row], self.ends[row][layer][head])

    def scores(self, device: str, expanded: bool = False) -> ScorePages:
        """expanded: all heads of a row end together, and the tensor says so by its strides."""
        unit = LAYERS * HEADS * self.size
        rows = (len(self.arena) - unit) // STRIDE + 1
        inner = (HEADS * self.size, self.size, 1)
        units = self.arena.to(device).as_strided((rows, LAYERS, HEADS, self.size), (STRIDE, *inner))
        ends = torch.tensor(self.ends, dtype=torch.int32, device=device)
        if expanded:
            ends = ends[:, 0, 0].contiguous().view(-1, 1, 1).expand(-1, LAYERS, HEADS)
        width = max(map(len, self.pages))
        stale = [[*mine, *[self.pages[0][0]] * (width - len(mine))] for mine in self.pages]
        firsts = torch.tensor(self.firsts, dtype=torch.int32, device=device)
        return ScorePages(units, torch.tensor(stale, device=device), firsts, ends)


def place(draw: random.Random, arena: Tensor, units: list[int], size: int, counts: list[int], by_head: bool) -> Place:
    """counts: most slots of each row."""
    pages = [[units.pop() for _ in range(-(-count // size))] for count in counts]
    firsts = [0 if by_head or not count else draw.randrange(min(size, count)) for count in counts]
    ends = [
        [[draw.randrange(count + 1) if by_head else count for _ in range(HEADS)] for _ in range(LAYERS)] for count in counts
    ]
    return Place(arena, size, pages, firsts, ends)


def two(seed: int) -> tuple[Place, Place, Tensor]:
    """A sealed part, which one row of four does not have, and a tail, in one arena of few values with many ties."""
    draw = random.Random(seed)
    sealed, tail = [20, 0, 33, 3], [draw.randrange(1, 40) for _ in range(4)]
    step = -(-LAYERS * HEADS * 16 // STRIDE)
    arena = torch.tensor([draw.choice([-1.0, 0.0, 0.5, 1.0, 2.5]) for _ in range(40 * step * STRIDE)])
    units = draw.sample([step * i for i in range(39)], 39)
    return place(draw, arena, units, 16, sealed, True), place(draw, arena, units, 8, tail, False), arena


def loops(front: Place, back: Place, most: list[int], want: list[float]) -> None:
    """What `strike_lowest` leaves."""
    for row in range(4):
        for layer in range(LAYERS):
            for head in range(HEADS):
                mine = [part.at(row, layer, head, s) for part in (front, back) for s in part.slots(row, layer, head)]
                alive = [at for at in mine if want[at] >= 0]
                if len(alive) > most[row]:
                    lowest = min(want[at] for at in alive)
                    want[[at for at in alive if want[at] == lowest][-1]] = -1.0


def check(device: str) -> None:
    for seed in range(6):
        front, back, arena = two(seed)
        want, draw = arena.tolist(), random.Random(seed)
        held = arena.to(device)
        parts = []
        for part in (front, back):
            part.arena = held  # scores are written where the test looks
            parts.append(part.scores(device, expanded=part is back))
        for layer in range(LAYERS):
            for part, scores in zip((front, back), parts, strict=True):
                received = torch.rand(4, HEADS, scores.width - draw.randrange(3), generator=torch.Generator().manual_seed(seed))
                hidden = hiding(scores, layer).cpu()
                for row in range(4):
                    for head in range(HEADS):
                        for slot in range(part.ends[row][layer][head]):
                            gone = want[part.at(row, layer, head, slot)] < 0 or slot < part.firsts[row]
                            assert float(hidden[row, head, slot]) == (-math.inf if gone else 0.0)
                            if slot in part.slots(row, layer, head) and slot < received.shape[2]:
                                at = part.at(row, layer, head, slot)
                                want[at] = float(torch.tensor(want[at]) + received[row, head, slot])
                with NoWaiting():
                    grow(scores, layer, received.to(device))
                assert held.tolist() == want
        for _ in range(3):
            most = [draw.choice([0, MOST, 2**31 - 1]) for _ in range(4)]
            limits = torch.tensor(most, dtype=torch.int32, device=device)
            with NoWaiting():
                strike_lowest(*parts, limits)
            loops(front, back, most, want)
            assert held.tolist() == want


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_loops(device: str) -> None:
    check(device)


@only_interpreted
def test_equals_loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_scalars(monkeypatch)
    from agentkv.kernels import kept_scores as module
    from agentkv.kernels import kept_scores_triton as fused

    monkeypatch.setattr(fused, "SLOTS", 16)
    monkeypatch.setattr(fused, "BLOCK", 16)
    for name in ("grow", "hiding", "strike_lowest"):
        monkeypatch.setattr(module, name, getattr(fused, name))
        monkeypatch.setitem(globals(), name, getattr(fused, name))
    check("cpu")


@only_without_gpu
def test_the_interpreter_agrees() -> None:
    pass_interpreted(__file__, 1)
