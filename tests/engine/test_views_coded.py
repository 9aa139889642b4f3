"""Views with a quantised or a low-rank part: against plain keys and values that are what the pages say, one at a time."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from view_scene import SCALE, Line, Row, Scene, brute

from agentkv.engine.attention import attend
from agentkv.engine.received import received
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import AttentionView, Part
from agentkv.kernels.low_rank_decode import LowRankPages
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages, store_fp8

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.01}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
DECODE = [Row(1, 30, 18, (33, 33)), Row(1, 3, 0, (0, 0)), Row(1, 25, 21, (16, 16)), Row(1, 41, 40, (5, 5))]
GUESSES = [Row(3, 30, 18, (33, 33)), Row(1, 3, 0, (0, 0)), Row(2, 25, 17, (47, 47))]
CHUNKS = [Row(9, 30, 18, (33, 33)), Row(12, 12, 0, (0, 0)), Row(5, 25, 17, (47, 47))]
CASES = pytest.mark.parametrize(
    "case", [(DECODE, False), (GUESSES, False), (CHUNKS, True)], ids=["decode", "guesses", "chunks"]
)
PAGE = 16


def table_of(scene: Scene) -> HeadTable:
    """Pages in random order; what stands behind a row's is another row's."""
    most = max(row.sealed[0] for row in scene.rows)
    width = -(-most // PAGE)
    entries = torch.randperm(len(scene.rows) * width, generator=scene.random).view(-1, width).to(torch.int32)
    lens = torch.tensor([row.sealed for row in scene.rows], dtype=torch.int32)
    return HeadTable(entries, lens, most, tuple(row.sealed[0] for row in scene.rows))


def places(table: HeadTable, row: int, length: int) -> tuple[Tensor, Tensor]:
    slots = torch.arange(length)
    return table.entries[row, slots // PAGE].long(), slots % PAGE


def eights(scene: Scene) -> tuple[Part, list[list[Line]]]:
    """e4m3 pages, and what they hold: codes that e4m3 and scales that float16 have exactly, so a product says it all."""
    table = table_of(scene)
    layout = PageLayout(scene.num_kv_heads, PAGE, scene.head_dim)
    pages = torch.full((table.entries.numel(), layout.page_bytes), 255, dtype=torch.uint8)
    payload, lines = QuantizedPages(pages, layout), []
    for index, row in enumerate(scene.rows):
        shape = (2, row.sealed[0], scene.num_kv_heads, scene.head_dim)
        held = torch.randint(-7, 8, shape, generator=scene.random).double()
        held[..., 0] = 7.0  # the largest of each token: its scale is 7 / 448, and every code a multiple of 64
        store_fp8(payload, *places(table, index, row.sealed[0]), held[0].float(), held[1].float())
        lines.append([Line(held[0, :, head], held[1, :, head]) for head in range(scene.num_kv_heads)])
    return moved(Part(payload, table), scene.device), lines


def latents(scene: Scene) -> tuple[Part, list[list[Line]]]:
    """Latents of one group of both heads at positions with gaps, and the keys and values that they stand for."""
    table, rank = table_of(scene), 5
    draw: Any = lambda *shape: torch.randn(*shape, generator=scene.random, dtype=torch.float64).to(scene.dtype)
    k, v = (torch.full((table.entries.numel(), PAGE, 1, rank), torch.nan, dtype=scene.dtype) for _ in range(2))
    frequency = 0.6 ** torch.arange(scene.head_dim // 2).float()
    payload = LowRankPages(k, v, draw(2, rank, scene.head_dim), draw(2, rank, scene.head_dim), frequency)
    positions = torch.stack([torch.arange(table.max_slots) * 3 + index for index in range(len(scene.rows))])
    lines = []
    for index, row in enumerate(scene.rows):
        where = places(table, index, row.sealed[0])
        k[where[0], where[1], 0], v[where[0], where[1], 0] = draw(row.sealed[0], rank), draw(row.sealed[0], rank)
        mine = []
        for head in range(scene.num_kv_heads):
            keys = k[where[0], where[1], 0].double() @ payload.k_factor[head].double()
            half = scene.head_dim // 2
            for slot in range(row.sealed[0]):
                first, second = keys[slot, :half].clone(), keys[slot, half:].clone()
                for i in range(half):
                    angle = float(positions[index, slot].float() * frequency[i])
                    cos, sin = math.cos(angle), math.sin(angle)
                    keys[slot, i], keys[slot, half + i] = first[i] * cos - second[i] * sin, second[i] * cos + first[i] * sin
            mine.append(Line(keys, v[where[0], where[1], 0].double() @ payload.v_factor[head].double()))
        lines.append(mine)
    return moved(Part(payload, table, positions=positions), scene.device), lines


def moved(part: Part, device: str) -> Part:
    """The part on a device."""
    if device == "cpu":
        return part
    payload, table = part.payload, part.table
    tensors = {each.name: getattr(payload, each.name) for each in fields(payload)}
    there = replace(payload, **{name: each.to(device) for name, each in tensors.items() if isinstance(each, Tensor)})
    table = replace(table, entries=table.entries.to(device), lens=table.lens.to(device))
    return Part(there, table, positions=None if part.positions is None else part.positions.to(device))


def close(scene: Scene, make: Any, got: Tensor, want: Tensor) -> None:
    allowed = TOLERANCE[scene.dtype]
    if make is latents:
        allowed = max(allowed, 1e-6)  # cosines are float32 everywhere
    if scene.device != "cpu":
        allowed *= 10
    assert (got.cpu() - want).abs().max() <= allowed * max(1, want.abs().max())


@DTYPES
@CASES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [eights, latents])
def test_a_coded_part_and_the_tail(case: tuple[list[Row], bool], make: Any, biased: bool, dtype: torch.dtype) -> None:
    check(Scene(case[0], case[1], dtype, seed=1), make, biased)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@CASES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [eights, latents])
def test_the_same_on_a_gpu(case: tuple[list[Row], bool], make: Any, biased: bool, dtype: torch.dtype) -> None:
    check(Scene(case[0], case[1], dtype, seed=1, device="cuda"), make, biased)


def check(scene: Scene, make: Any, biased: bool) -> None:
    part, lines = make(scene)
    bias = torch.randn(len(scene.rows), 1, 47, generator=scene.random)
    bias[0, 0, 2] = -torch.inf
    given: list[Tensor | None] = [bias.expand(-1, 2, -1) if biased else None, None]
    view = AttentionView((replace(part, bias=bias.to(scene.device) if biased else None), scene.batch.part(0)))
    got = attend(scene.q, view, scene.batch, SCALE, lse=True)
    out, lse = brute(scene, [lines], given)
    assert got.lse is not None
    close(scene, make, got.out, out)
    close(scene, make, got.lse, lse)
    masses = received(scene.q, view, scene.batch, SCALE, got.lse)
    for mass, row in zip(masses, scene.rows, strict=True):
        total = mass.tail.sum() + (0 if mass.sealed is None else mass.sealed.sum())
        assert abs(float(total) - row.count * scene.num_heads) < 100 * max(TOLERANCE[scene.dtype], 1e-6)


@DTYPES
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("make", [eights, latents])
def test_a_step_s_own_tokens_in_coded_pages(make: Any, prefill: bool, dtype: torch.dtype) -> None:
    """The same part as a table of rows: its last slots are the queries' own."""
    scene = Scene([Row(3, 5, 0, (33, 33)), Row(1, 5, 0, (16, 16)), Row(5, 5, 0, (5, 5))], prefill, dtype, seed=2)
    part, lines = make(scene)
    assert isinstance(part.table, HeadTable)
    rows = part.table.by_row(PAGE)
    assert isinstance(rows, RowTable)
    got = attend(scene.q, AttentionView((replace(part, table=rows),)), scene.batch, SCALE, lse=True)
    own = Scene([Row(row.count, row.sealed[0]) for row in scene.rows], prefill, dtype)
    own.q, own.tails = scene.q, lines
    out, lse = brute(own, [])
    assert got.lse is not None
    close(scene, make, got.out, out)
    close(scene, make, got.lse, lse)


def test_a_bias_by_head_is_refused() -> None:
    scene = Scene(DECODE, False)
    part = replace(eights(scene)[0], bias=torch.zeros(4, 2, 47))
    with pytest.raises(TypeError, match="1 heads"):
        attend(scene.q, AttentionView((part, scene.batch.part(0))), scene.batch, SCALE)
