"""Views on a GPU: the same scenes, by the kernels that the CPU does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from view_scene import SCALE, Row, Scene, brute, picked

from agentkv.engine.attention import attend
from agentkv.engine.received import received
from agentkv.engine.view import AttentionView, Selection

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03), (torch.float64, 1e-11)]
)
DECODE = [Row(1, 30, 18, (33, 5)), Row(1, 3, 0, (0, 0)), Row(1, 300, 21, (0, 47)), Row(1, 41, 40, (16, 300))]
GUESSES = [Row(3, 30, 18, (33, 5)), Row(1, 3, 0, (0, 0)), Row(2, 25, 17, (0, 47))]
CHUNKS = [Row(9, 30, 18, (33, 5)), Row(12, 12, 0, (0, 0)), Row(5, 25, 17, (0, 47)), Row(1, 6, 5, (17, 17))]
CASES = pytest.mark.parametrize(
    "case", [(DECODE, False), (GUESSES, False), (CHUNKS, True)], ids=["decode", "guesses", "chunks"]
)


@DTYPES
@CASES
@pytest.mark.parametrize("form", ["stripe", "head"])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_and_mass_and_nothing_waits(
    case: tuple[list[Row], bool], form: Literal["stripe", "head"], biased: bool, dtype: torch.dtype, tolerance: float
) -> None:
    scene = Scene(case[0], case[1], dtype, seed=1, device="cuda")
    part, lines = scene.sealed(form, True)
    bias = torch.randn(len(scene.rows), 2, 310, generator=scene.random)
    bias[0, 0, 1] = -torch.inf
    view = AttentionView((replace(part, bias=bias.cuda() if biased else None), scene.batch.part(0)))
    attend(scene.q, view, scene.batch, SCALE, lse=True)  # kernels are compiled and tables copied
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attend(scene.q, view, scene.batch, SCALE, lse=True)
        assert got.lse is not None
        masses = received(scene.q, view, scene.batch, SCALE, got.lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out, lse = brute(scene, [lines], [bias if biased else None, None])
    assert (got.out.cpu().double() - out).abs().max() <= tolerance
    assert (got.lse.cpu() - lse).abs().max() <= tolerance
    for mass, row in zip(masses, scene.rows, strict=True):
        total = mass.tail.sum() + (0 if mass.sealed is None else mass.sealed.sum())
        assert abs(float(total) / (row.count * scene.num_heads) - 1) <= tolerance


@DTYPES
@pytest.mark.parametrize("pages", [True, False])
def test_selections(pages: bool, dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene([Row(1, 30), Row(1, 22)], False, dtype, seed=3, device="cuda")
    units = torch.tensor([[[1, 3], [0, 5]], [[0, 4], [2, 5]]], dtype=torch.int32)
    selection = Selection(units.cuda(), torch.full((2, 2), 2, dtype=torch.int32, device="cuda"), pages=pages)
    size = scene.page_size if pages else 1
    slots = [
        [[s for u in mine for s in range(u * size, u * size + size) if s < row.tail] for mine in by_head]
        for by_head, row in zip(units.tolist(), scene.rows, strict=True)
    ]
    got = attend(scene.q, AttentionView((scene.batch.part(0, selection),)), scene.batch, SCALE).out
    assert (got.cpu().double() - brute(scene, [picked(scene, slots)], tail=False)[0]).abs().max() <= tolerance
