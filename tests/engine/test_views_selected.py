"""Views of selections: pages and slots of the tail, by row or by KV head."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from view_scene import SCALE, Row, Scene, brute, picked

from agentkv.engine.attention import attend
from agentkv.engine.choosing import PageBudget, slot_table
from agentkv.engine.received import received
from agentkv.engine.tables import HeadTable
from agentkv.engine.view import AttentionView, Selection

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
ROWS = [Row(1, 30), Row(1, 3), Row(1, 300, sealed=(20, 3)), Row(1, 8)]
FLOORED = [Row(1, 30, 18), Row(1, 3), Row(1, 300, 21, (20, 3)), Row(1, 8, 7)]


def choose(scene: Scene, size: int, by_head: bool, most: int, seed: int) -> tuple[Selection, list[list[list[int]]]]:
    """Some units of `size` slots of each row, from the floor's on; the newest is among them, but for one head of none."""
    draw = random.Random(seed)
    heads = scene.num_kv_heads if by_head else 1
    units, lens = torch.full((len(scene.rows), heads, most), 999, dtype=torch.int32), []
    slots = []
    for index, row in enumerate(scene.rows):
        of_row = []
        for head in range(heads):
            first, last = row.floor // size, (row.tail - 1) // size
            chosen = draw.sample(range(first, last), min(draw.randint(0, most - 1), last - first))
            mine = sorted([*chosen, last])
            units[index, head, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            lens.append(len(mine))
            of_row.append(
                [slot for unit in mine for slot in range(unit * size, unit * size + size) if row.floor <= slot < row.tail]
            )
        slots.append(of_row if by_head else of_row * scene.num_kv_heads)
    counts = torch.tensor(lens, dtype=torch.int32).view(-1, heads)
    return Selection(*((units, counts) if by_head else (units[:, 0], counts[:, 0])), pages=size > 1), slots


@pytest.mark.usefixtures("cpu_kernels")
@DTYPES
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("rows", [ROWS, FLOORED], ids=["whole", "floored"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_selected_is_read(rows: list[Row], pages: bool, by_head: bool, dtype: torch.dtype, seed: int) -> None:
    scene = Scene(rows, False, dtype, seed)
    scene.leave_behind(7.0)
    selection, slots = choose(scene, scene.page_size if pages else 1, by_head, 70 if seed == 2 else 6, seed)
    sealed, lines = scene.sealed("head", True)
    tail = scene.batch.part(0, selection)
    for parts, before in (((tail,), []), ((sealed, tail), [lines])):
        got = attend(scene.q, AttentionView(parts), scene.batch, SCALE, lse=True)
        out, lse = brute(scene, [*before, picked(scene, slots)], tail=False)
        assert got.lse is not None
        assert (got.out - out).abs().max() <= TOLERANCE[dtype]
        assert (got.lse - lse).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("pages", [True, False])
def test_a_selection_may_leave_out_the_newest_page_or_everything(pages: bool) -> None:
    scene = Scene([Row(1, 30), Row(1, 22)], False, seed=3)
    units = torch.tensor([[[1, 3], [0, 5]], [[0, 0], [2, 5]]], dtype=torch.int32)
    selection = Selection(units, torch.tensor([[2, 1], [0, 2]], dtype=torch.int32), pages=pages)
    size = scene.page_size if pages else 1
    chosen = [[[1, 3], [0]], [[], [2, 5]]]
    slots = [[[s for u in mine for s in range(u * size, u * size + size) if s < row.tail] for mine in by_head]
             for by_head, row in zip(chosen, scene.rows, strict=True)]  # fmt: skip
    got = attend(scene.q, AttentionView((scene.batch.part(0, selection),)), scene.batch, SCALE, lse=True)
    assert got.lse is not None
    assert bool((got.out[1, :3] == 0).all())
    assert bool((got.lse[1, :3] == -torch.inf).all())
    slots[1][0] = [0]  # the oracle has no word for nothing
    out, lse = brute(scene, [picked(scene, slots)], tail=False)
    seen = torch.ones(2, 6, dtype=torch.bool)
    seen[1, :3] = False
    assert (got.out - out)[seen].abs().max() <= 1e-12
    assert (got.lse - lse)[seen].abs().max() <= 1e-12


def test_slots_are_read_where_they_lie() -> None:
    """The table of a choice beside what its slots are; in every head the same."""
    scene = Scene([Row(1, 30), Row(1, 3), Row(1, 300)], False, seed=5)
    table = scene.batch.table_of(0)
    selection, slots = choose(scene, 1, False, 40, 5)
    held, size = table.entries[table.rows].to(torch.int64), scene.page_size
    places = selection.slots.clamp(max=held.shape[1] * size - 1).to(torch.int64)
    names = held.gather(1, places // size) * size + places % size
    ready = replace(selection, table=slot_table(names, selection.lens, table, scene.num_kv_heads))
    got = attend(scene.q, AttentionView((scene.batch.part(0, ready),)), scene.batch, SCALE, lse=True)
    out, lse = brute(scene, [picked(scene, slots)], tail=False)
    assert got.lse is not None
    assert (got.out - out).abs().max() <= 1e-12
    assert (got.lse - lse).abs().max() <= 1e-12


@pytest.mark.parametrize(("budget", "by_head"), [(4, True), (13, True), (40, False), (999, True)])
def test_a_budget_of_pages_is_the_newest_and_the_best_that_fit(budget: int, by_head: bool) -> None:
    scene = Scene([Row(1, 30), Row(1, 3), Row(1, 300), Row(1, 8)], False, seed=6)
    table, size = scene.batch.table_of(0), scene.page_size
    scores = torch.randn(4, 2 if by_head else 1, 75, generator=scene.random, dtype=torch.float64).round(decimals=1)
    budgets = PageBudget(table, budget, 2, by_head)
    chosen = budgets.best(scores)
    slots = []
    for row, lines in zip(scene.rows, scores.tolist(), strict=True):
        full = (row.tail - 1) // size
        room = (budget - (row.tail - full * size)) // size
        best = [sorted(sorted(range(full), key=lambda page, line=line: (-line[page], page))[:room]) for line in lines]
        pages = [[*each, full] for each in best]
        read = [[at for page in each for at in range(page * size, min(page * size + size, row.tail))] for each in pages]
        assert all(len(each) <= budget for each in read)
        slots.append(read if by_head else read * 2)
    first, second = (scene.batch.part(0, each) for each in (chosen, budgets.best(scores)))
    assert isinstance(first.table, HeadTable)
    assert isinstance(second.table, HeadTable)
    assert first.table.like is second.table.like
    out, lse = brute(scene, [picked(scene, slots)], tail=False)
    got = attend(scene.q, AttentionView((first,)), scene.batch, SCALE, lse=True)
    assert got.lse is not None
    assert (got.out - out).abs().max() <= 1e-12
    assert (got.lse - lse).abs().max() <= 1e-12


def some(count: int) -> Selection:
    return Selection(torch.zeros(count, 1, dtype=torch.int32), torch.ones(count, dtype=torch.int32))


@pytest.mark.parametrize(("rows", "prefill"), [([Row(3, 9), Row(1, 2)], True), ([Row(1, 9), Row(2, 4)], False)])
def test_a_selection_beside_other_tokens_of_the_step_is_refused(rows: list[Row], prefill: bool) -> None:
    with pytest.raises(TypeError, match="one token each"):
        Scene(rows, prefill).batch.part(0, some(2))


def test_attention_received_is_not_counted_of_a_selection() -> None:
    scene = Scene(ROWS, False)
    view = AttentionView((scene.batch.part(0, some(4)),))
    with pytest.raises(TypeError, match="selection"):
        received(scene.q, view, scene.batch, SCALE, torch.zeros(4, 6))


@pytest.mark.parametrize("pages", [True, False])
def test_nothing_waits_for_the_device(pages: bool) -> None:
    from test_views import NoWaiting

    scene = Scene(FLOORED, False, torch.float32, seed=4)
    selection = choose(scene, scene.page_size if pages else 1, True, 9, 4)[0]
    out: Tensor
    with NoWaiting():
        out = attend(scene.q, AttentionView((scene.batch.part(0, selection),)), scene.batch, SCALE).out
    assert out.shape == scene.q.shape
