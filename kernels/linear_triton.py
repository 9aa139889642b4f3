"""Linear maps of a few tokens on a GPU: every weight is read once, at the speed of memory. See `linear`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 16
"""One tile of tokens, whatever their number: so a token's result is the same bits whatever the other tokens are."""


class Tiles(NamedTuple):
    """Outputs and inputs of a tile of weights, warps of a program, stages of its pipeline."""

    outputs: int
    inputs: int
    warps: int
    stages: int


def tiles_of(out_size: int) -> Tiles:
    """Few outputs in narrow tiles, so that every multiprocessor has some."""
    return Tiles(16, 256, 4, 5) if out_size < 8192 else Tiles(32, 256, 4, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, num_tokens, x_token,
    IN: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all tokens."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.arange(0, TOKENS)
    place = tl.arange(0, INPUTS)
    rows = weight_ptr + output.to(tl.int64)[:, None] * IN
    live_row, live_token = (output < OUT)[:, None], (token < num_tokens)[None, :]
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for first in tl.range(0, IN, INPUTS, num_stages=STAGES):
        at = first + place
        weight = tl.load(rows + at[None, :], mask=live_row & (at < IN)[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + token[None, :] * x_token + at[:, None], mask=live_token & (at < IN)[:, None], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=output < OUT, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + token[None, :] * OUT + output[:, None], acc, mask=live_row & live_token)


def linear_few(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """`[num_tokens, out_size]` of x `[num_tokens, in_size]`, up to MOST_TOKENS tokens, last dim contiguous; weight `[out_size,
    in_size]` contiguous; bias `[out_size]`. Sums are float32."""
    num_tokens, in_size = x.shape
    out_size = weight.shape[0]
    tiles = tiles or tiles_of(out_size)
    y = torch.empty(num_tokens, out_size, dtype=x.dtype, device=x.device)
    _linear_kernel[(triton.cdiv(out_size, tiles.outputs),)](
        x, weight, weight if bias is None else bias, y, num_tokens, x.stride(0),
        IN=in_size, OUT=out_size, TOKENS=MOST_TOKENS, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return y
