"""Decode attention on a GPU over low-rank latents; the twin is `low_rank_decode`, plans and the merge are `paged_decode`'s.

Each tile's keys are rebuilt in chunks of the rank, in halves that rotation pairs up; value latents are summed as they are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.low_rank_decode import LowRankPages, absorb_values
from agentkv.kernels.merge_pieces_triton import TOGETHER, merge_kernel
from agentkv.kernels.paged_decode import DecodePlan, Tuning, grid_of


def tuning(payload: LowRankPages) -> Tuning:
    """What serves best on an H200. Wide heads and ranks, and float32, have no room for tiles of 64 tokens."""
    narrow = payload.k_factor.shape[2] <= 128 and payload.v.shape[3] <= 256 and payload.k.element_size() == 2
    return Tuning(4, 3, 64, 2) if narrow else Tuning(4, 1, 32, 4)


@triton.jit
def _columns(factor_ptr, rank, live_rank, base, HALF: tl.constexpr, HALF_PAD: tl.constexpr, DIM: tl.constexpr):
    """Rows `rank` and columns base .. base + HALF of a head's factor."""
    column = tl.arange(0, HALF_PAD)
    live = live_rank[:, None] & (column[None, :] < HALF)
    return tl.load(factor_ptr + rank[:, None] * DIM + base + column[None, :], mask=live, other=0.0)


