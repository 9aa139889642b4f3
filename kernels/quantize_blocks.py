"""Asymmetric uniform quantisation of keys by channel and of values by token, 2, 4 or 8 bits, and back (arXiv 2402.02750).

A group has zero = min and scale = (max - min) / (2**bits - 1); x becomes round((x - zero) / scale), to even at half, between
0 and 2**bits - 1. Codes are packed in **planes** of W = head_dim * bits / 8 bytes a token: byte j holds channels j, j + W,
j + 2W ... from its low bits up, so a token's codes stand alone and a reader needs no shuffle between channels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

BITS = (2, 4, 8)
Against = Literal["stored", "exact"]


class Codes(NamedTuple):
    """Quantised keys or values.

    packed: uint8 `[num_blocks, num_kv_heads, tokens, head_dim * bits / 8]`. scale, zero: of keys `[num_blocks, num_kv_heads,
    tokens / group, head_dim]`, of values `[num_blocks, num_kv_heads, tokens, head_dim / group]`.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor


def bytes_per_token(bits: int, group: int, head_dim: int, dtype: torch.dtype = torch.float16) -> float:
    """Bytes of one token's key and value in one KV head: codes, scales and zeros, both in groups of `group`."""
    return 2 * (head_dim * bits / 8 + 2 * dtype.itemsize * head_dim / group)


def check_blocks(shape: tuple[int, ...], bits: int, group: int, axis: int) -> None:
    """Raise ValueError where blocks of that shape cannot be quantised. axis: the one that groups divide, -2 or -1."""
    if len(shape) != 4:
        raise ValueError(f"blocks are [num_blocks, num_kv_heads, tokens, head_dim], these have {len(shape)} dims")
    if bits not in BITS:
        raise ValueError(f"codes have 2, 4 or 8 bits, not {bits}")
    if group < 1 or shape[axis] % group:
        raise ValueError(f"groups of {group} do not divide {shape[axis]}")
    if shape[-1] % (8 // bits):
        raise ValueError(f"{shape[-1]} channels of {bits} bits do not fill bytes")


def quantize_channels(
    k: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16, against: Against = "stored"
) -> Codes:
    """Keys, by channel: each group is `group` tokens in a row of one channel.

    k: `[num_blocks, num_kv_heads, tokens, head_dim]`, tokens a multiple of group. dtype: of scale and zero. against: codes are
    the nearest ones to the scale and zero as `stored`, which the published code does, or to those before they were rounded to
    dtype, `exact`, as the paper's formula reads. Raises ValueError, see `check_blocks`.
    """
    check_blocks(tuple(k.shape), bits, group, -2)
    if k.is_cuda and k.dtype != torch.float64:
        from agentkv.kernels import quantize_blocks_triton as fused

        if fused.serves(k.shape[-1], group):
            return fused.quantize_channels(k, bits, group, dtype, against)
    grouped = torch.unflatten(_wide(k), -2, (-1, group))
    codes, scale, zero = _quantize(grouped, -2, bits, dtype, against)
    return Codes(pack(codes.flatten(-3, -2), bits), scale.squeeze(-2), zero.squeeze(-2))


def quantize_tokens(v: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16, against: Against = "stored") -> Codes:
    """Values, by token: each group is `group` channels in a row of one token. Otherwise as `quantize_channels`."""
    check_blocks(tuple(v.shape), bits, group, -1)
    if v.is_cuda and v.dtype != torch.float64:
        from agentkv.kernels import quantize_blocks_triton as fused

        if fused.serves(v.shape[-1], group):
            return fused.quantize_tokens(v, bits, group, dtype, against)
    grouped = torch.unflatten(_wide(v), -1, (-1, group))
    codes, scale, zero = _quantize(grouped, -1, bits, dtype, against)
    return Codes(pack(codes.flatten(-2, -1), bits), scale.squeeze(-1), zero.squeeze(-1))


def dequantize_channels(codes: Codes, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys `[num_blocks, num_kv_heads, tokens, head_dim]`, code * scale + zero, rounded to dtype once."""
    groups = codes.scale.shape[-2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    levels = torch.unflatten(unpack(codes.packed, bits), -2, (groups, -1)).to(wide)
    scale, zero = codes.scale.to(wide).unsqueeze(-2), codes.zero.to(wide).unsqueeze(-2)
    return torch.addcmul(zero, levels, scale).flatten(-3, -2).to(dtype)


def dequantize_tokens(codes: Codes, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values `[num_blocks, num_kv_heads, tokens, head_dim]`, code * scale + zero, rounded to dtype once."""
    groups = codes.scale.shape[-1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    levels = torch.unflatten(unpack(codes.packed, bits), -1, (groups, -1)).to(wide)
    scale, zero = codes.scale.to(wide).unsqueeze(-1), codes.zero.to(wide).unsqueeze(-1)
    return torch.addcmul(zero, levels, scale).flatten(-2, -1).to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[..., head_dim * bits / 8]` of uint8 codes `[..., head_dim]` below 2**bits, in planes."""
    planes = torch.unflatten(codes, -1, (8 // bits, -1)).unbind(-2)
    packed = planes[0]
    for number, plane in enumerate(planes[1:], 1):
        packed = packed | plane << number * bits
    return packed.contiguous()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """uint8 codes `[..., head_dim]` of `pack`'s bytes."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([packed >> shift & mask for shift in range(0, 8, bits)], -1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _quantize(grouped: Tensor, axis: int, bits: int, dtype: torch.dtype, against: Against) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 like `grouped`, scale, zero with 1 at `axis`). A group with one value in it has scale 0 and code 0."""
    levels = (1 << bits) - 1
    low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
    exact = (high - low) / levels
    most = torch.finfo(dtype).max
    scale, zero = exact.clamp(max=most).to(dtype), low.clamp(-most, most).to(dtype)
    step, start = (scale.to(low.dtype), zero.to(low.dtype)) if against == "stored" else (exact, low)
    codes = ((grouped - start) / step.masked_fill(step == 0, 1)).clamp(0, levels).round()
    return codes.to(torch.uint8), scale, zero
