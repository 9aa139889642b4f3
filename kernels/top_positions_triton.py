"""The best positions of each row on a GPU, a program a row. The twin is `top_positions`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Scores that are looked at together in rows that are too long to be held."""
HELD = 16384
"""Most scores of a row that a program holds in its registers; counts of them fit 15 bits."""


@triton.jit
def _keys(row_ptr, place, low, high):
    """Bits of the scores as unsigned numbers in the same order, 0 outside [low, high) (no score has that)."""
    live = (place >= low) & (place < high)
    score = tl.load(row_ptr + place, mask=live, other=0.0).to(tl.float32) + 0.0  # -0.0 is 0.0
    score = tl.where(score != score, float("-inf"), score)  # noqa: PLR0124 (NaN)
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(live, ordered, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _bounds(counts_ptr, lens_ptr, row, length, width, first, last, HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr):
    """Of one row: scores it has, the open ones [low, high), and how many of those are taken."""
    held = tl.minimum(tl.load(lens_ptr + row), length) if HAS_LENS else length
    wanted = tl.minimum(tl.load(counts_ptr + row), held) if HAS_COUNTS else held
    low = tl.minimum(first, held)
    high = tl.maximum(held - last, low)
    return held, low, high, tl.maximum(tl.minimum(wanted, width) - low - (held - high), 0)


@triton.jit(do_not_specialize=["length", "width"])
def _held_kernel(
    scores_ptr, counts_ptr, lens_ptr, values_ptr, out_ptr, picked_ptr, length, width, lines, row_stride, values_stride,
    protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_VALUES: tl.constexpr, HIGHER: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """One row, held in registers: the last score that is taken, two of its bits at a time, until just as many are as great as
    are wanted; then all above it and its equals, in order."""
    row = tl.program_id(0).to(tl.int64)
    held, low, high, need = _bounds(
        counts_ptr, lens_ptr, row, length, width, protect_first, protect_last, HAS_COUNTS, HAS_LENS
    )
    place = tl.arange(0, BLOCK)
    key = _keys(scores_ptr + row * row_stride, place, low, high)
    least = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1073741824, tl.uint32)
    while unit > 0:
        many = (key >= least + unit).to(tl.int64)
        many += (key >= least + 2 * unit).to(tl.int64) << 20
        many += (key >= least + 3 * unit).to(tl.int64) << 40
        total = tl.sum(many, 0)
        one, two, three = total & 1048575, (total >> 20) & 1048575, total >> 40
        steps = tl.where(three >= need, 3, tl.where(two >= need, 2, tl.where(one >= need, 1, 0)))
        found = tl.where(steps == 3, three, tl.where(steps == 2, two, tl.where(steps == 1, one, 0)))
        least += steps.to(tl.uint32) * unit
        unit = tl.where(found == need, 0, unit >> 2).to(tl.uint32)

    inside = (place >= low) & (place < high)
    above = (inside & (key > least) & (need > 0)).to(tl.int32)
    same = (inside & (key == least) & (need > 0)).to(tl.int32)
    packed = above + (same << 16)
    behind = tl.cumsum(packed, 0)
    total = tl.sum(packed, 0)
    before = behind - packed
    room = need - (total & 65535)
    skip = (total >> 16) - room if HIGHER else 0  # the first equals that are left out
    number = (before >> 16) - skip
    fits = (same > 0) & (number >= 0) & (number < room)
    rank = low + (before & 65535) + tl.minimum(tl.maximum(number, 0), room)
    rank = tl.where(place < low, place, tl.where(place >= high, low + need + place - high, rank))
    taken = (above > 0) | fits | ((place < held) & ~inside)
    tl.store(out_ptr + row * width + rank, place, mask=taken)
    if HAS_VALUES:
        value = tl.load(values_ptr + row // lines * values_stride + place, mask=taken)
        tl.store(picked_ptr + row * width + rank, value, mask=taken)
    behind_all = tl.arange(0, WIDTH_PAD)
    left = (behind_all >= low + need + held - high) & (behind_all < width)
    tl.store(out_ptr + row * width + behind_all, behind_all * 0 + length, mask=left)


@triton.jit(do_not_specialize=["length", "width"])
def _select_kernel(
    scores_ptr, counts_ptr, lens_ptr, out_ptr, length, width, row_stride, protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, HIGHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the bits of the last score that is taken, one after another; then all above it and its equals, in order."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * row_stride
    held, low, high, need = _bounds(
        counts_ptr, lens_ptr, row, length, width, protect_first, protect_last, HAS_COUNTS, HAS_LENS
    )
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 2147483648, tl.uint32)
    above = 0
    equal = 0
    for _ in range(32):
        trial = least | bit
        count = 0
        for first in range(0, held, BLOCK):
            count += tl.sum((_keys(row_ptr, first + tl.arange(0, BLOCK), low, high) >= trial).to(tl.int32), 0)
        least = tl.where((count >= need) & (need > 0), trial, least)
        bit = bit >> 1
    for first in range(0, held, BLOCK):
        key = _keys(row_ptr, first + tl.arange(0, BLOCK), low, high)
        above += tl.sum((key > least).to(tl.int32), 0)
        equal += tl.sum((key == least).to(tl.int32), 0)
    room = need - above
    skip = equal - room if HIGHER else 0  # the first equals that are left out

    written = 0
    equals = 0
    for first in range(0, held, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = (place >= low) & (place < high)
        key = _keys(row_ptr, place, low, high)
        same = (inside & (key == least)).to(tl.int32)
        number = equals + tl.cumsum(same, 0) - same
        fits = (same > 0) & (number >= skip) & (number < skip + room)
        taken = (inside & (((key > least) & (need > 0)) | fits)) | ((place < held) & ~inside)
        taken = taken.to(tl.int32)
        tl.store(out_ptr + row * width + written + tl.cumsum(taken, 0) - taken, place, mask=taken > 0)
        written += tl.sum(taken, 0)
        equals += tl.sum(same, 0)
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * width + place, place * 0 + length, mask=(place >= written) & (place < width))


def select_positions(
    scores: Tensor,
    width: int,
    counts: Tensor | None,
    lens: Tensor | None,
    protect_first: int,
    protect_last: int,
    higher: bool,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `top_positions`, for at most float32; width: positions of a row of the result. values: see `top_values`."""
    length = scores.shape[-1]
    rows = scores.reshape(-1, length)
    out = torch.empty(len(rows), width, dtype=torch.int32, device=scores.device)
    picked = None if values is None or length > HELD else torch.empty_like(out, dtype=values.dtype)
    given = [rows if each is None else each.contiguous() for each in (counts, lens)]
    shape = {"HAS_COUNTS": counts is not None, "HAS_LENS": lens is not None, "HIGHER": higher}
    block = triton.next_power_of_2(length)
    if length <= HELD and len(rows):
        _held_kernel[(len(rows),)](
            rows, *given, rows if values is None else values, out, out if picked is None else picked, length, width,
            1 if values is None else len(rows) // len(values), rows.stride(0), 0 if values is None else values.stride(0),
            protect_first, protect_last, HAS_VALUES=values is not None, BLOCK=block,
            WIDTH_PAD=triton.next_power_of_2(width), num_warps=max(1, min(32, block // 256)), **shape,
        )  # fmt: skip
    elif len(rows):
        _select_kernel[(len(rows),)](
            rows, *given, out, length, width, rows.stride(0), protect_first, protect_last, BLOCK=min(BLOCK, block),
            num_warps=8, **shape,
        )  # fmt: skip
    return out.view(*scores.shape[:-1], width), picked
