"""What windows of queries give to slots, counted behind the last layer, against float64, one query and one key at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from view_scene import SCALE, Row, Scene

from agentkv.engine import window_mass
from agentkv.engine.attention import attend
from agentkv.engine.view import AttentionView, DeviceBatch
from agentkv.engine.window_mass import WindowMass

ROWS = [Row(9, 30, 18, (33, 5)), Row(12, 12, 0, (0, 0)), Row(5, 25, 17, (0, 47)), Row(1, 6, 5, (17, 17))]
WINDOW = (3, 8)
TIMES = (1.0, -0.5, 2.0)
"""Of the scene's keys, in each layer's."""


def in_layers(scene: Scene) -> DeviceBatch:
    """The scene's rows in three layers of one stripe."""
    stripe = torch.stack([scene.pages * times for times in TIMES], 1)
    return replace(scene.batch, group_of=(0, 0, 0), pages_of=lambda layer: stripe[:, layer])


def wanted(scene: Scene, index: int, layer: int, sealed: list[Tensor]) -> Tensor:
    """`[num_kv_heads, slots]` of a row's tail in a layer. sealed: keys before it, by head."""
    row, span = scene.rows[index], scene.batch.rows[index]
    found = torch.zeros(2, row.tail - row.floor, dtype=torch.float64)
    for i in range(row.count):
        if (span.position + i) % WINDOW[1] < WINDOW[1] - WINDOW[0]:
            continue
        for head in range(scene.num_heads):
            end = row.tail - row.count + i + 1
            keys = torch.cat([sealed[head // 3], scene.tails[index][head // 3].k[row.floor : end] * TIMES[layer]])
            given = torch.softmax(keys @ scene.q[span.start + i, head].cpu().double() * 2**layer * SCALE, 0)
            found[head // 3, : end - row.floor] += given[len(sealed[head // 3]) :]
    return found


def check(dtype: torch.dtype, device: str, tolerance: float, beside: tuple[int, ...] = ()) -> list[range]:
    """beside: layers in which the rows have a sealed part. Which layers came together."""
    scene = Scene(ROWS, True, dtype, seed=11, device=device)
    batch, (part, lines) = in_layers(scene), scene.sealed("head", True)
    windows, told = WindowMass(batch, WINDOW), []
    for layer in range(3):
        view = AttentionView((*([part] if layer in beside else []), batch.part(layer)))
        q = scene.q * 2**layer
        lse = attend(q, view, batch, SCALE, lse=True).lse
        assert lse is not None
        told += list(windows.add(layer, q, view, lse, SCALE))
        q.fill_(torch.nan)  # the next layer's may lie there
    for layers, masses in told:
        for index, mass in enumerate(masses):
            assert mass.first == ROWS[index].floor
            assert len(mass.tail) == len(layers)
            for layer, tail in zip(layers, mass.tail, strict=True):
                before = [line.k if layer in beside else line.k[:0] for line in lines[index]]
                assert (tail.cpu() - wanted(scene, index, layer, before)).abs().max() <= tolerance
    assert sorted(layer for layers, _ in told for layer in layers) == [0, 1, 2]
    return [layers for layers, _ in told]


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_all_layers_come_together(dtype: torch.dtype, tolerance: float) -> None:
    assert check(dtype, "cpu", tolerance) == [range(3)]


def test_a_layer_with_a_sealed_part_comes_by_itself() -> None:
    assert check(torch.float64, "cpu", 1e-11, beside=(1,)) == [range(1, 2), range(1), range(2, 3)]


@pytest.mark.parametrize(
    ("bound", "together"), [("_MOST", [range(1), range(1, 2), range(2, 3)]), ("_AT_ONCE", [range(2), range(2, 3)])]
)
def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch, bound: str, together: list[range]) -> None:
    monkeypatch.setattr(window_mass, bound, 2 * 4 * 2 * 30)  # what the longest row's slots receive in two layers
    assert check(torch.float64, "cpu", 1e-11) == together


def test_a_chunk_without_a_query_that_counts_tells_nothing() -> None:
    scene = Scene([Row(4, 12), Row(2, 10)], True)
    windows, view = WindowMass(scene.batch, WINDOW), AttentionView((scene.batch.part(0),))
    assert not list(windows.add(0, scene.q, view, scene.q.new_zeros(6, 6), SCALE))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 0.01)])
def test_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    assert check(dtype, "cuda", tolerance) == [range(3)]
    assert check(dtype, "cuda", tolerance, beside=(1,)) == [range(1, 2), range(1), range(2, 3)]
