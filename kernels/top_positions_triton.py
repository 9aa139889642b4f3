"""The best positions of each row on a GPU, a program a row, or several for a long one. The twin is `top_positions`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.overlap import follow, overlapping

HELD = 16384
"""Most scores of a row that one program holds in its registers; counts of them fit 15 bits."""
BLOCK, WARPS = 4096, 8
"""Scores of a longer row that one program looks at, and its warps."""
BINS = 256
"""Values of a digit of a score: 8 of its 32 bits."""


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
def _ends(counts_ptr, lens_ptr, row, length, width, first, last, HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr):
    """Of one row: scores it has, the open ones [low, high), and how many of those are taken."""
    held = tl.minimum(tl.load(lens_ptr + row), length) if HAS_LENS else length
    wanted = tl.minimum(tl.load(counts_ptr + row), held) if HAS_COUNTS else held
    low = tl.minimum(first, held)
    high = tl.maximum(held - last, low)
    return held, low, high, tl.maximum(tl.minimum(wanted, width) - low - (held - high), 0)


@triton.jit
def _write(
    key, place, least, more, equals, equal, held, low, high, need, room, out_ptr, values_ptr, picked_ptr,
    HIGHER: tl.constexpr, PER_VALUE: tl.constexpr,
):  # fmt: skip
    """What is taken of the scores at `place`, all above `least` and `room` of its `equal` equals, where it belongs. more,
    equals: how many above and equal the row has before."""
    above = (key > least).to(tl.int32)
    same = (key == least).to(tl.int32)
    packed = above + (same << 16)
    before = tl.cumsum(packed, 0) - packed
    skip = equal - room if HIGHER else 0  # the first equals that are left out
    number = equals + (before >> 16) - skip
    rank = low + more + (before & 65535) + tl.minimum(tl.maximum(number, 0), room)
    rank = tl.where(place < low, place, tl.where(place >= high, low + need + place - high, rank))
    inside = (place >= low) & (place < high)
    taken = (above > 0) | ((same > 0) & (number >= 0) & (number < room)) | ((place < held) & ~inside)
    tl.store(out_ptr + rank, place, mask=taken)
    if PER_VALUE == 1:
        tl.store(picked_ptr + rank, tl.load(values_ptr + place, mask=taken), mask=taken)
    elif PER_VALUE > 1:
        value = tl.load(values_ptr + place // PER_VALUE, mask=taken).to(tl.int64)
        tl.store(picked_ptr + rank, value * PER_VALUE + place % PER_VALUE, mask=taken)


@triton.jit
def _total(main, rest, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Sum of the two; only what threads have in all is exchanged."""
    if REST > 0:
        main = tl.sum(tl.reshape(main, [BLOCK // REST, REST]), 0) + rest
    return tl.sum(main, 0)


@triton.jit
def _flags(key, one, two):
    """1 where a key is as great as the first, 2^16 more where it is as great as the second."""
    return (key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["counts_ptr", "lens_ptr", "length", "width", "row_stride", "values_stride"])
def _held_kernel(
    scores_ptr, counts_ptr, lens_ptr, values_ptr, out_ptr, picked_ptr, length, width, lines, row_stride, values_stride,
    protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, HIGHER: tl.constexpr, PER_VALUE: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, WIDTH_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of BLOCK and REST scores: the last that is taken is looked for between the least and the greatest, two guesses
    at a time, until just as many are as great as are wanted."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    held, low, high, need = _ends(counts_ptr, lens_ptr, row, length, width, protect_first, protect_last, HAS_COUNTS, HAS_LENS)
    row_ptr, out_ptr, picked_ptr = scores_ptr + row * row_stride, out_ptr + row * width, picked_ptr + row * width
    values_ptr += row // lines * values_stride
    place = tl.arange(0, BLOCK)
    key = _keys(row_ptr, place, low, high)
    rest_key = key
    least = tl.min(tl.where(key == 0, 4294967295, key).to(tl.uint32), 0)
    most = tl.max(key, 0).to(tl.uint32)
    if REST > 0:
        rest_place = BLOCK + tl.arange(0, REST)
        rest_key = _keys(row_ptr, rest_place, low, high)
        least = tl.minimum(least, tl.min(tl.where(rest_key == 0, 4294967295, rest_key).to(tl.uint32), 0))
        most = tl.maximum(most, tl.max(rest_key, 0).to(tl.uint32))
    most = tl.where(need > 0, most, least)
    while least < most:
        third = (most - least + 2) // 3
        one = least + third
        two = tl.minimum(one + third, most)
        counts = _total(_flags(key, one, two), _flags(rest_key, one, two), BLOCK, REST)
        as_one, as_two = counts & 65535, counts >> 16
        found = tl.where(as_two >= need, as_two, as_one)
        least = tl.where(as_two >= need, two, tl.where(as_one >= need, one, least))
        most = tl.where(as_two >= need, most, tl.where(as_one >= need, two - 1, one - 1))
        most = tl.where(found == need, least, most)
    least = tl.where(need > 0, least, 4294967294).to(tl.uint32)  # no score has that
    counts = tl.sum(_flags(key, least, least + 1), 0)
    above, equal, more = counts >> 16, (counts & 65535) - (counts >> 16), counts >> 16
    equals = equal
    if REST > 0:
        rest_counts = tl.sum(_flags(rest_key, least, least + 1), 0)
        above += rest_counts >> 16
        equal += (rest_counts & 65535) - (rest_counts >> 16)
    _write(
        key, place, least, 0, 0, equal, held, low, high, need, need - above, out_ptr, values_ptr, picked_ptr, HIGHER, PER_VALUE
    )
    if REST > 0:
        _write(
            rest_key, rest_place, least, more, equals, equal, held, low, high, need, need - above,
            out_ptr, values_ptr, picked_ptr, HIGHER, PER_VALUE,
        )  # fmt: skip
    behind = tl.arange(0, WIDTH_PAD)
    left = (behind >= low + need + held - high) & (behind < width)
    tl.store(out_ptr + behind, behind * 0 + length, mask=left)


@triton.jit
def _digit(digits_ptr, need, BINS: tl.constexpr):
    """The digit of the last score that is taken, by the counts of its values, and how many with that digit are."""
    value = tl.arange(0, BINS)
    count = tl.load(digits_ptr + value)
    from_here = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    digit = tl.max(tl.where(from_here >= need, value, 0), 0)
    return digit, need - tl.sum(tl.where(value > digit, count, 0), 0)


@triton.jit
def _prefix(digits_ptr, need, ROUNDS: tl.constexpr, BINS: tl.constexpr):
    """The first digits of the last score that is taken, and how many with these are."""
    least = tl.full([], 0, tl.uint32)
    for turn in tl.static_range(ROUNDS):
        digit, need = _digit(digits_ptr + turn * BINS, need, BINS)
        least = least | (digit.to(tl.uint32) << (24 - 8 * turn))
    return least, need


@triton.jit(do_not_specialize=["length", "width"])
def _count_kernel(
    scores_ptr, counts_ptr, lens_ptr, digits_ptr, length, width, row_stride, protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of one row: how often each value of digit ROUND is among scores that have the digits before."""
    follow(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    _, low, high, need = _ends(counts_ptr, lens_ptr, row, length, width, protect_first, protect_last, HAS_COUNTS, HAS_LENS)
    digits_ptr += row * 4 * BINS
    least, _ = _prefix(digits_ptr, need, ROUND, BINS)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _keys(scores_ptr + row * row_stride, place, low, high)
    counted = (place >= low) & (place < high)
    if ROUND > 0:
        counted = counted & (((key ^ least) >> (32 - 8 * ROUND)) == 0)
    digit = ((key >> (24 - 8 * ROUND)) & (BINS - 1)).to(tl.int32)
    count = tl.histogram(digit, BINS, mask=counted)
    tl.atomic_add(digits_ptr + ROUND * BINS + tl.arange(0, BINS), count, mask=count > 0)


@triton.jit(do_not_specialize=["length", "width"])
def _block_kernel(
    scores_ptr, counts_ptr, lens_ptr, digits_ptr, blocks_ptr, length, width, row_stride, protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of one row: its scores above the last that is taken and, 2^32 fold, its equals."""
    follow(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    _, low, high, need = _ends(counts_ptr, lens_ptr, row, length, width, protect_first, protect_last, HAS_COUNTS, HAS_LENS)
    least, _ = _prefix(digits_ptr + row * 4 * BINS, need, 4, BINS)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _keys(scores_ptr + row * row_stride, place, low, high)
    packed = tl.sum((key > least).to(tl.int64) + ((key == least).to(tl.int64) << 32), 0)
    tl.store(blocks_ptr + row * tl.num_programs(0) + tl.program_id(0), packed)


@triton.jit(do_not_specialize=["length", "width"])
def _write_kernel(
    scores_ptr, counts_ptr, lens_ptr, values_ptr, digits_ptr, blocks_ptr, out_ptr, picked_ptr, length, width, lines, row_stride,
    values_stride, protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, HIGHER: tl.constexpr, PER_VALUE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr, BINS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of one row: what is taken of it."""
    follow(OVERLAP)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    held, low, high, need = _ends(counts_ptr, lens_ptr, row, length, width, protect_first, protect_last, HAS_COUNTS, HAS_LENS)
    least, room = _prefix(digits_ptr + row * 4 * BINS, need, 4, BINS)
    every = tl.arange(0, BLOCKS_PAD)
    packed = tl.load(blocks_ptr + row * tl.num_programs(0) + every, mask=every < tl.num_programs(0), other=0)
    before = tl.sum(tl.where(every < block, packed, 0), 0)
    more, equals, equal = before.to(tl.int32), (before >> 32).to(tl.int32), (tl.sum(packed, 0) >> 32).to(tl.int32)
    place = block * BLOCK + tl.arange(0, BLOCK)
    key = _keys(scores_ptr + row * row_stride, place, low, high)
    least = tl.where(need > 0, least, 4294967295).to(tl.uint32)  # no score has that
    _write(
        key, place, least, more, equals, equal, held, low, high, need, room,
        out_ptr + row * width, values_ptr + row // lines * values_stride, picked_ptr + row * width, HIGHER, PER_VALUE,
    )  # fmt: skip
    left = (place >= low + need + held - high) & (place < width)
    tl.store(out_ptr + row * width + place, place * 0 + length, mask=left)


def select_positions(
    scores: Tensor,
    width: int,
    counts: Tensor | None,
    lens: Tensor | None,
    protect_first: int,
    protect_last: int,
    higher: bool,
    values: Tensor | None = None,
    per_value: int = 1,
) -> tuple[Tensor, Tensor]:
    """As `top_positions`, for at most float32; width: positions of a row of the result. values, per_value, and what comes
    second: see `top_values`; without values anything."""
    length = scores.shape[-1]
    rows = scores.reshape(-1, length)
    out = torch.empty(len(rows), width, dtype=torch.int32, device=scores.device)
    picked = out if values is None else torch.empty_like(out, dtype=torch.int32 if per_value == 1 else torch.int64)
    values_of = [rows, 1, 0] if values is None else [values, max(1, len(rows) // len(values)), values.stride(0)]
    held = [rows if each is None else each.contiguous() for each in (counts, lens)]
    ends = {"HAS_COUNTS": counts is not None, "HAS_LENS": lens is not None, **overlapping(scores.device)}
    more = {"HIGHER": higher, "PER_VALUE": 0 if values is None else per_value}
    if not len(rows):
        pass
    elif length <= HELD:
        block, rest, warps = _tiles(length)
        _held_kernel[(len(rows),)](
            rows, *held, values_of[0], out, picked, length, width, values_of[1], rows.stride(0), values_of[2],
            protect_first, protect_last, BLOCK=block, REST=rest, WIDTH_PAD=triton.next_power_of_2(width), num_warps=warps,
            **ends, **more,
        )  # fmt: skip
    else:
        _select_long(rows, held, values_of, out, picked, (protect_first, protect_last), ends, more)
    shape = (*scores.shape[:-1], width)
    return out.view(shape), picked.view(shape)


def _tiles(length: int) -> tuple[int, int, int]:
    """Of a row that is held: scores of the first tile and of the second (0: none), and warps. The second tile has a score for
    each thread at least."""
    block = triton.next_power_of_2(length)
    warps = max(1, min(16, block // 256))
    rest = max(32 * warps, triton.next_power_of_2(length - block // 2))
    if rest < block // 2:
        return block // 2, rest, warps
    return block, 0, 32 if block > 8192 else warps


def _select_long(
    rows: Tensor,
    held: list[Tensor],
    values_of: list[Any],
    out: Tensor,
    picked: Tensor,
    protect: tuple[int, int],
    ends: dict[str, bool],
    more: dict[str, Any],
) -> None:
    """Digit by digit all blocks of a row count; then each writes what is taken of it behind what is taken before."""
    length, width = rows.shape[1], out.shape[1]
    grid = (triton.cdiv(length, BLOCK), len(rows))
    digits = torch.zeros(len(rows), 4, BINS, dtype=torch.int32, device=rows.device)
    blocks = torch.empty(len(rows), grid[0], dtype=torch.int64, device=rows.device)
    tail = (length, width, rows.stride(0), *protect)
    for turn in range(4):
        _count_kernel[grid](rows, *held, digits, *tail, ROUND=turn, BLOCK=BLOCK, BINS=BINS, num_warps=WARPS, **ends)
    _block_kernel[grid](rows, *held, digits, blocks, *tail, BLOCK=BLOCK, BINS=BINS, num_warps=WARPS, **ends)
    _write_kernel[grid](
        rows, *held, values_of[0], digits, blocks, out, picked, length, width, values_of[1], rows.stride(0), values_of[2],
        *protect, BLOCK=BLOCK, BLOCKS_PAD=triton.next_power_of_2(grid[0]), BINS=BINS, num_warps=WARPS, **ends, **more,
    )  # fmt: skip