@triton.jit
def _extra(ptr, base, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    """[1, COUNT_PAD] float32 of a head's bias, norm weight or the frequencies."""
    column = tl.arange(0, COUNT_PAD)
    return tl.load(ptr + base + column, mask=column < COUNT, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _query(q_ptr, offset, base, live, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    """[members, COUNT_PAD] of the queries' columns from base on."""
    column = tl.arange(0, COUNT_PAD)
    return tl.load(q_ptr + offset + base + column[None, :], mask=live & (column[None, :] < COUNT), other=0.0)


@triton.jit
def _rebuild(
    k_ptr, place, live, k_factor_ptr, k_bias_ptr, k_norm_ptr, head, eps,
    HAS_K_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr, RANK_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Keys of a tile before rotation, float32: the two halves that are turned, and what stays. place: of each latent."""
    factor = k_factor_ptr + head * RANK_K * DIM
    first = tl.zeros([BLOCK, HALF_PAD], tl.float32)
    second = tl.zeros([BLOCK, HALF_PAD], tl.float32)
    rest = tl.zeros([BLOCK, REST_PAD], tl.float32)
    for chunk in tl.range(0, RANK_K, CHUNK, num_stages=NUM_STAGES):
        rank = chunk + tl.arange(0, CHUNK)
        live_rank = rank < RANK_K
        latent = tl.load(k_ptr + place[:, None] + rank[None, :], mask=live[:, None] & live_rank[None, :], other=0.0)
        first += tl.dot(latent, _columns(factor, rank, live_rank, 0, HALF, HALF_PAD, DIM), input_precision="ieee")
        second += tl.dot(latent, _columns(factor, rank, live_rank, HALF, HALF, HALF_PAD, DIM), input_precision="ieee")
        if REST > 0:
            rest += tl.dot(latent, _columns(factor, rank, live_rank, 2 * HALF, REST, REST_PAD, DIM), input_precision="ieee")
    if HAS_K_BIAS:
        first += _extra(k_bias_ptr, head * DIM, HALF, HALF_PAD)
        second += _extra(k_bias_ptr, head * DIM + HALF, HALF, HALF_PAD)
        rest += _extra(k_bias_ptr, head * DIM + 2 * HALF, REST, REST_PAD)
    if HAS_NORM:
        square = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
        shrink = tl.rsqrt(square / DIM + eps)[:, None]
        first = first * shrink * _extra(k_norm_ptr, head * DIM, HALF, HALF_PAD)
        second = second * shrink * _extra(k_norm_ptr, head * DIM + HALF, HALF, HALF_PAD)
        rest = rest * shrink * _extra(k_norm_ptr, head * DIM + 2 * HALF, REST, REST_PAD)
    return first, second, rest


@triton.jit(do_not_specialize=["num_lines"])
def _piece_kernel(
    q_ptr, k_ptr, v_ptr, k_factor_ptr, k_bias_ptr, k_norm_ptr, frequency_ptr, positions_ptr, bias_ptr,
    table_ptr, lens_ptr, ends_ptr, pieces_ptr, part_ptr, part_lse_ptr,
    scale, eps, num_lines, q_token_stride, q_head_stride, k_page_stride, k_slot_stride, k_group_stride,
    v_page_stride, v_slot_stride, v_group_stride, row_stride, positions_stride, bias_stride,
    HEADS: tl.constexpr, SHARING: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_K_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr,
    REST_PAD: tl.constexpr, RANK_K: tl.constexpr, CHUNK: tl.constexpr, RANK_V: tl.constexpr, RANK_V_PAD: tl.constexpr,
    BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Pieces number pid, pid + grid, ...: each one's summed latents (float32, normalised) and log-sum-exp (base 2)."""
    MEMBERS: tl.constexpr = GROUP * QUERIES
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    total = tl.load(ends_ptr + num_lines - 1) * HEADS
    member = tl.arange(0, MEMBERS_PAD)
    wide = tl.arange(0, RANK_V_PAD)
    frequency = _extra(frequency_ptr, 0, HALF, HALF_PAD)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        piece = pieces_ptr + (item // HEADS) * 4
        row, low, stop, table_line = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        head = item % HEADS
        token_of = row * QUERIES + member // GROUP
        q_offset = token_of.to(tl.int64)[:, None] * q_token_stride + (head * GROUP + member % GROUP)[:, None] * q_head_stride
        live_q = member[:, None] < MEMBERS
        q_first = _query(q_ptr, q_offset, 0, live_q, HALF, HALF_PAD).to(dtype)
        q_second = _query(q_ptr, q_offset, HALF, live_q, HALF, HALF_PAD).to(dtype)
        if REST > 0:
            q_rest = _query(q_ptr, q_offset, 2 * HALF, live_q, REST, REST_PAD).to(dtype)
        table_row = table_ptr + table_line.to(tl.int64) * row_stride
        last = tl.load(lens_ptr + row) - QUERIES + member // GROUP  # the slot of the member's own token
        top = tl.full([MEMBERS_PAD], -1e30, tl.float32)  # not -inf: a member may see nothing of a block
        sums = tl.zeros([MEMBERS_PAD], tl.float32)
        acc = tl.zeros([MEMBERS_PAD, RANK_V_PAD], tl.float32)
        for begin in range(low, stop, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            live = token < stop
            if HAS_BIAS:
                bias = tl.load(bias_ptr + row.to(tl.int64) * bias_stride + token, mask=live, other=float("-inf"))
                live = live & (bias > float("-inf"))
            entry = tl.load(table_row + token // PAGE, mask=live, other=0).to(tl.int64)
            place = entry * k_page_stride + (token % PAGE) * k_slot_stride + head // SHARING * k_group_stride
            first, second, rest = _rebuild(
                k_ptr, place, live, k_factor_ptr, k_bias_ptr, k_norm_ptr, head, eps,
                HAS_K_BIAS, HAS_NORM, DIM, HALF, HALF_PAD, REST, REST_PAD, RANK_K, CHUNK, BLOCK, NUM_STAGES,
            )  # fmt: skip
            position = token
            if HAS_POSITIONS:
                position = tl.load(positions_ptr + row.to(tl.int64) * positions_stride + token, mask=live, other=0)
            angle = position.to(tl.float32)[:, None] * frequency
            cos, sin = tl.cos(angle), tl.sin(angle)
            score = tl.dot(q_first, tl.trans((first * cos - second * sin).to(dtype)), input_precision="ieee")
            score += tl.dot(q_second, tl.trans((second * cos + first * sin).to(dtype)), input_precision="ieee")
            if REST > 0:
                score += tl.dot(q_rest, tl.trans(rest.to(dtype)), input_precision="ieee")
            score *= scale
            if HAS_BIAS:
                score += (bias * 1.4426950408889634)[None, :]
            seen = live[None, :]
            if CAUSAL and QUERIES > 1:
                seen = seen & (token[None, :] <= last[:, None])
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            v_place = entry * v_page_stride + (token % PAGE) * v_slot_stride + head // SHARING * v_group_stride
            live_v = live[:, None] & (wide[None, :] < RANK_V)
            v = tl.load(v_ptr + v_place[:, None] + wide[None, :], mask=live_v, other=0.0)
            acc = acc * shrink[:, None] + tl.dot(weight.to(dtype), v, input_precision="ieee")
            sums = sums * shrink + tl.sum(weight, 1)
            top = new_top

        sums_safe = tl.where(sums > 0, sums, 1.0)
        lse = tl.where(sums > 0, top + tl.log2(sums_safe), float("-inf"))
        out = member.to(tl.int64) + item * MEMBERS
        live_out = live_q & (wide[None, :] < RANK_V)
        tl.store(part_ptr + out[:, None] * RANK_V + wide[None, :], acc / sums_safe[:, None], mask=live_out)
        tl.store(part_lse_ptr + out, lse, mask=member < MEMBERS)


def paged_low_rank_decode(
    q: Tensor,
    payload: LowRankPages,
    table: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    queries: int = 1,
    positions: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
    tuned: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` turned tokens a row over the slots that the plan names.

    q: `[num_rows * queries, num_heads, head_dim]`, half precision or float32, last dim contiguous. payload: latents and key
    factors in one dtype, factors contiguous. table: int32 `[max_rows, max_pages]`. plan: of rows, not of heads. positions,
    bias, causal: see `low_rank_decode`. Returns out like q and lse `[num_tokens, num_heads]`, natural, float32; 0 and -inf
    where nothing is seen. Raises ValueError for a plan by head or dtypes that differ.
    """
    if plan.per_head or not payload.k.dtype == payload.v.dtype == payload.k_factor.dtype:
        raise ValueError("a plan by head, or latents and key factors of different dtypes")
    num_tokens, num_heads, dim = q.shape
    heads, rank_k, rank_v = len(payload.k_factor), payload.k.shape[3], payload.v.shape[3]
    half, group = len(payload.frequency), num_heads // heads
    rest, rank_pad = dim - 2 * half, max(16, triton.next_power_of_2(rank_v))
    share, tuned = min(rank_pad, 32), tuned or tuning(payload)
    items = len(plan.pieces) * heads
    parts = torch.empty(items, group * queries, rank_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(items, group * queries, dtype=torch.float32, device=q.device)
    out = torch.empty(num_tokens, num_heads, rank_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    shared = {"HEADS": heads, "GROUP": group, "QUERIES": queries}
    _piece_kernel[(grid_of(q.device, tuned.programs),)](
        q, payload.k, payload.v, payload.k_factor, _or(payload.k_bias, q), _or(payload.k_norm, q), payload.frequency,
        _or(positions, q), _or(bias, q), table, plan.lens, plan.ends, plan.pieces, parts, part_lse,
        scale * 1.4426950408889634, payload.eps, plan.ends.numel(), q.stride(0), q.stride(1), *payload.k.stride()[:3],
        *payload.v.stride()[:3], table.stride(0), 0 if positions is None else positions.stride(0),
        0 if bias is None else bias.stride(0),
        SHARING=heads // payload.k.shape[2], MEMBERS_PAD=max(16, triton.next_power_of_2(group * queries)), CAUSAL=causal,
        HAS_BIAS=bias is not None, HAS_POSITIONS=positions is not None, HAS_K_BIAS=payload.k_bias is not None,
        HAS_NORM=payload.k_norm is not None, PAGE=payload.k.shape[1], DIM=dim, HALF=half,
        HALF_PAD=max(16, triton.next_power_of_2(half)), REST=rest, REST_PAD=max(16, triton.next_power_of_2(max(rest, 1))),
        RANK_K=rank_k, CHUNK=min(64, max(16, triton.next_power_of_2(rank_k))), RANK_V=rank_v, RANK_V_PAD=rank_pad,
        BLOCK=tuned.block, NUM_STAGES=tuned.stages, num_warps=tuned.warps, **shared,
    )  # fmt: skip
    merge_kernel[(num_tokens, num_heads, rank_pad // share)](
        parts, part_lse, plan.ends, out, lse, PER_HEAD=False, DIM=rank_v, SHARE=share, AT_ONCE=TOGETHER, num_warps=2, **shared
    )
    return absorb_values(payload, out, lse).to(q.dtype), lse


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants a pointer, read or not."""
    return other if given is None else given
