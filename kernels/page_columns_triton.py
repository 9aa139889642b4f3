"""Column sums of attention over keys that lie in pages, on a GPU. `window_scores` and `received_mass` are the twins.

Every column belongs to one program, which takes the queries in order: no atomics, the same bits each time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1 << 15
"""Most bytes of a tile's keys, and of its queries: what a multiprocessor shares holds some of each."""


NARROW = 32
"""Most keys, and rows, of a tile in float32, which is no matter of matrix units: a larger one would not fit in registers."""


class Tile(NamedTuple):
    """members: most rows (query tokens times query heads of a KV head); keys: most of a step; span: keys of a program, steps
    behind one another; warps: of a program; stages: tiles on their way or at work at once."""

    members: int
    keys: int
    span: int
    warps: int
    stages: int


LSE = Tile(128, 64, 2048, 4, 3)
FEW = Tile(128, 64, 2048, 4, 3)
"""Queries that fill one tile at most: they stay, and keys come by."""
MANY = Tile(128, 128, 128, 4, 2)
"""More of them: one step of keys stays."""


class PagedKeys(NamedTuple):
    """Keys of one sequence in layers at equal distances. pages: the first layer's, see `store_kv`; step: elements to the next
    layer; entries: int64 `[num_pages]`, granules; first: slot of the first key in the first page; length: keys."""

    pages: Tensor
    step: int
    entries: Tensor
    first: int
    length: int


@triton.jit
def _queries(q_ptr, token, member, head, num_queries, token_stride, head_stride, GROUP: tl.constexpr, DIM: tl.constexpr,
             DIM_PAD: tl.constexpr):  # fmt: skip
    """Rows (token, member of the head's group) `[rows, DIM_PAD]`, 0 where there is none."""
    dim = tl.arange(0, DIM_PAD)
    live = (token < num_queries) & (member < GROUP)
    place = token.to(tl.int64) * token_stride + (head * GROUP + member) * head_stride
    return tl.load(q_ptr + place[:, None] + dim[None, :], mask=live[:, None] & (dim[None, :] < DIM), other=0.0)


