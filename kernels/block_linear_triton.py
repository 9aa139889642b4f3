"""Linear maps of few rows by block-FP8 weights on a GPU: codes go by once, at the speed of memory. The twin is `block_linear`.

A program has a few outputs, and all inputs or a share of them. It asks for weights, which no kernel writes, before it waits
for the kernel before. Codes are widened in registers; a block's product takes its scale when it is added to the sum, in
float32. A row's sums are made in one order, whatever the other rows are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentkv.kernels.block_fp8_triton import _whole, _widen, split_rows
from agentkv.kernels.linear_triton import _sum_kernel, shape_name
from agentkv.kernels.overlap import follow, overlapping

BLOCK = 128
"""Inputs, and outputs, that share a scale."""
TABLE = Path(__file__).with_name("tuned") / "linear_block_fp8.json"
"""By name of a GPU and shape, see `shape_name`, and by the most rows that it is for, the tile that was fastest there."""
ALIKE = 16
"""Up to so many rows are served by one tile."""
_WIDE = 8192  # so many outputs fill the GPU with programs of 64
_ENOUGH = 160  # programs that fill an H200
_SUMMED = 1024  # results of a program that adds shares


class Tile(NamedTuple):
    """How the work is cut. rows: of the input in a program; outs: rows of the weight in it, at most BLOCK; ways: blocks of
    inputs side by side, each with a product of its own, summed in the end; stages: turns whose weights are on their way, or 0:
    all of a program's weights are; warps; split: programs that share the inputs, whose sums a second kernel adds; turn: blocks
    of a turn with one way, a divisor of a program's; terms: are rows made two e4m3 terms first, for one way?"""

    rows: int
    outs: int
    ways: int
    stages: int
    warps: int
    split: int = 1
    turn: int = 1
    terms: bool = False


