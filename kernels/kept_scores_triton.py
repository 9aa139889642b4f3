"""Scores that slots keep, on a GPU. The twins are in `kept_scores`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.kept_scores import DEAD, ScorePages

SLOTS = 256
"""Slots of one program that adds or hides."""
BLOCK = 512
"""Slots that are compared at a time."""


@triton.jit(do_not_specialize=["width", "max_pages"])
def _grow_kernel(
    units_ptr, pages_ptr, firsts_ptr, ends_ptr, more_ptr, width, max_pages, unit_stride, end_row, end_head,
    HEADS: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one KV head of one row, in one layer. width: slots that received."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    end = tl.minimum(tl.load(ends_ptr + row * end_row + head * end_head), width)
    live = (slot >= tl.load(firsts_ptr + row)) & (slot < end)
    page = tl.load(pages_ptr + row * max_pages + slot // PAGE, mask=live, other=0)
    place = units_ptr + page * unit_stride + head * PAGE + slot % PAGE
    more = tl.load(more_ptr + (row * HEADS + head) * width + slot, mask=live, other=0.0)
    tl.store(place, tl.load(place, mask=live, other=0.0) + more, mask=live)


@triton.jit(do_not_specialize=["width", "max_pages"])
def _hiding_kernel(
    units_ptr, pages_ptr, firsts_ptr, out_ptr, width, max_pages, unit_stride,
    HEADS: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The same of the bias."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < width
    page = tl.load(pages_ptr + row * max_pages + slot // PAGE, mask=there, other=0)
    score = tl.load(units_ptr + page * unit_stride + head * PAGE + slot % PAGE, mask=there, other=0.0)
    hidden = (score < 0) | (slot < tl.load(firsts_ptr + row))
    tl.store(out_ptr + (row * HEADS + head) * width + slot, tl.where(hidden, float("-inf"), 0.0), mask=there)


@triton.jit
def _lowest(
    units_ptr, pages_ptr, first, end, unit_stride, line, best, place, alive,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(lowest score, where it lies in the units, how many are alive) of these slots and those before."""
    for start in range(first, end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        there = slot < end
        page = tl.load(pages_ptr + slot // PAGE, mask=there, other=0)
        score = tl.load(units_ptr + page * unit_stride + line * PAGE + slot % PAGE, mask=there, other=-1.0)
        live = score >= 0
        low = tl.min(tl.where(live, score, float("inf")), 0)
        last = tl.max(tl.where(live & (score == low), slot, -1), 0)  # of equals the last
        if (last >= 0) & (low <= best):
            best = low
            place = tl.load(pages_ptr + last // PAGE) * unit_stride + line * PAGE + last % PAGE
        alive += tl.sum(live.to(tl.int32), 0)
    return best, place, alive


@triton.jit(do_not_specialize=["front_pages", "back_pages"])
def _strike_kernel(
    front_ptr, front_table, front_firsts, front_ends, front_pages, front_stride, front_row, front_layer, front_head,
    back_ptr, back_table, back_firsts, back_ends, back_pages, back_stride, back_row, back_layer, back_head, most_ptr,
    HEADS: tl.constexpr, FRONT: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """One head of one layer of one row."""
    line, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, head = line // HEADS, line % HEADS
    end = tl.load(front_ends + row * front_row + layer * front_layer + head * front_head)
    first = tl.load(front_firsts + row)
    none, best, alive = tl.full((), -1, tl.int64), tl.full((), float("inf"), tl.float32), tl.full((), 0, tl.int32)
    best, place, alive = _lowest(
        front_ptr, front_table + row * front_pages, first, end, front_stride, line, best, none, alive, FRONT, BLOCK
    )
    end = tl.load(back_ends + row * back_row + layer * back_layer + head * back_head)
    first = tl.load(back_firsts + row)
    _, behind, alive = _lowest(
        back_ptr, back_table + row * back_pages, first, end, back_stride, line, best, none, alive, BACK, BLOCK
    )
    if alive > tl.load(most_ptr + row):
        if behind >= 0:
            tl.store(back_ptr + behind, DEAD)
        else:
            tl.store(front_ptr + place, DEAD)


def grow(scores: ScorePages, layer: int, received: Tensor) -> None:
    """As `kept_scores.grow`."""
    num_rows, num_kv_heads, width = received.shape
    units, ends = scores.units[:, layer], scores.ends[:, layer]
    if width:
        _grow_kernel[(triton.cdiv(width, SLOTS), num_kv_heads, num_rows)](
            units, scores.pages, scores.firsts, ends, received.contiguous(), width, scores.pages.shape[1],
            units.stride(0), *ends.stride(),
            HEADS=num_kv_heads, PAGE=units.shape[2], SLOTS=SLOTS,
        )  # fmt: skip


def hiding(scores: ScorePages, layer: int) -> Tensor:
    """As `kept_scores.hiding`."""
    units, num_rows, width = scores.units[:, layer], len(scores.pages), scores.width
    out = torch.empty(num_rows, units.shape[1], width, dtype=torch.float32, device=units.device)
    _hiding_kernel[(triton.cdiv(width, SLOTS), units.shape[1], num_rows)](
        units, scores.pages, scores.firsts, out, width, scores.pages.shape[1], units.stride(0),
        HEADS=units.shape[1], PAGE=units.shape[2], SLOTS=SLOTS,
    )  # fmt: skip
    return out


def strike_lowest(front: ScorePages, back: ScorePages, most: Tensor) -> None:
    """As `kept_scores.strike_lowest`."""
    _, num_layers, num_kv_heads, _ = front.units.shape
    given = [
        (each.units, each.pages, each.firsts, each.ends, each.pages.shape[1], each.units.stride(0), *each.ends.stride())
        for each in (front, back)
    ]
    _strike_kernel[(num_layers * num_kv_heads, len(front.pages))](
        *given[0], *given[1], most,
        HEADS=num_kv_heads, FRONT=front.units.shape[3], BACK=back.units.shape[3], BLOCK=BLOCK, DEAD=DEAD,
    )  # fmt: skip
