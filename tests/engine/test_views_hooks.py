"""What the hooks are given of attention, by what a method needs; and a selection in prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from view_scene import SCALE, Row, Scene, brute

from agentkv.engine.sparse import Lifecycle, Needs, SparseMethod
from agentkv.engine.view import DeviceBatch, RowMass, Selection

ROWS = [Row(1, 30, 18, (33, 5)), Row(1, 9)]


@dataclass(frozen=True)
class Listener(SparseMethod):
    asks: Needs = field(default_factory=Needs)
    heard: list[tuple[Tensor | None, Sequence[RowMass] | None]] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return self.asks

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        self.heard.append((lse, mass))


@pytest.mark.parametrize("prefill", [False, True])
def test_lse_and_mass_are_given_where_they_are_needed(prefill: bool) -> None:
    scene = Scene(ROWS, prefill, seed=1)
    out, lse = brute(scene, [])
    for needs in (Needs(), Needs(lse=True), Needs(mass=True)):
        method = Listener(needs)
        got = Lifecycle([(method, method, scene.batch)]).attend(0, scene.q, scene.q, SCALE)
        assert (got - out).abs().max() < 1e-12
        (heard, mass), *_ = method.heard
        if needs.lse or needs.mass:
            assert heard is not None
            assert (heard - lse).abs().max() < 1e-12
        if not needs.mass:
            assert mass is None
            continue
        assert mass is not None
        for each, row in zip(mass, ROWS, strict=True):
            assert (each.sealed, each.first) == (None, row.floor)
            assert abs(float(each.tail.sum()) - scene.num_heads) < 1e-12


@dataclass(frozen=True)
class Reader(SparseMethod):
    """Selects whatever it is asked for."""

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        return Selection(torch.zeros(len(batch.rows), 1, dtype=torch.int32), torch.ones(len(batch.rows), dtype=torch.int32))


def test_a_selection_in_prefill_is_refused_by_the_name_of_who_made_it() -> None:
    scene = Scene([Row(3, 9), Row(2, 2)], True)
    with pytest.raises(TypeError, match="Reader selects in prefill"):
        Lifecycle([(Listener(), Reader(), scene.batch)]).attend(0, scene.q, scene.q, SCALE)


def test_what_a_method_selects_is_what_a_decode_reads() -> None:
    scene = Scene([Row(1, 9), Row(1, 2)], False)
    method = Reader()
    got = Lifecycle([(method, method, scene.batch)]).attend(0, scene.q, scene.q, SCALE)
    for row in range(2):
        for head in range(scene.num_heads):
            assert torch.equal(got[row, head], scene.tails[row][head // 3].v[0])
