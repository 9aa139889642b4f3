"""Quantisation on a GPU, one pass over the input: `quantize_blocks` and `quantize_fp8` are the twins, bit for bit."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.quantize_blocks import Against, Codes, check_blocks
from agentkv.kernels.quantize_fp8 import Fp8

_TOKENS = 16
"""Tokens of a program where tokens stand alone."""


@triton.jit
def _round(x):
    """Nearest whole number, to even at half, of 0 <= x < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _scale_of(low, high, dtype: tl.constexpr, MOST: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """(scale and zero as stored, step and start that codes are made with) of groups between low and high."""
    exact = tl.div_rn(high - low, low * 0 + LEVELS)
    scale = tl.minimum(exact, MOST).to(dtype)
    zero = tl.minimum(tl.maximum(low, -MOST), MOST).to(dtype)
    step = exact if EXACT else scale.to(tl.float32)
    start = low if EXACT else zero.to(tl.float32)
    return scale, zero, tl.where(step == 0, 1.0, step), start


@triton.jit
def _pack(x, ROWS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr):
    """Bytes [ROWS, DIM * BITS / 8] of levels [ROWS, DIM], in planes."""
    PLANES: tl.constexpr = 8 // BITS
    planes = tl.reshape(x.to(tl.int32), [ROWS, PLANES, DIM // PLANES])
    shift = tl.arange(0, PLANES) * BITS
    return tl.sum(planes << shift[None, :, None], 1).to(tl.uint8)


@triton.jit
def by_channel(x, dtype: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, EXACT: tl.constexpr):
    """(bytes [GROUP, DIM * BITS / 8], scales [DIM], zeros [DIM]) of one group of tokens x float32 [GROUP, DIM]."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    scale, zero, step, start = _scale_of(tl.min(x, 0), tl.max(x, 0), dtype, MOST, LEVELS, EXACT)
    level = tl.div_rn(x - start[None, :], x * 0 + step[None, :])
    return _pack(_round(tl.minimum(tl.maximum(level, 0.0), LEVELS)), x.shape[0], x.shape[1], BITS), scale, zero


@triton.jit
def by_token(x, dtype: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, EXACT: tl.constexpr):
    """(bytes [TOKENS, DIM * BITS / 8], scales and zeros [TOKENS, DIM / GROUP]) of tokens x float32 [TOKENS, DIM]."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    grouped = tl.reshape(x, [x.shape[0], x.shape[1] // GROUP, GROUP])
    scale, zero, step, start = _scale_of(tl.min(grouped, 2), tl.max(grouped, 2), dtype, MOST, LEVELS, EXACT)
    level = tl.div_rn(grouped - start[:, :, None], grouped * 0 + step[:, :, None])
    whole = tl.reshape(_round(tl.minimum(tl.maximum(level, 0.0), LEVELS)), [x.shape[0], x.shape[1]])
    return _pack(whole, x.shape[0], x.shape[1], BITS), scale, zero


@triton.jit
def _channels_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr,
    GROUP: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One group of tokens of one head."""
    group = tl.program_id(0).to(tl.int64)
    token, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    x = tl.load(x_ptr + group * GROUP * DIM + token[:, None] * DIM + dim[None, :]).to(tl.float32)
    packed, scale, zero = by_channel(x, scale_ptr.dtype.element_ty, BITS, MOST, EXACT)
    WIDTH: tl.constexpr = DIM * BITS // 8
    byte = tl.arange(0, WIDTH)
    tl.store(packed_ptr + group * GROUP * WIDTH + token[:, None] * WIDTH + byte[None, :], packed)
    tl.store(scale_ptr + group * DIM + dim, scale)
    tl.store(zero_ptr + group * DIM + dim, zero)


@triton.jit
def _tokens_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, num_tokens, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, groups of channels."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token[:, None] < num_tokens
    dim = tl.arange(0, DIM)
    x = tl.load(x_ptr + token[:, None] * DIM + dim[None, :], mask=live, other=0.0).to(tl.float32)
    packed, scale, zero = by_token(x, scale_ptr.dtype.element_ty, GROUP, BITS, MOST, EXACT)
    GROUPS: tl.constexpr = DIM // GROUP
    WIDTH: tl.constexpr = DIM * BITS // 8
    byte, number = tl.arange(0, WIDTH), tl.arange(0, GROUPS)
    tl.store(packed_ptr + token[:, None] * WIDTH + byte[None, :], packed, mask=live)
    tl.store(scale_ptr + token[:, None] * GROUPS + number[None, :], scale, mask=live)
    tl.store(zero_ptr + token[:, None] * GROUPS + number[None, :], zero, mask=live)


@triton.jit
def fp8_codes(x, dtype: tl.constexpr):
    """(codes uint8 [TOKENS, DIM], scales [TOKENS]) of x float32: bits of e4m3 made from those of float32, to even at half."""
    most = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(most, most * 0 + 448.0).to(dtype)
    step = scale.to(tl.float32)
    size = tl.minimum(tl.div_rn(tl.abs(x), x * 0 + tl.where(step == 0, 1.0, step)[:, None]), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # three bits of mantissa; exponents biased by 7
    small = _round(size * 512.0).to(tl.int32)  # below 2**-6 codes are multiples of 2**-9
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8), scale


@triton.jit
def _fp8_kernel(x_ptr, code_ptr, scale_ptr, num_tokens, TOKENS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """TOKENS tokens of a head."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    dim = tl.arange(0, DIM_PAD)
    live = (token[:, None] < num_tokens) & (dim[None, :] < DIM)
    x = tl.load(x_ptr + token[:, None] * DIM + dim[None, :], mask=live, other=0.0).to(tl.float32)
    code, scale = fp8_codes(x, scale_ptr.dtype.element_ty)
    tl.store(code_ptr + token[:, None] * DIM + dim[None, :], code, mask=live)
    tl.store(scale_ptr + token, scale, mask=token < num_tokens)


def serves(head_dim: int, group: int) -> bool:
    """Can groups be quantised here? Both must be powers of two."""
    return head_dim & (head_dim - 1) == 0 and group & (group - 1) == 0


def _check(x: Tensor, bits: int, group: int, axis: int) -> None:
    check_blocks(tuple(x.shape), bits, group, axis)
    if not serves(x.shape[-1], group):
        raise ValueError(f"groups of {group} of {x.shape[-1]} channels: this kernel wants powers of two")


def quantize_channels(
    x: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16, against: Against = "stored"
) -> Codes:
    """As `quantize_blocks.quantize_channels`, of float32 or half precision. Also raises ValueError where not `serves`."""
    _check(x, bits, group, -2)
    blocks, heads, tokens, dim = x.shape
    packed = torch.empty(blocks, heads, tokens, dim * bits // 8, dtype=torch.uint8, device=x.device)
    scale, zero = (torch.empty(blocks, heads, tokens // group, dim, dtype=dtype, device=x.device) for _ in range(2))
    _channels_kernel[(blocks * heads * (tokens // group),)](
        x.contiguous(), packed, scale, zero,
        GROUP=group, DIM=dim, BITS=bits, MOST=torch.finfo(dtype).max, EXACT=against == "exact",
    )  # fmt: skip
    return Codes(packed, scale, zero)


def quantize_tokens(x: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16, against: Against = "stored") -> Codes:
    """As `quantize_blocks.quantize_tokens`, of float32 or half precision. Also raises ValueError where not `serves`."""
    _check(x, bits, group, -1)
    blocks, heads, tokens, dim = x.shape
    packed = torch.empty(blocks, heads, tokens, dim * bits // 8, dtype=torch.uint8, device=x.device)
    scale, zero = (torch.empty(blocks, heads, tokens, dim // group, dtype=dtype, device=x.device) for _ in range(2))
    count = blocks * heads * tokens
    _tokens_kernel[(triton.cdiv(count, _TOKENS),)](
        x.contiguous(), packed, scale, zero, count,
        TOKENS=_TOKENS, GROUP=group, DIM=dim, BITS=bits, MOST=torch.finfo(dtype).max, EXACT=against == "exact",
    )  # fmt: skip
    return Codes(packed, scale, zero)


def quantize_fp8(x: Tensor, dtype: torch.dtype = torch.float32) -> Fp8:
    """As `quantize_fp8.quantize_fp8`, of float32 or half precision `[..., head_dim]`."""
    dim = x.shape[-1]
    count = x.numel() // dim
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], 1, dtype=dtype, device=x.device)
    _fp8_kernel[(triton.cdiv(count, _TOKENS),)](
        x.contiguous(), codes, scale, count, TOKENS=_TOKENS, DIM=dim, DIM_PAD=triton.next_power_of_2(dim)
    )
    return Fp8(codes, scale)
