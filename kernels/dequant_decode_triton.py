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
from agentkv.kernels.merge_pieces_triton import TOGETHER, merge_kernel
from agentkv.kernels.overlap import overlapping
from agentkv.kernels.paged_decode import Cut, DecodePlan
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages

CUT = Cut(few=16, most=256, long=256)
"""A program is one warp, and only a dozen on each multiprocessor read as fast as memory can: rows are cut finer than for
`paged_decode`. Beside its pieces, on an H200 and with 8 KV heads, a step of one row of 128K takes 0.53 (e4m3) and 0.66 (4 bits)
of the time, of one of 32K 0.64 and 0.81, of eight of 32K 1.06 and 1.07."""


class Tuning(NamedTuple):
    """How a kernel is compiled: warps of a program, stages of its pipeline, and of e4m3 the tokens of a tile (codes in groups
    are read group by group). registers: most of a thread, None: as many as it likes."""

    warps: int = 1
    stages: int = 3
    block: int = 32
    registers: int | None = None


def tuning(layout: PageLayout, members: int) -> Tuning:
    """What serves best on an H200: programs of one warp, which wait for nobody, and sixteen of them on a multiprocessor where
    their registers allow it, so that eight rows of 32K with eight KV heads are one wave. members: query heads and tokens that
    read a KV head together."""
    return Tuning(registers=128 if layout.head_dim * max(8, members) <= 1024 else None)


def serves(layout: PageLayout) -> bool:
    """Can `paged_dequant_decode` read such pages? Groups of keys must be a power of two of 16 tokens or more, and codes of a
    group of values fill whole words of 16 bits."""
    if layout.fp8:
        return layout.head_dim % 2 == 0
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
    another part, contiguous, merged with this one (`merge_parts`) at no launch of its own. Products are those of halves, or of
    float32 where q is float32 or scales in groups are no halves.
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
    kernel, pages, more = _of_page(payload, q.dtype == torch.float32, tuned or tuning(layout, members))
    kernel[(items,)](  # one for each piece: those that end early make room for others
        q, *pages, table, part_lse if bias is None else bias, plan.lens, plan.ends, plan.pieces, parts, part_lse,
        scale * 1.4426950408889634, plan.ends.numel(), q.stride(0), q.stride(1), *(each.stride(0) for each in pages),
        table.stride(0), 0 if bias is None else bias.stride(0), **named, **more, **overlapping(q.device),
    )  # fmt: skip
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    share = min(dim_pad, 32)
    beside_out, beside_lse = beside or (None, None)
    merge_kernel[(num_tokens, num_heads, dim_pad // share)](
        parts, part_lse, plan.ends, out, lse, PER_HEAD=False, SHARE=share, AT_ONCE=TOGETHER, num_warps=2,
        beside_ptr=beside_out, beside_lse_ptr=beside_lse, **shared, **overlapping(q.device),
    )  # fmt: skip
    return out, lse


def _of_page(payload: QuantizedPages, wide: bool, tuned: Tuning) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
    """(kernel, the pages as it reads them, what it is compiled for) for such a payload. wide: products of float32."""
    layout = payload.layout
    more: dict[str, Any] = {"NUM_STAGES": tuned.stages, "num_warps": tuned.warps, "maxnreg": tuned.registers}
    if layout.fp8:
        words = payload.pages[:, : layout.params_start].view(torch.int16)
        more |= {"WORDS_PAD": max(16, triton.next_power_of_2(layout.head_dim // 2)), "BLOCK": tuned.block, "WIDE": wide}
        return fp8_kernel, (words, payload.slots().scales), more
    words, params = _as(payload, torch.int16), _as(payload, layout.dtype)[:, layout.params_start // layout.dtype.itemsize :]
    wide = wide or layout.dtype != torch.float16
    pairs = words if wide else _as(payload, torch.int32)[:, layout.params_start // 4 :]
    span = math.gcd(layout.code_bytes, layout.value_group) // 2
    more |= {"BITS": layout.bits, "KEY_GROUP": layout.key_group, "VALUE_GROUP": layout.value_group, "WIDE": wide, "SPAN": span}
    pads = {"WORDS_PAD": layout.code_bytes // 2, "SPAN_PAD": span}
    more |= {name: max(16, triton.next_power_of_2(size)) for name, size in pads.items()}
    return groups_kernel, (words, params, pairs), more


def _as(payload: QuantizedPages, dtype: torch.dtype) -> Tensor:
    """The pages as numbers of a type."""
    return payload.pages[:, : payload.layout.page_bytes].view(dtype)
