"""Linear maps by e4m3 weights with a scale for each block of 128 x 128, in Triton: the published layout of FP8 checkpoints.

For few rows the weights' bytes are the cost: each is read once, and a block's product takes its scale when it is added to the
sum, in float32. Codes are widened in registers for activations as they are; where that would cost more than the bytes,
activations become two e4m3 terms and the matrix units take both operands as they lie.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Inputs, and outputs, that share a scale."""


class Tile(NamedTuple):
    """Of one program: rows of the input, outputs; warps, and turns of its loop whose weights are on their way. parts: programs
    that share the rows of an expert; turn: blocks of inputs in a turn, a divisor of all."""

    rows: int
    outs: int
    warps: int
    stages: int
    parts: int = 1
    turn: int = 1


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
def _terms_kernel(x_ptr, terms_ptr, scale_ptr, x_row, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    """One row."""
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


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, num_rows, x_row,
    OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, TURN: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """A tile of outputs of a tile of rows. Weights are the product's left side, so that few rows fill the matrix units."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = (row < num_rows)[None, :]
    place = tl.arange(0, 128)
    weight = weight_ptr + out[:, None].to(tl.int64) * IN_SIZE + place[None, :]
    x = x_ptr + row[None, :].to(tl.int64) * x_row + place[:, None]
    scale = scale_ptr + (tl.program_id(0) * OUTS // 128) * (IN_SIZE // 128)
    total = tl.zeros((OUTS, ROWS), tl.float32)
    step = tl.load(scale)  # one ahead of its product, which would wait for it otherwise
    for turn in range(IN_SIZE // 128 // TURN):
        for each in tl.static_range(TURN):
            block = turn * TURN + each
            tile = tl.load(weight + block * 128)
            given = tl.load(x + block * 128, mask=live, other=0.0)
            following = tl.load(scale + tl.minimum(block + 1, IN_SIZE // 128 - 1))
            total += tl.dot(_widen(tile, given.dtype), given, input_precision="ieee") * step
            step = following
    if BIASED:
        total += tl.load(bias_ptr + out).to(tl.float32)[:, None]
    tl.store(y_ptr + row[None, :].to(tl.int64) * OUT_SIZE + out[:, None], total, mask=live)


def serves(x: Tensor, out_size: int) -> bool:
    """Is this for the functions of this file? On a GPU, no wider than float32, whole blocks of inputs and tiles of outputs."""
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and known and x.shape[-1] % BLOCK == 0 and out_size % 32 == 0 and x.stride(-1) == 1


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
    _terms_kernel[(num_rows,)](x, codes, scale, x.stride(0), SIZE=size, SIZE_PAD=triton.next_power_of_2(size))
    return Terms(codes, scale)


def tuned(num_rows: int, out_size: int, in_size: int) -> Tile:
    """The tile for so many rows, outputs and inputs, by measurement on an H200: few outputs are spread over many programs."""
    blocks = in_size // BLOCK
    few, wide = num_rows <= 16, out_size > 4096
    if few and not (wide and out_size % 64 == 0):
        return Tile(16, 16, 2, 3, turn=gcd(blocks, 4))
    outs = 64 if out_size % 64 == 0 else 32
    if num_rows > 64 and wide and out_size % 128 == 0:
        return Tile(64, 128, 8, 3)
    return Tile(16 if few else 64 if wide and num_rows > 32 else 32, outs, 4, 3, turn=gcd(blocks, 2))


def few_rows(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """`[num_rows, out_size]`, see `block_linear`. out_size a multiple of the tile's outputs, in_size of BLOCK."""
    num_rows, out_size = x.shape[0], weight.shape[0]
    tile = tile or tuned(num_rows, out_size, x.shape[1])
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    _few_rows_kernel[(out_size // tile.outs, triton.cdiv(num_rows, tile.rows))](
        x, weight, scale, scale if bias is None else bias, y, num_rows, x.stride(0),
        OUT_SIZE=out_size, IN_SIZE=x.shape[1], ROWS=tile.rows, OUTS=tile.outs, TURN=tile.turn,
        BIASED=bias is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
