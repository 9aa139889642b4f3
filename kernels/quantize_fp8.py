"""Eight-bit floats (e4m3, finite, largest 448) with one scale a token and head, or one a head, and back.

Rounding is to nearest, to even at half; what lies outside is the largest value, never NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


class Fp8(NamedTuple):
    """codes: uint8 bit patterns of e4m3, like the input. scale: `[..., 1]`; the value is code * scale."""

    codes: Tensor
    scale: Tensor


def quantize_fp8(x: Tensor, dtype: torch.dtype = torch.float32) -> Fp8:
    """Scale amax / 448 of each token and head, of `[..., head_dim]`. dtype: of the scale, as stored; codes are for that one."""
    if x.is_cuda and x.dtype != torch.float64:
        from agentkv.kernels import quantize_blocks_triton as fused

        return fused.quantize_fp8(x, dtype)
    wide = _wide(x)
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).to(dtype)
    return Fp8(_cast(wide, scale), scale)


def quantize_fp8_static(x: Tensor, scale: Tensor) -> Fp8:
    """A given scale for each head. x: `[num_tokens, num_kv_heads, head_dim]`. scale: `[num_kv_heads]`; values past 448 * scale
    saturate. The scale that is returned is `[num_kv_heads, 1]`."""
    by_head = scale.unsqueeze(-1)
    return Fp8(_cast(_wide(x), by_head), by_head)


def dequantize_fp8(coded: Fp8, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[..., head_dim]`: code * scale, rounded to dtype once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (_values(coded.codes).to(wide) * coded.scale.to(wide)).to(dtype)


def fp8_bytes_per_token(head_dim: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of one token's key and value in one KV head, each with its scale."""
    return 2 * (head_dim + dtype.itemsize)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _values(codes: Tensor) -> Tensor:
    """e4m3 of bit patterns; float32 on the CPU, where looking them up is three times faster than torch's conversion."""
    if codes.device.type != "cpu":
        return codes.view(FP8)
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return every.index_select(0, codes.flatten().int()).view(codes.shape)


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    """Codes of x / scale; a scale of 0 (nothing but zeros, or below the scale's dtype) counts as 1."""
    step = scale.to(x.dtype)
    scaled = (x / step.masked_fill(step == 0, 1)).clamp(-LARGEST, LARGEST)
    return scaled.float().to(FP8).view(torch.uint8)
