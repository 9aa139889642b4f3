"""Attention of a prompt's chunk over paged keys and values on a GPU: causal, with the log-sum-exp of every query.

Three ways, the fastest by measurement is taken (docs/bench/): read pages in place, tile by tile (`pages`); gather the row and
use torch's flash attention (`flash`); gather the history, which every query sees whole, for cuDNN's attention, and go on from
its sums over the pages of the rest (`cudnn`). Pages of 16 tokens in any order are too small for the bulk copies that the
libraries' own kernels live on, and a gather costs a few percent of a long chunk.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from agentkv.kernels.gather_pages import gather_pages

Route = Literal["pages", "flash", "cudnn"]
HISTORY_STEP, QUERY_STEP = 2048, 256
"""cuDNN plans each pair of sizes once, which takes long: it is given whole steps of history and of queries."""


class Tiles(NamedTuple):
    """Of the kernel over pages: queries and keys of a tile, warps, stages of the pipeline; registers: most of a thread, so that
    a multiprocessor holds two programs, of which one multiplies while the other takes exponentials."""

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 2
    registers: int | None = 128


def tiles_of(num_tokens: int, head_dim: int) -> Tiles:
    """The fastest on an H200: small ones where there are too few queries for large ones to fill it. Wide heads need more
    registers than two programs leave each other."""
    if head_dim > 128:
        return Tiles(stages=3, registers=None)
    return Tiles(64, 64, 4, 3, None) if num_tokens <= 2 * QUERY_STEP else Tiles()


def serves(q: Tensor, pages: Tensor) -> bool:
    """Can `paged_prefill` be given these by every route that it chooses by itself?"""
    half = q.dtype in (torch.float16, torch.bfloat16) and pages.dtype == q.dtype
    return half and q.device.type == "cuda" and q.shape[2] % 8 == 0 and q.shape[2] <= 256 and q.stride(2) == 1


def route_of(num_tokens: int, history: int) -> Route:
    """The fastest (docs/bench/) for so many new tokens behind so many; `pages` where cuDNN refuses what `cudnn` needs."""
    if num_tokens < QUERY_STEP:
        return "flash"
    return "cudnn" if history >= HISTORY_STEP else "pages"


def paged_prefill(
    q: Tensor,
    pages: Tensor,
    entries: Tensor,
    length: int,
    scale: float,
    *,
    route: Route | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one row's newest tokens, each over all slots up to its own (which are stored already).

    q: `[num_tokens, num_heads, head_dim]`, the last num_tokens of the row's `length` slots, last dim contiguous. pages: one
    layer's view `[num_granules, num_kv_heads, 2, page_size, head_dim]`. entries: int32 `[max_pages]`, the row's line of the
    page table. Returns out like q, contiguous, and lse `[num_tokens, num_heads]`, natural, float32.
    """
    chosen = route or route_of(len(q), length - len(q))
    if chosen == "flash":
        return _flash(q, *gather_pages(pages, entries, length), scale)
    tiles = tiles or tiles_of(len(q), q.shape[2])
    whole = (length - len(q)) // HISTORY_STEP * HISTORY_STEP
    if chosen == "cudnn" and whole:
        k, v = gather_pages(pages, entries, whole)
        if route is not None or _cudnn_serves(q, k, v):
            return _over_pages(q, pages, entries, length, scale, tiles, whole, _cudnn(q, k, v, scale))
    return _over_pages(q, pages, entries, length, scale, tiles)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """torch's causal flash attention, of which the last query sees all keys. k, v: `[num_kv_heads, length, head_dim]`."""
    queries, keys, values = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, True, False, scale=scale)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    queries, keys, values = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    given = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's attention without a mask, the queries filled up to a whole step."""
    count = len(q)
    padded = functional.pad(q, (0, 0, 0, 0, 0, -count % QUERY_STEP)) if count % QUERY_STEP else q  # a pad by 0 copies
    queries, keys, values = padded.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(queries, keys, values, None, True, 0.0, False, False, scale=scale)
    return out.squeeze(0).transpose(0, 1)[:count], lse.reshape(lse.shape[1], -1).transpose(0, 1)[:count]