@triton.jit
def _keys(pages_ptr, entries_ptr, head, slot, there, page_stride, head_stride, PAGE: tl.constexpr, DIM: tl.constexpr,
          DIM_PAD: tl.constexpr):  # fmt: skip
    """Keys of slots `[keys, DIM_PAD]`, 0 where there is none."""
    dim = tl.arange(0, DIM_PAD)
    entry = tl.load(entries_ptr + slot // PAGE, mask=there, other=0).to(tl.int64)
    place = entry * page_stride + head * head_stride + (slot % PAGE) * DIM
    return tl.load(pages_ptr + place[:, None] + dim[None, :], mask=there[:, None] & (dim[None, :] < DIM), other=0.0)


@triton.jit
def _ends(ends_ptr, token, length, num_queries):
    """Keys that the rows' tokens see."""
    return tl.minimum(tl.load(ends_ptr + token, mask=token < num_queries, other=0), length)


@triton.jit(do_not_specialize=["entries_ptr", "ends_ptr", "lse_ptr", "first_slot", "length", "num_queries"])
def _page_lse_kernel(
    q_ptr, pages_ptr, entries_ptr, ends_ptr, lse_ptr, scale, first_slot, length, num_queries, layer_step,
    q_layer_stride, q_token_stride, q_head_stride, page_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PRECISION: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of one tile of rows over one span of keys of one head of one layer."""
    tile, span = tl.program_id(0) // HEADS, tl.program_id(1)
    head, layer = tl.program_id(0) % HEADS, tl.program_id(2).to(tl.int64)
    row = tl.arange(0, MEMBERS)
    token, member = tile * (MEMBERS // GROUP_PAD) + row // GROUP_PAD, row % GROUP_PAD
    q_ptr, pages_ptr = q_ptr + layer * q_layer_stride, pages_ptr + layer * layer_step
    q = _queries(q_ptr, token, member, head, num_queries, q_token_stride, q_head_stride, GROUP, DIM, DIM_PAD)
    end = _ends(ends_ptr, token, length, num_queries)
    top = tl.full([MEMBERS], -1e30, tl.float32)  # finite: a row may see nothing of a span
    sums = tl.zeros([MEMBERS], tl.float32)
    for start in tl.range(span * SPAN, tl.minimum(span * SPAN + SPAN, length), KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        k = _keys(pages_ptr, entries_ptr, head, first_slot + key, key < length, page_stride, head_stride, PAGE, DIM, DIM_PAD)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(key[None, :] < end[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        sums = sums * tl.exp2(top - new_top) + tl.sum(tl.exp2(score - new_top[:, None]), 1)
        top = new_top
    lse = tl.where(sums > 0, (top + tl.log2(tl.where(sums > 0, sums, 1.0))) * 0.6931471805599453, float("-inf"))
    line = ((layer * tl.num_programs(1) + span) * num_queries + token) * (HEADS * GROUP) + head * GROUP + member
    tl.store(lse_ptr + line, lse, mask=(token < num_queries) & (member < GROUP))


@triton.jit
def _tops(lse_ptr, line, token, member, head, num_queries, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Log-sum-exp of the rows in base 2, inf where nothing is to count."""
    place = (line + token) * (HEADS * GROUP) + head * GROUP + member
    lse = tl.load(lse_ptr + place, mask=(token < num_queries) & (member < GROUP), other=float("-inf"))
    return tl.where(lse > float("-inf"), lse * 1.4426950408889634, float("inf"))


@triton.jit
def _given(q, k, top, end, key, scale, LINES: tl.constexpr, MAXIMUM: tl.constexpr, PRECISION: tl.constexpr):
    """What a tile's rows give to keys, by line `[keys, LINES]`. Keys stand first: a key's rows lie in few threads then."""
    score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - top[None, :]
    mass = tl.exp2(tl.where(key[:, None] < end[None, :], score, float("-inf")))
    by_line = tl.reshape(mass, [mass.shape[0], mass.shape[1] // LINES, LINES])
    return tl.max(by_line, 1) if MAXIMUM else tl.sum(by_line, 1)


@triton.jit(do_not_specialize=["entries_ptr", "ends_ptr", "lse_ptr", "first_slot", "length", "num_queries"])
def _page_column_kernel(
    q_ptr, pages_ptr, entries_ptr, ends_ptr, lse_ptr, out_ptr, scale, first_slot, length, num_queries, layer_step,
    q_layer_stride, q_token_stride, q_head_stride, page_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PRECISION: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, BY_HEAD: tl.constexpr, MAXIMUM: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Keys of one head of one layer over all queries, in order: FEW: a span of them over one tile, else KEYS of them over
    several. BY_HEAD: a line for each query head."""
    TOKENS: tl.constexpr = MEMBERS // GROUP_PAD
    LINES: tl.constexpr = GROUP_PAD if BY_HEAD else 1
    head, low, layer = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * SPAN, tl.program_id(1).to(tl.int64)
    row = tl.arange(0, MEMBERS)
    token, member = row // GROUP_PAD, row % GROUP_PAD
    q_ptr, pages_ptr = q_ptr + layer * q_layer_stride, pages_ptr + layer * layer_step
    number = tl.arange(0, LINES)
    lines = ((layer * HEADS + head) * (GROUP if BY_HEAD else 1) + number) * length
    if FEW:
        q = _queries(q_ptr, token, member, head, num_queries, q_token_stride, q_head_stride, GROUP, DIM, DIM_PAD)
        end = _ends(ends_ptr, token, length, num_queries)
        top = _tops(lse_ptr, layer * num_queries, token, member, head, num_queries, HEADS, GROUP)
        for start in tl.range(low, tl.minimum(low + SPAN, length), KEYS, num_stages=STAGES):
            key = start + tl.arange(0, KEYS)
            live = key < length
            k = _keys(pages_ptr, entries_ptr, head, first_slot + key, live, page_stride, head_stride, PAGE, DIM, DIM_PAD)
            sums = _given(q, k, top, end, key, scale, LINES, MAXIMUM, PRECISION)
            tl.store(out_ptr + key[:, None] + lines[None, :], sums, mask=live[:, None] & (number[None, :] < GROUP))
    else:
        key = low + tl.arange(0, KEYS)
        live = key < length
        k = _keys(pages_ptr, entries_ptr, head, first_slot + key, live, page_stride, head_stride, PAGE, DIM, DIM_PAD)
        sums = tl.zeros([KEYS, LINES], tl.float32)
        for first in tl.range(0, num_queries, TOKENS, num_stages=STAGES):
            q = _queries(q_ptr, first + token, member, head, num_queries, q_token_stride, q_head_stride, GROUP, DIM, DIM_PAD)
            end = _ends(ends_ptr, first + token, length, num_queries)
            top = _tops(lse_ptr, layer * num_queries, first + token, member, head, num_queries, HEADS, GROUP)
            more = _given(q, k, top, end, key, scale, LINES, MAXIMUM, PRECISION)
            sums = tl.maximum(sums, more) if MAXIMUM else sums + more
        tl.store(out_ptr + key[:, None] + lines[None, :], sums, mask=live[:, None] & (number[None, :] < GROUP))


def paged_lse(q: Tensor, keys: PagedKeys, ends: Tensor, scale: float, *, tile: Tile = LSE) -> Tensor:
    """Natural log-sum-exp float32 `[num_layers, num_queries, num_heads]` of the scaled scores, -inf where a query sees nothing.

    q: `[num_layers, num_queries, num_heads, head_dim]`. ends: int32 `[num_queries]`, query i sees the keys before ends[i].
    """
    num_layers, num_queries, num_heads, _ = q.shape
    num_kv_heads = keys.pages.shape[1]
    spans, shape = max(1, triton.cdiv(keys.length, tile.span)), _shape(q, keys.pages, tile)
    parts = torch.empty(num_layers, spans, num_queries, num_heads, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(num_queries * shape["GROUP_PAD"], shape["MEMBERS"])
    _page_lse_kernel[(tiles * num_kv_heads, spans, num_layers)](*_arguments(q, keys, ends, parts, None, scale), **shape)
    return parts[:, 0] if spans == 1 else torch.logsumexp(parts, 1)


def paged_columns(
    q: Tensor,
    keys: PagedKeys,
    lse: Tensor,
    ends: Tensor,
    scale: float,
    *,
    by_head: bool = False,
    maximum: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """For each key the sum (or the maximum) over queries of exp(score - lse), and over the query heads of its group, or
    (by_head) for each query head: float32 `[num_layers, num_kv_heads or num_heads, length]`. lse: as of `paged_lse`.
    tile: None for FEW or MANY."""
    num_layers, num_queries, num_heads, _ = q.shape
    num_kv_heads = keys.pages.shape[1]
    dims = num_layers, num_heads if by_head else num_kv_heads, keys.length
    out = torch.empty(dims, dtype=torch.float32, device=q.device)
    if keys.length:
        shape = _shape(q, keys.pages, tile or FEW)
        few = num_queries * shape["GROUP_PAD"] <= shape["MEMBERS"]
        shape = shape if few else _shape(q, keys.pages, tile or MANY)
        span = shape["SPAN"] if few else shape["KEYS"]
        _page_column_kernel[(triton.cdiv(keys.length, span) * num_kv_heads, num_layers)](
            *_arguments(q, keys, ends, lse.contiguous(), out, scale),
            **shape | {"SPAN": span, "BY_HEAD": by_head, "MAXIMUM": maximum, "FEW": few},
        )
    return out


def _arguments(q: Tensor, keys: PagedKeys, ends: Tensor, lse: Tensor, out: Tensor | None, scale: float) -> list[Any]:
    tensors = [q, keys.pages, keys.entries, ends, lse, *([] if out is None else [out])]
    numbers = [scale * 1.4426950408889634, keys.first, keys.length, q.shape[1], keys.step]
    return [*tensors, *numbers, *q.stride()[:3], *keys.pages.stride()[:2]]


def _shape(q: Tensor, pages: Tensor, tile: Tile) -> dict[str, Any]:
    num_queries, num_heads, head_dim = q.shape[1:]
    group_pad = triton.next_power_of_2(num_heads // pages.shape[1])
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    most = WIDEST // (dim_pad * q.element_size()) if q.dtype != torch.float32 else NARROW
    members = min(tile.members, most, triton.next_power_of_2(num_queries) * group_pad)
    return {
        "HEADS": pages.shape[1],
        "GROUP": num_heads // pages.shape[1],
        "GROUP_PAD": group_pad,
        "PAGE": pages.shape[3],
        "DIM": head_dim,
        "DIM_PAD": dim_pad,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "MEMBERS": max(16, group_pad, members),
        "KEYS": min(tile.keys, most),
        "SPAN": tile.span,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
