"""Decode attention on a GPU over pages of quantised keys and values, dequantised on the fly; the twin is `dequant_decode`.

Pieces, plans and the merge are those of `paged_decode`. Scales are kept off the elements where algebra allows it: those of a
group of keys are multiplied into the query, those of e4m3 into the score and the weight.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.paged_decode import EDGE, MOST, DecodePlan, Tuning, _merge_kernel
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages


@triton.jit
def _levels(pages_ptr, place, dim, live, CODE_BYTES: tl.constexpr, BITS: tl.constexpr):
    """Codes [BLOCK, DIM_PAD] float32: channel d lies in byte d % CODE_BYTES, in the plane d // CODE_BYTES."""
    byte = tl.load(pages_ptr + place[:, None] + (dim % CODE_BYTES)[None, :], mask=live, other=0).to(tl.int32)
    return ((byte >> (dim // CODE_BYTES * BITS)[None, :]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _floats(pages_ptr, place, dim, live):
    """e4m3 codes [BLOCK, DIM_PAD] as float32."""
    code = tl.load(pages_ptr + place[:, None] + dim[None, :], mask=live, other=0)
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_lines"])
def _piece_kernel(
    q_ptr, pages_ptr, params_ptr, table_ptr, lens_ptr, ends_ptr, pieces_ptr, bias_ptr, part_ptr, part_lse_ptr,
    scale, num_lines, q_token_stride, q_head_stride, page_stride, params_stride, row_stride, bias_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS_PAD: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    FP8: tl.constexpr, BITS: tl.constexpr, CODE_BYTES: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr,
    SLOT_BYTES: tl.constexpr, PARAMS_START: tl.constexpr, HEAD_PARAMS: tl.constexpr, KEY_PARAMS: tl.constexpr,
    VALUE_PARAMS: tl.constexpr, SLOT_PARAMS: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Pieces number pid, pid + grid, ...: each one's part of out (float32, normalised) and its log-sum-exp (base 2)."""
    MEMBERS: tl.constexpr = GROUP * QUERIES
    ROW_GROUPS: tl.constexpr = 1 if FP8 else DIM // VALUE_GROUP
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    total = tl.load(ends_ptr + num_lines - 1) * HEADS
    dtype: tl.constexpr = tl.float32 if WIDE else tl.bfloat16  # of products: a half's range would not hold scales
    member = tl.arange(0, MEMBERS_PAD)
    dim = tl.arange(0, DIM_PAD)
    live_dim = dim < DIM
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        piece = pieces_ptr + (item // HEADS) * 4
        row, low, stop, table_line = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        head = item % HEADS
        live_q = (member[:, None] < MEMBERS) & live_dim[None, :]
        token_of = row * QUERIES + member // GROUP
        q_offset = token_of.to(tl.int64)[:, None] * q_token_stride + (head * GROUP + member % GROUP)[:, None] * q_head_stride
        q = tl.load(q_ptr + q_offset + dim[None, :], mask=live_q, other=0.0).to(tl.float32) * scale
        table_row = table_ptr + table_line.to(tl.int64) * row_stride
        last = tl.load(lens_ptr + row) - QUERIES + member // GROUP  # the slot of the member's own token
        head_params = params_ptr + PARAMS_START + head * HEAD_PARAMS
        top = tl.full([MEMBERS_PAD], -1e30, tl.float32)  # not -inf: a member may see nothing of a block
        sums = tl.zeros([MEMBERS_PAD], tl.float32)
        acc = tl.zeros([MEMBERS_PAD, DIM_PAD], tl.float32)
        for first in tl.range(low // BLOCK * BLOCK, stop, BLOCK, num_stages=NUM_STAGES):
            token = first + tl.arange(0, BLOCK)
            live = (token >= low) & (token < stop)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + row.to(tl.int64) * bias_stride + token, mask=live, other=float("-inf"))
                live = live & (bias > float("-inf"))
            live_kv = live[:, None] & live_dim[None, :]
            slot = token % PAGE
            entry = tl.load(table_row + token // PAGE, mask=live, other=0).to(tl.int64)
            place = entry * page_stride + (head * 2 * PAGE + slot) * SLOT_BYTES
            params = head_params + entry * params_stride
            if FP8:
                k = _floats(pages_ptr, place, dim, live_kv).to(dtype)
                score = tl.dot(q.to(dtype), tl.trans(k), input_precision="ieee")
                score = score * tl.load(params + slot * SLOT_PARAMS, mask=live, other=0.0).to(tl.float32)[None, :]
            else:
                page = tl.load(table_row + first // PAGE).to(tl.int64)  # a block lies in one group, so in one page
                group = head_params + page * params_stride + first % PAGE // KEY_GROUP * DIM + dim
                k_scale = tl.load(group, mask=live_dim, other=0.0).to(tl.float32)
                k_middle = tl.load(group + KEY_PARAMS, mask=live_dim, other=0.0).to(tl.float32) + k_scale * MIDDLE
                k = _levels(pages_ptr, place, dim, live_kv, CODE_BYTES, BITS) - MIDDLE  # centred: a product loses least
                score = tl.dot((q * k_scale[None, :]).to(dtype), tl.trans(k.to(dtype)), input_precision="ieee")
                score += tl.sum(q * k_middle[None, :], 1)[:, None]
            if HAS_BIAS:
                score += (bias * 1.4426950408889634)[None, :]
            seen = live[None, :]
            if CAUSAL and QUERIES > 1:
                seen = seen & (token[None, :] <= last[:, None])
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            sums = sums * shrink + tl.sum(weight, 1)
            place += PAGE * SLOT_BYTES
            if FP8:
                v = _floats(pages_ptr, place, dim, live_kv)
                v_scale = tl.load(params + KEY_PARAMS + slot * SLOT_PARAMS, mask=live, other=0.0)
                weight *= v_scale.to(tl.float32)[None, :]
            else:
                own = params[:, None] + 2 * KEY_PARAMS + (slot * ROW_GROUPS)[:, None] + (dim // VALUE_GROUP)[None, :]
                v_scale = tl.load(own, mask=live_kv, other=0.0).to(tl.float32)
                v = _levels(pages_ptr, place, dim, live_kv, CODE_BYTES, BITS) * v_scale
                v += tl.load(own + VALUE_PARAMS, mask=live_kv, other=0.0).to(tl.float32)
            part = tl.dot(weight.to(dtype), v.to(dtype), input_precision="ieee")
            acc = acc * shrink[:, None] + part
            top = new_top

        sums_safe = tl.where(sums > 0, sums, 1.0)
        lse = tl.where(sums > 0, top + tl.log2(sums_safe), float("-inf"))
        out = member.to(tl.int64) + item * MEMBERS
        tl.store(part_ptr + out[:, None] * DIM + dim[None, :], acc / sums_safe[:, None], mask=live_q)
        tl.store(part_lse_ptr + out, lse, mask=member < MEMBERS)


def serves(layout: PageLayout) -> bool:
    """Can `paged_dequant_decode` read such pages? Groups of keys must be a power of two of 16 tokens or more."""
    return layout.fp8 or (layout.key_group >= 16 and layout.key_group & (layout.key_group - 1) == 0)


def block_of(layout: PageLayout) -> int:
    """Tokens of a tile: within one group of keys."""
    return 64 if layout.fp8 else min(64, layout.key_group, EDGE)


def _steps(layout: PageLayout) -> dict[str, int]:
    """From the scales of a head to those of the next, from keys to values (and to zeros), and from slot to slot, in items."""
    if layout.fp8:
        items = layout.slot_bytes // layout.dtype.itemsize
        side = layout.page_size * items
        return {"HEAD_PARAMS": 2 * side, "KEY_PARAMS": side, "VALUE_PARAMS": 0, "SLOT_PARAMS": items}
    key, value = (rows * columns for rows, columns in (layout.key_params, layout.value_params))
    return {"HEAD_PARAMS": layout.head_params, "KEY_PARAMS": key, "VALUE_PARAMS": value, "SLOT_PARAMS": 0}


def paged_dequant_decode(
    q: Tensor,
    payload: QuantizedPages,
    table: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    queries: int = 1,
    bias: Tensor | None = None,
    causal: bool = True,
    tuned: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` tokens a row over the slots that the plan names.

    q: `[num_rows * queries, num_heads, head_dim]`, half precision or float32, last dim contiguous. table: int32 `[max_rows,
    max_pages]`. plan: of rows, not of heads. bias, causal: see `dequant_decode`. tuned: its block is not read.
    Returns out like q and lse `[num_tokens, num_heads]`, natural, float32; 0 and -inf where nothing is seen. Raises ValueError
    for pages that are not `serves`.
    """
    layout = payload.layout
    if not serves(layout) or plan.per_head:
        raise ValueError(f"groups of {layout.key_group} keys, or a plan by head: this kernel wants powers of two from 16")
    num_tokens, num_heads, head_dim = q.shape
    heads, group = layout.num_kv_heads, num_heads // layout.num_kv_heads
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    share, tuned = min(dim_pad, 32), tuned or Tuning(4, 2, 0)
    items = len(plan.pieces) * heads
    parts = torch.empty(items, group * queries, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(items, group * queries, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    params = payload.pages[:, : layout.page_bytes].view(layout.dtype)
    shared = {"HEADS": heads, "GROUP": group, "QUERIES": queries, "DIM": head_dim}
    _piece_kernel[(plan.programs,)](
        q, payload.pages, params, table, plan.lens, plan.ends, plan.pieces, bias if bias is not None else part_lse, parts,
        part_lse, scale * 1.4426950408889634, plan.ends.numel(), q.stride(0), q.stride(1), payload.pages.stride(0),
        params.stride(0), table.stride(0), bias.stride(0) if bias is not None else 0,
        MEMBERS_PAD=max(16, triton.next_power_of_2(group * queries)), CAUSAL=causal, HAS_BIAS=bias is not None,
        PAGE=layout.page_size, DIM_PAD=dim_pad, BLOCK=block_of(layout), FP8=layout.fp8, BITS=layout.bits,
        CODE_BYTES=layout.code_bytes, KEY_GROUP=layout.key_group or 1, VALUE_GROUP=layout.value_group or 1,
        SLOT_BYTES=layout.slot_bytes, PARAMS_START=layout.params_start // layout.dtype.itemsize, **_steps(layout),
        WIDE=q.dtype == torch.float32, NUM_STAGES=tuned.stages, num_warps=tuned.warps, **shared,
    )  # fmt: skip
    _merge_kernel[(num_tokens, num_heads, dim_pad // share)](
        parts, part_lse, plan.ends, out, lse, PER_HEAD=False, SHARE=share, MOST=MOST, num_warps=2, **shared
    )
    return out, lse