@triton.jit
def _store(total, y_ptr, bias_ptr, out, row, share, num_rows, out_size, BIASED: tl.constexpr):
    """total `[outputs, rows]`, of a share of the inputs."""
    if BIASED:
        total += tl.load(bias_ptr + out).to(tl.float32)[:, None]
    target = y_ptr + (share * num_rows + row).to(tl.int64)[None, :] * out_size + out[:, None]
    tl.store(target, total, mask=(row < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows", "count"])
def _held_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, num_rows, x_row, out_size, in_size, count,
    ROWS: tl.constexpr, OUTS: tl.constexpr, WAYS: tl.constexpr, TURNS: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`count` blocks of inputs, whose codes are all asked for at once and held in registers."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    share, place, way = tl.program_id(1), tl.arange(0, 128), tl.arange(0, WAYS)
    end = tl.minimum((share + 1) * count, in_size // 128)
    weight = weight_ptr + out[None, :, None].to(tl.int64) * in_size + place[None, None, :]
    scale = scale_ptr + (tl.program_id(0) * OUTS // 128) * (in_size // 128)
    if OVERLAP:
        gdc_launch_dependents()
    tiles, steps = (), ()
    for turn in tl.static_range(TURNS):
        block = share * count + turn * WAYS + way
        there = block < end
        codes = tl.load(weight + (block * 128)[:, None, None], mask=there[:, None, None], other=0.0)
        tiles += (codes,)  # type: ignore[assignment]
        steps += (tl.load(scale + block, mask=there, other=0.0),)  # type: ignore[assignment]
    if OVERLAP:
        gdc_wait()
    x = x_ptr + row[None, None, :].to(tl.int64) * x_row + place[None, :, None]
    sums = tl.zeros((WAYS, OUTS, ROWS), tl.float32)
    for turn in tl.static_range(TURNS):
        block = share * count + turn * WAYS + way
        live = (block < end)[:, None, None] & (row < num_rows)[None, None, :]
        given = tl.load(x + (block * 128)[:, None, None], mask=live, other=0.0)
        sums += tl.dot(_widen(tiles[turn], given.dtype), given, input_precision="ieee") * steps[turn][:, None, None]
    _store(tl.sum(sums, 0), y_ptr, bias_ptr, out, row, share, num_rows, out_size, BIASED)


@triton.jit(do_not_specialize=["num_rows", "count"])
def _ways_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, num_rows, x_row, out_size, in_size, count,
    ROWS: tl.constexpr, OUTS: tl.constexpr, WAYS: tl.constexpr, STAGES: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`count` blocks of inputs, WAYS of them at a time; those of the next turns are on their way. A block's scale is asked for
    one turn ahead of its product, which would wait for it."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    share, place, way = tl.program_id(1), tl.arange(0, 128), tl.arange(0, WAYS)
    first = share * count
    end = tl.minimum(first + count, in_size // 128)
    weight = weight_ptr + out[None, :, None].to(tl.int64) * in_size + place[None, None, :]
    scale = scale_ptr + (tl.program_id(0) * OUTS // 128) * (in_size // 128)
    step = tl.load(scale + first + way, mask=first + way < end, other=0.0)
    follow(OVERLAP)
    x = x_ptr + row[None, None, :].to(tl.int64) * x_row + place[None, :, None]
    sums = tl.zeros((WAYS, OUTS, ROWS), tl.float32)
    for at in tl.range(first, end, WAYS, num_stages=STAGES):
        block = at + way
        there = (block < end)[:, None, None]
        codes = tl.load(weight + (block * 128)[:, None, None], mask=there, other=0.0)
        live = there & (row < num_rows)[None, None, :]
        given = tl.load(x + (block * 128)[:, None, None], mask=live, other=0.0)
        following = tl.load(scale + block + WAYS, mask=block + WAYS < end, other=0.0)
        sums += tl.dot(_widen(codes, given.dtype), given, input_precision="ieee") * step[:, None, None]
        step = following
    _store(tl.sum(sums, 0), y_ptr, bias_ptr, out, row, share, num_rows, out_size, BIASED)


@triton.jit(do_not_specialize=["num_rows", "count"])
def _turns_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, num_rows, x_row, out_size, in_size, count,
    ROWS: tl.constexpr, OUTS: tl.constexpr, TURN: tl.constexpr, STAGES: tl.constexpr, TERMS: tl.constexpr,
    BIASED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The same, one block after the other, TURN of them in a turn. TERMS: of a row, see `block_fp8_triton.Terms`."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * (ROWS * TERMS) + tl.arange(0, ROWS * TERMS)
    share, place = tl.program_id(1), tl.arange(0, 128)
    first = share * count
    end = tl.minimum(first + count, in_size // 128)
    weight = weight_ptr + out[:, None].to(tl.int64) * in_size + place[None, :]
    scale = scale_ptr + (tl.program_id(0) * OUTS // 128) * (in_size // 128)
    step = tl.load(scale + first)
    follow(OVERLAP)
    x = x_ptr + column[None, :].to(tl.int64) * x_row + place[:, None]
    live = (column < num_rows * TERMS)[None, :]
    total = tl.zeros((OUTS, ROWS * TERMS), tl.float32)
    for at in tl.range(first, end, TURN, num_stages=STAGES):
        for each in tl.static_range(TURN):
            block = at + each
            codes = tl.load(weight + block * 128)
            given = tl.load(x + block * 128, mask=live, other=0.0)
            following = tl.load(scale + tl.minimum(block + 1, end - 1))
            total += tl.dot(_widen(codes, given.dtype), given, input_precision="ieee") * step
            step = following
    made = _whole(total, x_scale_ptr, row, row < num_rows, OUTS, ROWS, TERMS)
    _store(made, y_ptr, bias_ptr, out, row, share, num_rows, out_size, BIASED)


def serves(x: Tensor, out_size: int) -> bool:
    """Is this for `few_rows`? On a GPU, no wider than float32, whole blocks of inputs and tiles of outputs."""
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and known and x.shape[-1] % BLOCK == 0 and out_size % 32 == 0 and x.stride(-1) == 1


def tile_for(x: Tensor, weight: Tensor) -> Tile:
    """How this GPU does it best for so many rows; where nobody has measured the shape, what does for any."""
    measured = _tiles(weight.device).get(shape_name(*weight.shape), {}) if x.dtype.itemsize == 2 else {}
    return next((tile for most, tile in measured.items() if len(x) <= most), None) or usual(x, weight.shape[0])


def usual(x: Tensor, out_size: int) -> Tile:
    """What does for any shape, by measurement of four on an H200. float32 leaves room for fewer stages."""
    num_rows, outs = len(x), 64 if out_size % 64 == 0 else 32
    if num_rows <= ALIKE:
        stages = 5 if x.dtype.itemsize == 2 else 3
        return Tile(8, outs, 1, 3, 4) if out_size >= _WIDE else Tile(8, 16, 4, stages, 4)
    rows = 32 if num_rows <= 32 else 64
    programs = out_size // outs * triton.cdiv(num_rows, rows)
    return Tile(rows, outs, 1, 3, 4, max(1, min(_ENOUGH // programs, 6)))


@cache
def _tiles(device: torch.device) -> dict[str, dict[int, Tile]]:
    """By shape, and by the most rows, what the table has for a GPU; few rows first."""
    if device.type != "cuda":
        return {}
    found = json.loads(TABLE.read_text()).get(torch.cuda.get_device_name(device), {})
    return {shape: {int(most): Tile(**tile) for most, tile in tiles.items()} for shape, tiles in found.items()}


def few_rows(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """`[num_rows, out_size]`, see `block_linear`. out_size is a multiple of the tile's outputs, in_size of BLOCK. Up to ALIKE
    rows, a row's result is the same bits for any number of them."""
    num_rows, (out_size, in_size) = len(x), weight.shape
    tile = tile or tile_for(x, weight)
    rows = ALIKE if tile.rows < num_rows <= ALIKE else tile.rows
    count = triton.cdiv(in_size // BLOCK, tile.split)
    split = triton.cdiv(in_size // BLOCK, count)  # no share is empty
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    parts = y if split == 1 else torch.empty(split, num_rows, out_size, dtype=torch.float32, device=x.device)
    added, options = scale if bias is None else bias, overlapping(x.device)
    grid = (out_size // tile.outs, split, triton.cdiv(num_rows, rows))
    cut = {"ROWS": rows, "OUTS": tile.outs, "BIASED": bias is not None and split == 1, "num_warps": tile.warps}
    given, sizes = (x, weight, scale, added, parts, num_rows), (out_size, in_size, count)
    if tile.stages == 0:
        turns = triton.cdiv(count, tile.ways)
        _held_kernel[grid](*given, x.stride(0), *sizes, WAYS=tile.ways, TURNS=turns, **cut, **options)
    elif tile.ways > 1:
        _ways_kernel[grid](*given, x.stride(0), *sizes, WAYS=tile.ways, STAGES=tile.stages, **cut, **options)
    else:
        codes, x_scale = split_rows(x) if tile.terms else (x, scale)
        _turns_kernel[grid](
            codes, x_scale, *given[1:], in_size if tile.terms else x.stride(0), *sizes,
            TURN=tile.turn, STAGES=tile.stages, TERMS=1 + tile.terms, **cut, **options,
        )  # fmt: skip
    if split > 1:
        size = num_rows * out_size
        _sum_kernel[(triton.cdiv(size, _SUMMED),)](
            parts, added, y, size, out_size, HAS_BIAS=bias is not None, SPLIT=split, BLOCK=_SUMMED, **options
        )
    return y
