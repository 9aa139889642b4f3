"""Linear maps of a few tokens on a GPU: weights go by once, at the speed of memory. The twins are `linear` and `gated_linear`.

One program has a few rows of the weight and all tokens. Where the next launch may overlap, it asks for its first weights
before it waits for the tokens, so that memory is busy while the kernel before ends. A token's sums are made in one order,
whatever the other tokens are and however many.
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

from agentkv.kernels.linear import MOST_TOKENS
from agentkv.kernels.overlap import follow, overlapping

TABLE = Path(__file__).with_name("tuned") / "linear.json"
"""By name of a GPU and shape, see `shape_name`, the tile that is faster there than the library's product."""
_LINE = 64
"""Weights that the device fetches together: 128 bytes of them."""


class Tile(NamedTuple):
    """How the work is cut. outs: rows of the weight in a program; ins: columns at a time, in each of `ways` that are summed in
    the end; stages, warps: of the compiled kernel; split: programs that share a row's columns, whose sums a second kernel
    adds; ahead: lines of 128 bytes of each row that are fetched before the tokens are there."""

    outs: int
    ins: int
    ways: int
    stages: int
    warps: int
    split: int = 1
    ahead: int = 0


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, num_tokens, out_size, in_size, count, x_token,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
    WAYS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """OUTS rows of the weight, `count` of their columns. GATED: those of the first half beside their partners."""
    number, share = tl.arange(0, OUTS), tl.program_id(1)
    RESULTS: tl.constexpr = OUTS // 2 if GATED else OUTS
    out = tl.program_id(0) * RESULTS + tl.arange(0, RESULTS)
    line = tl.minimum(tl.program_id(0) * RESULTS + (number // 2 if GATED else number), out_size - 1)
    if GATED:
        line += (number % 2) * out_size
    row = weight_ptr + line.to(tl.int64) * in_size + share * count
    if OVERLAP and AHEAD > 0:
        gdc_launch_dependents()
        first = row[:, None] + tl.arange(0, AHEAD)[None, :] * LINE
        fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(fetch, "=r,l", [first], dtype=tl.int32, is_pure=False, pack=1)
        gdc_wait()
    else:
        follow(OVERLAP)
    token = tl.arange(0, TOKENS)
    there = token < num_tokens
    source = x_ptr + token.to(tl.int64) * x_token + share * count
    if WAYS == 1:
        place = tl.arange(0, INS)
        total = tl.zeros([OUTS, TOKENS], tl.float32)
        for at in tl.range(0, count, INS, num_stages=STAGES):
            weight = tl.load(row[:, None] + at + place[None, :])
            x = tl.load(source[None, :] + at + place[:, None], mask=there[None, :], other=0.0)
            total = tl.dot(weight, x, total)
    else:
        place = tl.arange(0, WAYS)[:, None] * INS + tl.arange(0, INS)[None, :]
        sums = tl.zeros([WAYS, OUTS, TOKENS], tl.float32)
        for at in tl.range(0, count, WAYS * INS, num_stages=STAGES):
            weight = tl.load(row[None, :, None] + at + place[:, None, :])
            x = tl.load(source[None, None, :] + at + place[:, :, None], mask=there[None, None, :], other=0.0)
            sums = tl.dot(weight, x, sums)
        total = tl.sum(sums, 0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + line).to(tl.float32)[:, None]
    if GATED:
        pairs = total.to(x_ptr.dtype.element_ty).to(tl.float32).reshape(RESULTS, 2, TOKENS)
        gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
        total = gate / (1 + tl.exp(-gate)) * up
    target = y_ptr + (share * num_tokens + token).to(tl.int64)[None, :] * out_size + out[:, None]
    tl.store(target, total, mask=(out < out_size)[:, None] & there[None, :])


@triton.jit
def _sum_kernel(
    part_ptr, bias_ptr, y_ptr, size, out_size,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK results: the sums of their shares, in order."""
    follow(OVERLAP)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    total = tl.load(part_ptr + place, mask=live, other=0.0)
    for share in tl.static_range(1, SPLIT):
        total += tl.load(part_ptr + share * size + place, mask=live, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + place % out_size, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total, mask=live)


def shape_name(out_size: int, in_size: int, gated: bool = False) -> str:
    """As the table has it: rows and columns of a weight."""
    return f"{out_size}x{in_size}" + " gated" * gated


def tile_for(x: Tensor, weight: Tensor, gated: bool = False) -> Tile | None:
    """How this GPU does it best here; None where the library is faster, or nobody has measured it."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or x.dtype != weight.dtype:
        return None
    if x.stride(1) != 1 or x.stride(0) % 8 or not weight.is_contiguous():
        return None
    return _tiles(weight.device).get(shape_name(weight.shape[0], weight.shape[1], gated))


@cache
def _tiles(device: torch.device) -> dict[str, Tile]:
    """By shape what the table has for a GPU."""
    found = json.loads(TABLE.read_text()).get(torch.cuda.get_device_name(device), {})
    return {shape: Tile(**tile) for shape, tile in found.items()}


def stream(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, *, gated: bool = False) -> Tensor:
    """`[num_tokens, out_size]` of x `[num_tokens, in_size]`, up to MOST_TOKENS, last dim contiguous, weight
    `[out_size, in_size]`, contiguous, of the same dtype, and bias `[out_size]`. in_size is a multiple of split * ways * ins.
    gated: `gate` of that, half as wide; split is 1 then."""
    num_tokens, (lines, in_size) = len(x), weight.shape
    out_size = lines // 2 if gated else lines
    y = torch.empty(num_tokens, out_size, dtype=x.dtype, device=x.device)
    parts = y if tile.split == 1 else torch.empty(tile.split, num_tokens, out_size, dtype=torch.float32, device=x.device)
    given, options = weight if bias is None else bias, overlapping(x.device)
    _linear_kernel[(triton.cdiv(lines, tile.outs), tile.split)](
        x, weight, given, parts, num_tokens, out_size, in_size, in_size // tile.split, x.stride(0),
        HAS_BIAS=bias is not None and tile.split == 1, GATED=gated, TOKENS=8 if num_tokens <= 8 else MOST_TOKENS,
        OUTS=tile.outs, INS=tile.ins, WAYS=tile.ways, STAGES=tile.stages, AHEAD=tile.ahead, LINE=_LINE, num_warps=tile.warps,
        **options,
    )  # fmt: skip
    if tile.split > 1:
        size, block = num_tokens * out_size, 1024
        _sum_kernel[(triton.cdiv(size, block),)](
            parts, given, y, size, out_size, HAS_BIAS=bias is not None, SPLIT=tile.split, BLOCK=block, **options
        )
    return y
