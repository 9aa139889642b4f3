"""One layer of a decode step that selects pages: their scores against the copy rate, and what the rest of it takes."""

# mypy: disable-error-code="no-untyped-call"
# (kernels)

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentkv.bench.device_times import graph_of, times
from agentkv.bench.gpu_rows import Measured, Rig, Row, small
from agentkv.bench.paged_shapes import PAGE, Shape, draw
from agentkv.engine.choosing import PageBudget
from agentkv.engine.selection import Selection
from agentkv.engine.tables import RowTable
from agentkv.kernels.page_scores import page_scores
from agentkv.kernels.ragged_decode import ragged_decode

LONG = Shape("4x128K 32/8", (131_088,) * 4, 32, 8, 0.75)
BUDGET, LAYERS = 4096, 8


def selection_rows() -> Iterator[Row]:
    """Bounds of four rows of 8,193 pages, 8 KV heads of 128."""
    yield Row(f"page scores {LONG.name}", "of copy", LONG.share, _measure)


def _measure(rig: Rig) -> Measured:
    """By layer, out of a replay of several: the scores; more: the best pages, attention over them, and all three in turn."""
    shape = small(LONG) if rig.tiny else LONG
    layers = 2 if rig.tiny else LAYERS
    drawn = draw(shape, layers, rig.device)
    num_pages, kv_heads = drawn.tables[0].shape[1], shape.num_kv_heads
    order = torch.randperm(len(shape.lens) * num_pages, device=rig.device).to(torch.int32).view(-1, num_pages)
    dims = order.numel(), layers, kv_heads, 2, shape.head_dim
    bounds = torch.randn(dims, dtype=drawn.q.dtype, device=rig.device)
    lines = tuple(range(len(shape.lens)))
    table = RowTable(drawn.tables[0], torch.arange(len(lines), device=rig.device), drawn.lens, lines, shape.lens, PAGE)

    def budget_of() -> PageBudget:
        return PageBudget(table, PAGE * 4 if rig.tiny else BUDGET, kv_heads, by_head=True)

    def score(layer: int, budget: PageBudget) -> Tensor:
        return page_scores(drawn.q, bounds[:, layer], order, budget.first, budget.full)

    def attend(layer: int, chosen: Selection) -> Tensor:
        read = chosen.table
        assert read is not None
        plan, scale = read.work if drawn.q.is_cuda else None, shape.head_dim**-0.5
        lens = (read.rows, read.lens, scale)
        return ragged_decode(drawn.q, drawn.layers[layer], read.entries, *lens, max_len=read.max_slots, plan=plan)[0]

    def each(one: Callable[[int], Any]) -> list[float]:
        work = graph_of(lambda: [one(layer) for layer in range(layers)], rig.device)
        return [us / layers for us in times(work, rig.device, rig.repeats)]

    budget = budget_of()
    scores = [score(layer, budget) for layer in range(layers)]
    chosen = [budget.best(mine) for mine in scores]
    us = each(lambda layer: score(layer, budget))
    more = {
        "best_us": median(each(lambda layer: budget.best(scores[layer]))),
        "attention_us": median(each(lambda layer: attend(layer, chosen[layer]))),
        "layer_us": median(each(lambda layer: attend(layer, budget.best(score(layer, budget))))),
        "budget": BUDGET,
    }
    num_bytes = int((drawn.lens.cpu() - 1).floor_divide(PAGE).sum()) * kv_heads * 2 * shape.head_dim * bounds.itemsize
    rate = num_bytes / median(us) / 1e6
    return Measured(us, rate / rig.copy, rig.copy, "TB/s", more={"bytes": num_bytes, **more})