@triton.jit
def _tile(
    q, top, sums, acc, first, last, limit, head_ptr, entries_ptr, scale, page_stride,
    MASKED: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The running sums after KEYS more slots from `first` on. last: slot of each query's own token; limit: slots there are."""
    token = first + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM_PAD)
    if MASKED:
        entry = tl.load(entries_ptr + token // PAGE, mask=token < limit, other=0)
        live_kv = (token < limit)[:, None] & (dim[None, :] < DIM)
    else:
        entry = tl.load(entries_ptr + token // PAGE)
        live_kv = dim[None, :] < DIM
    place = entry.to(tl.int64) * page_stride + (token % PAGE) * DIM
    offset = place[:, None] + dim[None, :]
    k = tl.load(head_ptr + offset, mask=live_kv, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        score = tl.where(token[None, :] <= last[:, None], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    v = tl.load(head_ptr + offset + PAGE * DIM, mask=live_kv, other=0.0)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, sums * shrink + tl.sum(weight, 1), acc


@triton.jit(do_not_specialize=["num_tokens", "start", "length"])
def _prefill_kernel(
    q_ptr, pages_ptr, entries_ptr, out_ptr, lse_ptr, seen_ptr, seen_lse_ptr, scale, num_tokens, start, length,
    q_token, q_head, page_stride, head_stride, seen_token, seen_head, seen_lse_token, seen_lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head; the tiles with the most keys first. SEEN: attention over the slots before `start` is
    there already, and what follows is added to it."""
    head = tl.program_id(0)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    token = begin + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_PAD)
    live = (token[:, None] < num_tokens) & (dim[None, :] < DIM)
    q = tl.load(q_ptr + token.to(tl.int64)[:, None] * q_token + head * q_head + dim[None, :], mask=live, other=0.0)
    history = length - num_tokens
    last = tl.minimum(history + token, length - 1)
    head_ptr = pages_ptr + (head // GROUP).to(tl.int64) * head_stride
    if SEEN:
        place = token.to(tl.int64) * seen_lse_token + head * seen_lse_head
        top = tl.load(seen_lse_ptr + place, mask=token < num_tokens, other=0.0) * 1.4426950408889634
        sums = tl.full([QUERIES], 1.0, tl.float32)
        place = token.to(tl.int64)[:, None] * seen_token + head * seen_head + dim[None, :]
        acc = tl.load(seen_ptr + place, mask=live, other=0.0).to(tl.float32)
    else:
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        sums = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    whole = start + (history + begin + 1 - start) // KEYS * KEYS  # every query of the tile sees these
    stop = tl.minimum(history + begin + QUERIES, length)
    for first in tl.range(start, whole, KEYS, num_stages=STAGES):
        top, sums, acc = _tile(
            q, top, sums, acc, first, last, length, head_ptr, entries_ptr, scale, page_stride,
            False, PAGE, DIM, DIM_PAD, KEYS, PRECISION,
        )  # fmt: skip
    for first in tl.range(whole, stop, KEYS, num_stages=STAGES):
        top, sums, acc = _tile(
            q, top, sums, acc, first, last, length, head_ptr, entries_ptr, scale, page_stride,
            True, PAGE, DIM, DIM_PAD, KEYS, PRECISION,
        )  # fmt: skip
    place = token.to(tl.int64) * HEADS + head
    tl.store(out_ptr + place[:, None] * DIM + dim[None, :], acc / sums[:, None], mask=live)
    tl.store(lse_ptr + place, (top + tl.log2(sums)) * 0.6931471805599453, mask=token < num_tokens)


def _over_pages(
    q: Tensor,
    pages: Tensor,
    entries: Tensor,
    length: int,
    scale: float,
    tiles: Tiles,
    start: int = 0,
    seen: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel that reads pages in place. seen: out and lse over the slots before `start`, which all queries see."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.shape[1], pages.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    before = seen or (out, lse)
    _prefill_kernel[(num_heads, triton.cdiv(num_tokens, tiles.queries))](
        q, pages, entries, out, lse, *before, scale * 1.4426950408889634, num_tokens, start, length, q.stride(0), q.stride(1),
        pages.stride(0), pages.stride(1), *before[0].stride()[:2], *before[1].stride(),
        HEADS=num_heads, GROUP=num_heads // num_kv_heads, PAGE=page_size, DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)), QUERIES=tiles.queries, KEYS=tiles.keys, STAGES=tiles.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", SEEN=seen is not None, num_warps=tiles.warps,
        maxnreg=tiles.registers,
    )  # fmt: skip
    return out, lse
