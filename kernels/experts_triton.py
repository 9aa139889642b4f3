"""Experts of an MLP in Triton: which ones a token goes to, rows grouped by expert on the device, a product for each group.

Nothing waits for the host and every grid depends on shapes alone, so a step that holds these can be replayed from a CUDA graph.
Each (token, slot) has a row of its own until the last sum, so results do not depend on the order in which programs run.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.block_fp8_triton import Terms, Tile, _whole, _widen, split_rows

_MOST_AT_ONCE = 4096  # rows that a program counts in one go


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, logits_row,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, ACTIVE: tl.constexpr, ACTIVE_PAD: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One token: softmax, then the largest, one after the other."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, COUNT_PAD)
    slot = tl.arange(0, ACTIVE_PAD)
    logits = tl.load(logits_ptr + token * logits_row + expert, mask=expert < COUNT, other=-float("inf")).to(tl.float32)
    share = tl.exp(logits - tl.max(logits, 0))
    share = tl.where(expert < COUNT, share / tl.sum(share, 0), -1.0)
    weights = tl.zeros((ACTIVE_PAD,), tl.float32)
    chosen = tl.zeros((ACTIVE_PAD,), tl.int32)
    for each in range(ACTIVE):
        best = tl.argmax(share, 0)
        weights = tl.where(slot == each, tl.max(share, 0), weights)
        chosen = tl.where(slot == each, best, chosen)
        share = tl.where(expert == best, -1.0, share)
    if NORMED:
        weights = weights / tl.sum(weights, 0)
    tl.store(weights_ptr + token * ACTIVE + slot, weights, mask=slot < ACTIVE)
    tl.store(experts_ptr + token * ACTIVE + slot, chosen, mask=slot < ACTIVE)


@triton.jit(do_not_specialize=["num_rows"])
def _group_kernel(experts_ptr, order_ptr, starts_ptr, num_rows, COUNT: tl.constexpr, SCAN: tl.constexpr):
    """One expert: where its rows begin, and which they are, in order."""
    expert = tl.program_id(0)
    before = tl.zeros((SCAN,), tl.int32)
    for at in range(0, num_rows, SCAN):
        row = at + tl.arange(0, SCAN)
        before += (tl.load(experts_ptr + row, mask=row < num_rows, other=COUNT) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts_ptr + expert, place)
    for at in range(0, num_rows, SCAN):
        row = at + tl.arange(0, SCAN)
        mine = tl.load(experts_ptr + row, mask=row < num_rows, other=COUNT) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + place + rank - 1, row, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    if expert == COUNT - 1:
        tl.store(starts_ptr + COUNT, place)


@triton.jit
def _add(total, tile, given, step, BLOCKS: tl.constexpr):
    """total `[outputs, rows]` plus a block's product. BLOCKS: weights have scales, this block's is `step`."""
    if BLOCKS:
        return total + tl.dot(_widen(tile, given.dtype), given, input_precision="ieee") * step
    else:  # noqa: RET505 - only one of two is compiled
        return tl.dot(tile, given, total, input_precision="ieee")


@triton.jit
def _step(scale, block, IN_SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """A block's scale; past the last it is that one again. It is asked for one block ahead: a product would wait for it."""
    if BLOCKS:
        return tl.load(scale + tl.minimum(block, IN_SIZE // 128 - 1))
    else:  # noqa: RET505 - only one of two is compiled
        return 1.0


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scale_ptr, order_ptr, starts_ptr, weight_ptr, scale_ptr, y_ptr, x_row,
    INNER: tl.constexpr, IN_SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's inner units, for some of its rows: silu(gate) * up. Rows are written in grouped order."""
    expert = tl.program_id(1)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    place, column, line = tl.arange(0, 128), tl.arange(0, ROWS * TERMS), tl.arange(0, ROWS)
    gate = weight_ptr + (expert.to(tl.int64) * (2 * INNER) + out)[:, None] * IN_SIZE + place[None, :]
    up = gate + INNER * IN_SIZE
    gate_scale = scale_ptr + (expert * (2 * INNER // 128) + tl.program_id(0) * OUTS // 128) * (IN_SIZE // 128)
    up_scale = gate_scale + (INNER // 128) * (IN_SIZE // 128)
    for first in range(start + tl.program_id(2) * ROWS, end, PARTS * ROWS):
        entry = first + column // TERMS
        live = (entry < end)[None, :]
        token = (tl.load(order_ptr + entry, mask=entry < end, other=0) // SLOTS).to(tl.int64)
        x = x_ptr + (token * TERMS + column % TERMS)[None, :] * x_row + place[:, None]
        gated = tl.zeros((OUTS, ROWS * TERMS), tl.float32)
        raised = tl.zeros((OUTS, ROWS * TERMS), tl.float32)
        gate_step, up_step = _step(gate_scale, 0, IN_SIZE, BLOCKS), _step(up_scale, 0, IN_SIZE, BLOCKS)
        for block in range(IN_SIZE // 128):
            given = tl.load(x + block * 128, mask=live, other=0.0)
            gate_tile, up_tile = tl.load(gate + block * 128), tl.load(up + block * 128)
            gate_next = _step(gate_scale, block + 1, IN_SIZE, BLOCKS)
            up_next = _step(up_scale, block + 1, IN_SIZE, BLOCKS)
            gated = _add(gated, gate_tile, given, gate_step, BLOCKS)
            raised = _add(raised, up_tile, given, up_step, BLOCKS)
            gate_step, up_step = gate_next, up_next
        row = first + line
        token = tl.load(order_ptr + row, mask=row < end, other=0) // SLOTS
        opened = _whole(gated, x_scale_ptr, token, row < end, OUTS, ROWS, TERMS)
        passed = _whole(raised, x_scale_ptr, token, row < end, OUTS, ROWS, TERMS)
        y = y_ptr + row[None, :].to(tl.int64) * INNER + out[:, None]
        tl.store(y, opened / (1 + tl.exp(-opened)) * passed, mask=(row < end)[None, :])


@triton.jit
def _down_kernel(
    x_ptr, x_scale_ptr, order_ptr, starts_ptr, share_ptr, weight_ptr, scale_ptr, y_ptr,
    OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's outputs, for some of its rows, times each row's share. Rows go where their token's slots are."""
    expert = tl.program_id(1)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    place, column, line = tl.arange(0, 128), tl.arange(0, ROWS * TERMS), tl.arange(0, ROWS)
    weight = weight_ptr + (expert.to(tl.int64) * OUT_SIZE + out)[:, None] * IN_SIZE + place[None, :]
    scale = scale_ptr + (expert * (OUT_SIZE // 128) + tl.program_id(0) * OUTS // 128) * (IN_SIZE // 128)
    for first in range(start + tl.program_id(2) * ROWS, end, PARTS * ROWS):
        entry = (first + column // TERMS).to(tl.int64)
        x = x_ptr + (entry * TERMS + column % TERMS)[None, :] * IN_SIZE + place[:, None]
        total = tl.zeros((OUTS, ROWS * TERMS), tl.float32)
        step = _step(scale, 0, IN_SIZE, BLOCKS)
        for block in range(IN_SIZE // 128):
            tile = tl.load(weight + block * 128)
            given = tl.load(x + block * 128, mask=(entry < end)[None, :], other=0.0)
            following = _step(scale, block + 1, IN_SIZE, BLOCKS)
            total = _add(total, tile, given, step, BLOCKS)
            step = following
        row = first + line
        made = _whole(total, x_scale_ptr, row, row < end, OUTS, ROWS, TERMS)
        slot = tl.load(order_ptr + row, mask=row < end, other=0)
        share = tl.load(share_ptr + slot, mask=row < end, other=0.0).to(tl.float32)
        y = y_ptr + slot[None, :].to(tl.int64) * OUT_SIZE + out[:, None]
        tl.store(y, made * share[None, :], mask=(row < end)[None, :])


def serves(x: Tensor, *sizes: int) -> bool:
    """Is this for the functions of this file? On a GPU, no wider than float32, sizes whole blocks."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and all(size % 128 == 0 for size in sizes)


def tuned(product: Literal["gate_up", "down"], num_rows: int, num_experts: int, dtype: torch.dtype, blocks: bool) -> Tile:
    """The tile for so many (token, slot) rows of a dtype, by measurement on an H200. blocks: weights are e4m3."""
    each = num_rows / num_experts
    parts = max(1, min(8, int(each / 128)))
    if dtype == torch.float32:
        return Tile(16, 32, 4, 2, parts=8)
    if each <= 12:
        return Tile(16, 64, 4, 3 if blocks else 2)
    if each <= 32:
        return Tile(32, 64, 4, 3)
    if not blocks:
        return Tile(128, 64, 8, 3, parts)
    return Tile(64, 128, 8, 4, parts) if product == "gate_up" else Tile(32, 128, 4, 4, parts)


def route(logits: Tensor, active: int, normed: bool) -> tuple[Tensor, Tensor]:
    """(experts, weights) of each token, see `experts.route`."""
    num_tokens, count = logits.shape
    weights = torch.empty(num_tokens, active, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, active, dtype=torch.int32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits, weights, chosen, logits.stride(0), COUNT=count, COUNT_PAD=triton.next_power_of_2(count),
        ACTIVE=active, ACTIVE_PAD=triton.next_power_of_2(active), NORMED=normed, num_warps=1,
    )  # fmt: skip
    return chosen, weights


def group(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(order, starts) of int32 experts `[num_tokens, active]`, see `experts.group`."""
    num_rows = chosen.numel()
    order = torch.empty(num_rows, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=chosen.device)
    scan = min(_MOST_AT_ONCE, max(64, triton.next_power_of_2(num_rows)))
    _group_kernel[(count,)](chosen, order, starts, num_rows, COUNT=count, SCAN=scan)
    return order, starts


def gate_up(x: Tensor, order: Tensor, starts: Tensor, weight: Tensor, scale: Tensor | None, tile: Tile | None = None) -> Tensor:
    """silu(gate) * up `[num_rows, inner]` in grouped order, of x `[num_tokens, in_size]` and weight
    `[num_experts, 2 * inner, in_size]`."""
    num_experts, twice, in_size = weight.shape
    num_rows, inner = order.shape[0], twice // 2
    tile = tile or tuned("gate_up", num_rows, num_experts, x.dtype, scale is not None)
    given = _given(x, scale)
    y = torch.empty(num_rows, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(inner // tile.outs, num_experts, tile.parts)](
        *given, order, starts, weight, weight if scale is None else scale, y, given.codes.stride(-2),
        INNER=inner, IN_SIZE=in_size, SLOTS=num_rows // x.shape[0], ROWS=tile.rows, OUTS=tile.outs, PARTS=tile.parts,
        BLOCKS=scale is not None, TERMS=given.codes.dim() - 1, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def down(
    x: Tensor, order: Tensor, starts: Tensor, shares: Tensor, weight: Tensor, scale: Tensor | None, tile: Tile | None = None
) -> Tensor:
    """`[num_tokens, active, out_size]`: each slot's output times its share `[num_tokens, active]`, of x `[num_rows, in_size]`
    in grouped order and weight `[num_experts, out_size, in_size]`."""
    num_experts, out_size, in_size = weight.shape
    tile = tile or tuned("down", x.shape[0], num_experts, x.dtype, scale is not None)
    given = _given(x, scale)
    y = torch.empty(*shares.shape, out_size, dtype=x.dtype, device=x.device)
    _down_kernel[(out_size // tile.outs, num_experts, tile.parts)](
        *given, order, starts, shares, weight, weight if scale is None else scale, y,
        OUT_SIZE=out_size, IN_SIZE=in_size, ROWS=tile.rows, OUTS=tile.outs, PARTS=tile.parts,
        BLOCKS=scale is not None, TERMS=given.codes.dim() - 1, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _given(x: Tensor, scale: Tensor | None) -> Terms:
    """x as a product takes it: two terms of half precision for e4m3 weights, else as it is (and no scale)."""
    return Terms(x, x) if scale is None or x.dtype == torch.float32 else split_rows(x)
