"""Linear maps by e4m3 weights with a scale for each block of 128 x 128, the published layout of FP8 checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.kernels.linear import linear
from agentkv.kernels.quantize_fp8 import quantize_fp8

BLOCK = 128
"""Inputs, and outputs, that share a scale."""

FEW_ROWS = 128
"""On a GPU, up to so many rows read the weights as they are, with activations as they are or as two e4m3 terms: their bytes are
the cost. With more rows the matrix units are, and activations become e4m3 by blocks of 128, as the checkpoints are made for."""

_ROWS_AT_ONCE = 8 * BLOCK


def blocks(size: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // BLOCK)


def dequantize_blocks(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 weight `[..., out_size, in_size]` times its block's scale `[..., blocks(out_size), blocks(in_size)]`; the product is
    made in `dtype`, at least float32, and rounded once."""
    wide = dtype if dtype == torch.float64 else torch.float32
    spread = scale.to(wide).repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]
    spread = spread.repeat_interleave(BLOCK, -2)[..., : weight.shape[-2], :]
    return (weight.to(wide) * spread).to(dtype)


def block_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[num_tokens, out_size]` of x `[num_tokens, in_size]`, weight `[out_size, in_size]` in e4m3 with float32 scales
    `[blocks(out_size), blocks(in_size)]`, and bias `[out_size]`."""
    if x.is_cuda:
        from agentkv.kernels import block_linear_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(x, weight.shape[0]):
            if x.shape[0] <= FEW_ROWS:
                return fused.few_rows(x, weight, scale, bias)
            if x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) == (9, 0):
                return _many_rows(x, weight, scale, bias)
    parts = []
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        plain = dequantize_blocks(weight[some], scale[start // BLOCK : blocks(start + _ROWS_AT_ONCE)], x.dtype)
        parts.append(linear(x, plain, None if bias is None else bias[some]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _many_rows(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product of two e4m3 operands, scales 1 x 128 by 128 x 128. It wants rows, and blocks of inputs, in fours,
    and the scales of a block's rows side by side."""
    num_tokens = x.shape[0]
    x = functional.pad(x, (0, 0, 0, -num_tokens % 4)) if num_tokens % 4 else x
    scale = functional.pad(scale, (0, -scale.shape[1] % 4)) if scale.shape[1] % 4 else scale
    codes, row_scale = quantize_fp8(x.reshape(len(x), -1, BLOCK))
    kinds = functional.ScalingType
    y = functional.scaled_mm(
        codes.view(torch.float8_e4m3fn).flatten(1), weight.t(), row_scale.flatten(1).t().contiguous().t(), kinds.BlockWise1x128,
        scale.t(), kinds.BlockWise128x128, output_dtype=x.dtype,
    )[:num_tokens]  # fmt: skip
    return y if bias is None else y + bias
