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

MEMBERS, KEYS, SPAN = 128, 64, 2048
"""Most rows of a tile (query tokens times query heads of a KV head), and its keys; keys of one partial log-sum-exp."""
WARPS = 4


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
def _scores(q, k, ends_ptr, token, key, length, num_queries, scale, PRECISION: tl.constexpr):
    """Scores in base 2, -inf where a key is not seen."""
    end = tl.minimum(tl.load(ends_ptr + token, mask=token < num_queries, other=0), length)
    return tl.where(key[None, :] < end[:, None], tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))


@triton.jit(do_not_specialize=["first_slot", "length", "num_queries", "layer_step"])
def _page_lse_kernel(
    q_ptr, pages_ptr, entries_ptr, ends_ptr, lse_ptr, scale, first_slot, length, num_queries, layer_step,
    q_layer_stride, q_token_stride, q_head_stride, page_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PRECISION: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of one tile of rows over one span of keys of one head of one layer."""
    tile, span = tl.program_id(0) // HEADS, tl.program_id(1)
    head, layer = tl.program_id(0) % HEADS, tl.program_id(2).to(tl.int64)
    row = tl.arange(0, MEMBERS)
    token, member = tile * (MEMBERS // GROUP_PAD) + row // GROUP_PAD, row % GROUP_PAD
    q_ptr, pages_ptr = q_ptr + layer * q_layer_stride, pages_ptr + layer * layer_step
    q = _queries(q_ptr, token, member, head, num_queries, q_token_stride, q_head_stride, GROUP, DIM, DIM_PAD)
    top = tl.full([MEMBERS], -1e30, tl.float32)  # finite: a row may see nothing of a span
    sums = tl.zeros([MEMBERS], tl.float32)
    for start in tl.range(span * SPAN, tl.minimum(span * SPAN + SPAN, length), KEYS):
        key = start + tl.arange(0, KEYS)
        k = _keys(pages_ptr, entries_ptr, head, first_slot + key, key < length, page_stride, head_stride, PAGE, DIM, DIM_PAD)
        score = _scores(q, k, ends_ptr, token, key, length, num_queries, scale, PRECISION)
        new_top = tl.maximum(top, tl.max(score, 1))
        sums = sums * tl.exp2(top - new_top) + tl.sum(tl.exp2(score - new_top[:, None]), 1)
        top = new_top
    lse = tl.where(sums > 0, (top + tl.log2(tl.where(sums > 0, sums, 1.0))) * 0.6931471805599453, float("-inf"))
    line = ((layer * tl.num_programs(1) + span) * num_queries + token) * (HEADS * GROUP) + head * GROUP + member
    tl.store(lse_ptr + line, lse, mask=(token < num_queries) & (member < GROUP))


@triton.jit(do_not_specialize=["first_slot", "length", "num_queries", "layer_step"])
def _page_column_kernel(
    q_ptr, pages_ptr, entries_ptr, ends_ptr, lse_ptr, out_ptr, scale, first_slot, length, num_queries, layer_step,
    q_layer_stride, q_token_stride, q_head_stride, page_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PRECISION: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr,
    BY_HEAD: tl.constexpr, MAXIMUM: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head of one layer over all queries, in order. BY_HEAD: a line for each query head."""
    TOKENS: tl.constexpr = MEMBERS // GROUP_PAD
    LINES: tl.constexpr = GROUP_PAD if BY_HEAD else 1
    head, block, layer = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    key, row = block * KEYS + tl.arange(0, KEYS), tl.arange(0, MEMBERS)
    q_ptr, pages_ptr = q_ptr + layer * q_layer_stride, pages_ptr + layer * layer_step
    k = _keys(pages_ptr, entries_ptr, head, first_slot + key, key < length, page_stride, head_stride, PAGE, DIM, DIM_PAD)
    acc = tl.zeros([LINES, KEYS], tl.float32)
    for first in tl.range(0, num_queries, TOKENS, num_stages=NUM_STAGES):
        token, member = first + row // GROUP_PAD, row % GROUP_PAD
        q = _queries(q_ptr, token, member, head, num_queries, q_token_stride, q_head_stride, GROUP, DIM, DIM_PAD)
        score = _scores(q, k, ends_ptr, token, key, length, num_queries, scale, PRECISION)
        place = (layer * num_queries + token) * (HEADS * GROUP) + head * GROUP + member
        lse = tl.load(lse_ptr + place, mask=(token < num_queries) & (member < GROUP), other=float("-inf")) * 1.4426950408889634
        seen = lse > float("-inf")
        mass = tl.where(seen[:, None], tl.exp2(score - tl.where(seen, lse, 0.0)[:, None]), 0.0)
        by_line = tl.reshape(mass, [MEMBERS // LINES, LINES, KEYS])
        acc = tl.maximum(acc, tl.max(by_line, 0)) if MAXIMUM else acc + tl.sum(by_line, 0)
    number = tl.arange(0, LINES)
    line = (layer * HEADS + head) * (GROUP if BY_HEAD else 1) + number
    mask = (number[:, None] < GROUP) & (key[None, :] < length)
    tl.store(out_ptr + line[:, None] * length + key[None, :], acc, mask=mask)


def paged_lse(q: Tensor, keys: PagedKeys, ends: Tensor, scale: float) -> Tensor:
    """Natural log-sum-exp float32 `[num_layers, num_queries, num_heads]` of the scaled scores, -inf where a query sees nothing.

    q: `[num_layers, num_queries, num_heads, head_dim]`. ends: int32 `[num_queries]`, query i sees the keys before ends[i].
    """
    num_layers, num_queries, num_heads, _ = q.shape
    num_kv_heads = keys.pages.shape[1]
    spans, shape = max(1, triton.cdiv(keys.length, SPAN)), _shape(q, keys.pages)
    parts = torch.empty(num_layers, spans, num_queries, num_heads, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(num_queries * shape["GROUP_PAD"], shape["MEMBERS"])
    _page_lse_kernel[(tiles * num_kv_heads, spans, num_layers)](*_given(q, keys, ends, parts, None, scale), SPAN=SPAN, **shape)
    return parts[:, 0] if spans == 1 else torch.logsumexp(parts, 1)


def paged_columns(
    q: Tensor, keys: PagedKeys, lse: Tensor, ends: Tensor, scale: float, *, by_head: bool = False, maximum: bool = False
) -> Tensor:
    """For each key the sum (or the maximum) over queries of exp(score - lse), and over the query heads of its group, or
    (by_head) for each query head: float32 `[num_layers, num_kv_heads or num_heads, length]`. lse: as of `paged_lse`."""
    num_layers, _, num_heads, _ = q.shape
    num_kv_heads = keys.pages.shape[1]
    dims = num_layers, num_heads if by_head else num_kv_heads, keys.length
    out = torch.empty(dims, dtype=torch.float32, device=q.device)
    if keys.length:
        shape = _shape(q, keys.pages)
        alone = q.shape[1] * shape["GROUP_PAD"] <= shape["MEMBERS"]  # one tile: there is none to be fetched meanwhile
        _page_column_kernel[(triton.cdiv(keys.length, KEYS) * num_kv_heads, num_layers)](
            *_given(q, keys, ends, lse.contiguous(), out, scale), BY_HEAD=by_head, MAXIMUM=maximum,
            NUM_STAGES=1 if alone else 2, **shape,
        )  # fmt: skip
    return out


def _given(q: Tensor, keys: PagedKeys, ends: Tensor, lse: Tensor, out: Tensor | None, scale: float) -> list[Any]:
    tensors = [q, keys.pages, keys.entries, ends, lse, *([] if out is None else [out])]
    numbers = [scale * 1.4426950408889634, keys.first, keys.length, q.shape[1], keys.step]
    return [*tensors, *numbers, *q.stride()[:3], *keys.pages.stride()[:2]]


def _shape(q: Tensor, pages: Tensor) -> dict[str, Any]:
    num_queries, num_heads, head_dim = q.shape[1:]
    group = num_heads // pages.shape[1]
    group_pad = triton.next_power_of_2(group)
    members = min(MEMBERS, max(16, triton.next_power_of_2(num_queries) * group_pad))
    return {
        "HEADS": pages.shape[1],
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "PAGE": pages.shape[3],
        "DIM": head_dim,
        "DIM_PAD": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "MEMBERS": members,
        "KEYS": KEYS,
        "num_warps": WARPS,
    }
