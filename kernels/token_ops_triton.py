"""Norm, rotation, gate and KV store of a step's tokens on a GPU, one launch each. In torch each is a handful of kernels, which
a decode step waits for longer than for its bytes. Callers are `rms_norm`, `rotate`, `rotate_store`, `gate` and `store_kv`: they
say what each computes; sums and products are float32 here, rounded where those round a norm. What never changes, a norm's
weight, is read before a kernel waits for the one before it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.overlap import follow, overlapping
from agentkv.kernels.store_kv import Places

WIDEST = 16384
"""A token's norm is one program."""
FEW, HEADS = 16, 16
"""Up to FEW tokens a program rotates or stores one head of one token; of more, HEADS of them: where there are enough programs
to fill the device, starting one takes longer than a head's bytes (2,048 tokens of 32 and 8 heads on an H200: 119 us and 17)."""


@triton.jit
def _norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, eps, x_token, delta_token,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE_PAD)
    live = place < SIZE
    weight = tl.load(weight_ptr + place, mask=live, other=0.0)
    follow(OVERLAP)
    x = tl.load(x_ptr + token * x_token + place, mask=live, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(delta_ptr + token * delta_token + place, mask=live, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(sum_ptr + token * SIZE + place, x, mask=live)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(y_ptr + token * SIZE + place, weight.to(tl.float32) * normed.to(weight.dtype).to(tl.float32), mask=live)


@triton.jit(do_not_specialize=["entries_ptr", "offsets_ptr"])
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, weight_ptr, y_ptr, pages_ptr, entries_ptr, offsets_ptr,
    eps, x_token, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, PAGE: tl.constexpr,
    NORMS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token: of HEADS that are turned into y, then of keys that are turned and of values that are not, both
    into pages."""
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    PARTS: tl.constexpr = (TOTAL + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    head = (tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK))[:, None]
    place = tl.arange(0, HALF_PAD)[None, :]
    live = (head < TOTAL) & (place < HALF)
    turns = live & (head < HEADS + KV_HEADS)
    if NORMS:
        own = weight_ptr + head * (2 * HALF) + place
        weight, weight_second = tl.load(own, mask=turns, other=0.0), tl.load(own + HALF, mask=turns, other=0.0)
    follow(OVERLAP)
    if KV_HEADS > 0:
        slot = tl.load(entries_ptr + token) * page_stride + tl.load(offsets_ptr + token) * (2 * HALF)
    source = x_ptr + token * x_token + head * (2 * HALF) + place
    first_raw, second_raw = tl.load(source, mask=live, other=0.0), tl.load(source + HALF, mask=live, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORMS:
        mean = tl.sum(first * first + second * second, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        first = weight.to(tl.float32) * (first * scale).to(weight.dtype).to(tl.float32)
        second = weight_second.to(tl.float32) * (second * scale).to(weight.dtype).to(tl.float32)
        first, second = first.to(first_raw.dtype).to(tl.float32), second.to(first_raw.dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + place, mask=place < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + place, mask=place < HALF, other=0.0).to(tl.float32)
    first_turned, second_turned = first * cos - second * sin, second * cos + first * sin
    target = y_ptr + (token * HEADS + head) * (2 * HALF) + place
    tl.store(target, first_turned, mask=live & (head < HEADS))
    tl.store(target + HALF, second_turned, mask=live & (head < HEADS))
    if KV_HEADS > 0:
        kept, kv = live & (head >= HEADS), tl.maximum(head - HEADS, 0)  # K of each head, then V of each
        target = pages_ptr + slot + (kv % KV_HEADS) * head_stride + (kv // KV_HEADS) * (PAGE * 2 * HALF) + place
        tl.store(target, tl.where(turns, first_turned, first_raw.to(tl.float32)), mask=kept)
        tl.store(target + HALF, tl.where(turns, second_turned, second_raw.to(tl.float32)), mask=kept)


@triton.jit
def _gate_kernel(x_ptr, y_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A part of one token."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = place < SIZE
    gated = tl.load(x_ptr + token * (2 * SIZE) + place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * (2 * SIZE) + SIZE + place, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * SIZE + place, gated / (1 + tl.exp(-gated)) * up, mask=live)


@triton.jit(do_not_specialize=["entries_ptr", "offsets_ptr"])
def _store_kernel(
    pages_ptr, entries_ptr, offsets_ptr, k_ptr, v_ptr, page_stride, head_stride, k_token, v_token,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK KV heads of one token."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    live = (head < HEADS) & (dim < DIM)
    place = tl.load(entries_ptr + token) * page_stride + head * head_stride + tl.load(offsets_ptr + token) * DIM + dim
    k = tl.load(k_ptr + token * k_token + head * DIM + dim, mask=live)
    v = tl.load(v_ptr + token * v_token + head * DIM + dim, mask=live)
    tl.store(pages_ptr + place, k, mask=live)
    tl.store(pages_ptr + place + PAGE * DIM, v, mask=live)


def serves(*tensors: Tensor) -> bool:
    """Are these for the functions of this file? All on a GPU, none wider than float32."""
    return all(each.is_cuda and each.dtype in (torch.float32, torch.bfloat16, torch.float16) for each in tensors)


def norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm) of x and delta `[num_tokens, size]`, last dim contiguous, size up to WIDEST; weight `[size]`."""
    num_tokens, size = x.shape
    y = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(y)
    given = x if delta is None else delta
    _norm_kernel[(num_tokens,)](
        x, given, weight, total, y, eps, x.stride(0), given.stride(0), SIZE=size, SIZE_PAD=triton.next_power_of_2(size),
        ADDS=delta is not None, num_warps=8 if size > 2048 else 4, **overlapping(x.device),
    )  # fmt: skip
    return total, y


def turn(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Heads normed and rotated, see `rotate`. x: `[num_tokens, num_heads, head_dim]`, heads side by side; the rest dense."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn(x, cos, sin, weight, eps, y, None)
    return y


def turn_and_put(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    into: Places,
) -> Tensor:
    """See `rotate_store`. Heads of qkv side by side; page, K and V, slot and dim of pages dense, and so is the rest."""
    y = torch.empty(len(qkv), num_heads, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    _turn(qkv, cos, sin, weight, eps, y, into)
    return y


def _turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    into: Places | None,
) -> None:
    half = x.shape[2] // 2
    pages, entries, offsets = into or (y, y, y)
    paged = (pages.stride(0), pages.stride(1)) if into else (0, 0)
    block, warps = _cut(len(x))
    _rotate_kernel[(len(x) * triton.cdiv(x.shape[1], block),)](
        x, cos, sin, x if weight is None else weight, y, pages, entries, offsets, eps, x.stride(0), *paged,
        HEADS=y.shape[1], KV_HEADS=(x.shape[1] - y.shape[1]) // 2, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        PAGE=pages.shape[3] if into else 1, NORMS=weight is not None, BLOCK=block, num_warps=warps, **overlapping(x.device),
    )  # fmt: skip


def _cut(num_tokens: int) -> tuple[int, int]:
    """(heads of a program, its warps): as many however many heads there are, which fixes the order of a norm's sum."""
    return (1, 1) if num_tokens <= FEW else (HEADS, 4)


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of x `[num_tokens, 2 * size]`, contiguous, times the second."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _gate_kernel[(num_tokens, triton.cdiv(size, block))](x, y, SIZE=size, BLOCK=block, **overlapping(x.device))
    return y


def put(pages: Tensor, entries: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Store keys and values, see `store_kv`. Heads of k and v side by side; page, K and V, slot and dim of pages dense."""
    num_tokens, num_kv_heads, head_dim = k.shape
    block, warps = _cut(num_tokens)
    block = min(block, triton.next_power_of_2(num_kv_heads))
    _store_kernel[(num_tokens, triton.cdiv(num_kv_heads, block))](
        pages, entries, offsets, k, v, pages.stride(0), pages.stride(1), k.stride(0), v.stride(0),
        HEADS=num_kv_heads, PAGE=pages.shape[3], DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), BLOCK=block,
        num_warps=warps, **overlapping(k.device),
    )  # fmt: skip
