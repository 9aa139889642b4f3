"""What products by block-FP8 weights share in Triton: how their programs are cut, and what becomes of codes and of rows.

Codes are widened in registers for rows as they are; where that would cost more than the weights' bytes, rows become two e4m3
terms and the matrix units take both operands as they lie.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.overlap import follow, overlapping


class Tile(NamedTuple):
    """Of one program: rows of the input, outputs; warps, and turns of its loop whose weights are on their way. parts: programs
    that share the rows of an expert."""

    rows: int
    outs: int
    warps: int
    stages: int
    parts: int = 1


@triton.jit
def _widen(codes, dtype: tl.constexpr):
    """e4m3 in a wider dtype, by way of float32: to bfloat16 the straight conversion has a quarter of the rate that it needs."""
    if dtype == codes.dtype:
        return codes
    return codes.to(tl.float32).to(dtype)


@triton.jit
def _nearest(x):
    """float32 within 448, rounded to values of e4m3, to even at half."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # three bits of mantissa
    small = (x + 24576.0) - 24576.0  # below 2**-6 they are multiples of 2**-9
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def _whole(total, scale_ptr, row, live, OUTS: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr):
    """`[OUTS, ROWS]` of `[OUTS, ROWS * TERMS]`: two terms of a row lie side by side, see `Terms`."""
    if TERMS == 2:
        first, second = tl.split(tl.reshape(total, [OUTS, ROWS, 2]))
        scale = tl.load(scale_ptr + row, mask=live, other=0.0)
        return (first + second * 0.0625) * scale[None, :]
    else:  # noqa: RET505 - only one of two is compiled
        return total


@triton.jit
def _terms_kernel(x_ptr, terms_ptr, scale_ptr, x_row, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, OVERLAP: tl.constexpr):
    """One row."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE_PAD)
    x = tl.load(x_ptr + row * x_row + place, mask=place < SIZE, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / 448.0
    x = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    first = _nearest(x)
    second = _nearest((x - first) * 16.0)
    terms = terms_ptr + row * (2 * SIZE) + place
    tl.store(terms, first.to(terms_ptr.dtype.element_ty), mask=place < SIZE)
    tl.store(terms + SIZE, second.to(terms_ptr.dtype.element_ty), mask=place < SIZE)
    tl.store(scale_ptr + row, scale)


class Terms(NamedTuple):
    """Rows as two e4m3 terms: (codes[:, 0] + codes[:, 1] / 16) * scale. codes: `[num_rows, 2, size]`, scale: float32
    `[num_rows]`."""

    codes: Tensor
    scale: Tensor


def split_rows(x: Tensor) -> Terms:
    """Of x `[num_rows, size]`. Values come back within 2**-8 of their size, as bfloat16 has it within 2**-9, or within 2**-23
    of the row's largest."""
    num_rows, size = x.shape
    codes = torch.empty(num_rows, 2, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    pad = triton.next_power_of_2(size)
    _terms_kernel[(num_rows,)](x, codes, scale, x.stride(0), SIZE=size, SIZE_PAD=pad, **overlapping(x.device))
    return Terms(codes, scale)
