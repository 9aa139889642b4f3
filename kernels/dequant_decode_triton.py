"""Decode attention on a GPU over pages of quantised keys and values, made plain on the fly; the twin is `dequant_decode`.

Pieces, plans and the merge are those of `paged_decode`; a kernel for each kind of page makes the pieces' parts.
"""

# mypy: disable-error-code="no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from agentkv.kernels.decode_fp8_triton import fp8_kernel
from agentkv.kernels.decode_groups_triton import groups_kernel
from agentkv.kernels.paged_decode import DecodePlan, _merge_kernel
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages


class Tuning(NamedTuple):
    """How a kernel is compiled: warps of a program, stages of its pipeline, and of e4m3 the tokens of a tile (codes in groups
    are read group by group); most registers of a thread, None: as many as it likes; of e4m3 the words that are read at once."""

    warps: int
    stages: int
    block: int = 64
    registers: int | None = None
    span: int = 32


GROUPS, FP8 = Tuning(1, 3), Tuning(2, 3, 64)
"""What serves best on an H200."""


def serves(layout: PageLayout) -> bool:
    """Can `paged_dequant_decode` read such pages? Groups of keys must be a power of two of 16 tokens or more, and codes of a
    group of values fill whole words of 16 bits."""
    if layout.fp8:
        return layout.head_dim % 2 == 0 and layout.chunk % 2 == 0
    group = layout.key_group
    return group >= 16 and group & (group - 1) == 0 and layout.code_bytes % 2 == 0 and layout.value_group % 2 == 0


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
    beside: tuple[Tensor, Tensor] | None = None,
    tuned: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` tokens a row over the slots that the plan names.

    q: `[num_rows * queries, num_heads, head_dim]`, half precision or float32, last dim contiguous. table: int32 `[max_rows,
    max_pages]`. plan: of rows, not of heads. bias, causal: see `dequant_decode`. beside: out and lse of the same queries over
    another part, contiguous, merged with this one (`merge_parts`) at no launch of its own. Products are those of halves; float32 where q
    is, or where scales in groups are no halves.
    Returns out like q and lse `[num_tokens, num_heads]`, natural, float32; 0 and -inf where nothing is seen. Raises ValueError
    for pages that are not `serves`.
    """
    layout = payload.layout
    if not serves(layout) or plan.per_head:
        raise ValueError(f"groups of {layout.key_group} keys, or a plan by head: this kernel wants powers of two from 16")
    num_tokens, num_heads, head_dim = q.shape
    heads, group = layout.num_kv_heads, num_heads // layout.num_kv_heads
    items, members = len(plan.pieces) * heads, group * queries
    parts = torch.empty(items, members, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(items, members, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    shared = {"HEADS": heads, "GROUP": group, "QUERIES": queries, "DIM": head_dim}
    named: dict[str, Any] = {
        "MEMBERS_PAD": max(8, triton.next_power_of_2(members)), "CAUSAL": causal, "HAS_BIAS": bias is not None,
        "PAGE": layout.page_size, **shared,
    }  # fmt: skip
    work = table, part_lse if bias is None else bias, plan.lens, plan.ends, plan.pieces, parts, part_lse
    numbers = scale * 1.4426950408889634, plan.ends.numel(), q.stride(0), q.stride(1)
    steps = table.stride(0), 0 if bias is None else bias.stride(0)
    if layout.fp8:
        _launch_fp8(q, payload, plan.programs, work, numbers, steps, named, tuned or FP8)
    else:
        _launch_groups(q, payload, plan.programs, work, numbers, steps, named, tuned or GROUPS)
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    share = min(dim_pad, 32)
    beside_out, beside_lse = beside or (None, None)
    _merge_kernel[(num_tokens, num_heads, dim_pad // share)](
        parts, part_lse, plan.ends, out, lse, PER_HEAD=False, SHARE=share, MOST=plan.most, num_warps=2,
        beside_ptr=beside_out, beside_lse_ptr=beside_lse, **shared,
    )  # fmt: skip
    return out, lse


def _launch_fp8(
    q: Tensor, payload: QuantizedPages, programs: int, work: tuple[Tensor, ...], numbers: tuple[Any, ...],
    steps: tuple[int, int], named: dict[str, Any], tuned: Tuning,
) -> None:  # fmt: skip
    layout = payload.layout
    span = min(tuned.span, max(16, triton.next_power_of_2(layout.head_dim // 2)))
    words, scales = _as(payload, torch.int16), _as(payload, layout.dtype)[:, layout.params_start // layout.dtype.itemsize :]
    fp8_kernel[(programs,)](
        q, words, scales, *work, *numbers, words.stride(0), scales.stride(0), *steps,
        CHUNK=layout.chunk // 2, ITEMS=layout.chunk // layout.dtype.itemsize,
        SPAN=span, SPANS=-(-layout.head_dim // 2 // span), BLOCK=tuned.block, WIDE=q.dtype == torch.float32,
        NUM_STAGES=tuned.stages, num_warps=tuned.warps, maxnreg=tuned.registers, **named,
    )  # fmt: skip


def _launch_groups(
    q: Tensor, payload: QuantizedPages, programs: int, work: tuple[Tensor, ...], numbers: tuple[Any, ...],
    steps: tuple[int, int], named: dict[str, Any], tuned: Tuning,
) -> None:  # fmt: skip
    layout = payload.layout
    wide = q.dtype == torch.float32 or layout.dtype != torch.float16
    words, params = _as(payload, torch.int16), _as(payload, layout.dtype)[:, layout.params_start // layout.dtype.itemsize :]
    pairs = words if wide else _as(payload, torch.int32)[:, layout.params_start // 4 :]
    span = math.gcd(layout.code_bytes, layout.value_group) // 2
    groups_kernel[(programs,)](
        q, words, params, pairs, *work, *numbers, words.stride(0), params.stride(0), pairs.stride(0), *steps,
        BITS=layout.bits, KEY_GROUP=layout.key_group, VALUE_GROUP=layout.value_group, SPAN=span,
        WORDS_PAD=max(16, triton.next_power_of_2(layout.code_bytes // 2)), SPAN_PAD=max(16, triton.next_power_of_2(span)),
        WIDE=wide, NUM_STAGES=tuned.stages, num_warps=tuned.warps, maxnreg=tuned.registers, **named,
    )  # fmt: skip


def _as(payload: QuantizedPages, dtype: torch.dtype) -> Tensor:
    """The pages as numbers of a type."""
    return payload.pages[:, : payload.layout.page_bytes].view(dtype)
