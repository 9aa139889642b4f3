"""The best positions of each row on a GPU, a program a row. The twin is `top_positions`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Most scores that are looked at together."""


@triton.jit
def _keys(row_ptr, place, low, high):
    """Bits of the scores as unsigned numbers in the same order, 0 outside [low, high) (no score has that)."""
    live = (place >= low) & (place < high)
    score = tl.load(row_ptr + place, mask=live, other=0.0).to(tl.float32) + 0.0  # -0.0 is 0.0
    score = tl.where(score != score, float("-inf"), score)  # noqa: PLR0124 (NaN)
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(live, ordered, 0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["length", "width"])
def _select_kernel(
    scores_ptr, counts_ptr, lens_ptr, out_ptr, length, width, row_stride, protect_first, protect_last,
    HAS_COUNTS: tl.constexpr, HAS_LENS: tl.constexpr, HIGHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the bits of the last score that is taken, one after another; then all above it and its equals, in order."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * row_stride
    held = tl.minimum(tl.load(lens_ptr + row), length) if HAS_LENS else length
    wanted = tl.minimum(tl.load(counts_ptr + row), held) if HAS_COUNTS else held
    low = tl.minimum(protect_first, held)
    high = tl.maximum(held - protect_last, low)
    need = tl.maximum(tl.minimum(wanted, width) - low - (held - high), 0)

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
    scores: Tensor, width: int, counts: Tensor | None, lens: Tensor | None, protect_first: int, protect_last: int, higher: bool
) -> Tensor:
    """As `top_positions`, for at most float32; width: positions of a row of the result."""
    length = scores.shape[-1]
    rows = scores.reshape(-1, length)
    out = torch.empty(len(rows), width, dtype=torch.int32, device=scores.device)
    if len(rows):
        _select_kernel[(len(rows),)](
            rows, rows if counts is None else counts.contiguous(), rows if lens is None else lens.contiguous(), out,
            length, width, rows.stride(0), protect_first, protect_last,
            HAS_COUNTS=counts is not None, HAS_LENS=lens is not None,
            HIGHER=higher, BLOCK=min(BLOCK, triton.next_power_of_2(length)), num_warps=8,
        )  # fmt: skip
    return out.view(*scores.shape[:-1], width)
