"""Attention of a few hundred new tokens, of one row or several, behind long histories in pages, on a GPU.

A chunk of a prompt fills the device by itself (`paged_prefill`); a tool result of 64 tokens does not. So the query heads of a
KV head share a tile, and what a tile sees is cut into pieces by its own length alone, which are merged in order (flash
decoding, arXiv 2311.01282). Tiles, lengths and first slots are read on the device: a step can be captured and replayed with
others.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.query_tiles import QueryTiles

SHORT, MOST = 1024, 16
"""A tile's pieces are of SHORT slots until it has MOST of them, or half as many where its row has other tiles; then they are
longer."""


class Tuning(NamedTuple):
    """Keys of a tile, warps of a program, stages of its pipeline."""

    keys: int
    warps: int
    stages: int


def tuning(head_dim: int, itemsize: int) -> Tuning:
    """The fastest that fit the registers and the shared memory, see `tile_size`: heads of 128 in half precision by a sweep on
    an H200 (32 to 512 tokens behind 2K to 128K), 130 to 350 TFLOP/s."""
    if itemsize == 4:
        return Tuning(32 if head_dim <= 128 else 16, 4, 2)
    return Tuning(128, 8, 3) if head_dim <= 128 else Tuning(32, 4, 2)


def serves(q: Tensor, pages: Tensor) -> bool:
    """Can `paged_extend` be given these?"""
    known = q.dtype in (torch.float16, torch.bfloat16, torch.float32) and pages.dtype == q.dtype
    return known and q.device.type == "cuda" and q.stride(2) == 1


@triton.jit
def _tile(
    q, top, sums, acc, first, low, last, limit, head_ptr, entries_ptr, scale, page_stride,
    MASKED: tl.constexpr, STARTS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running sums after KEYS more slots from `first` on. low, last: first and last slot that each query sees; limit: slot
    behind the last of the piece."""
    slot = first + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM_PAD)
    if MASKED:
        entry = tl.load(entries_ptr + slot // PAGE, mask=slot < limit, other=0)
        live = (slot < limit)[:, None] & (dim[None, :] < DIM)
    else:
        entry = tl.load(entries_ptr + slot // PAGE)
        live = dim[None, :] < DIM
    place = entry.to(tl.int64) * page_stride + (slot % PAGE) * DIM
    offset = place[:, None] + dim[None, :]
    k = tl.load(head_ptr + offset, mask=live, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        seen = (slot[None, :] <= last[:, None]) & (slot[None, :] < limit)
        if STARTS:
            seen = seen & (slot[None, :] >= low[:, None])
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(tl.maximum(top, tl.max(score, 1)), -1e30)  # a query may see nothing of a piece
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    v = tl.load(head_ptr + offset + PAGE * DIM, mask=live, other=0.0)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, sums * shrink + tl.sum(weight, 1), acc


@triton.jit(do_not_specialize=["starts_ptr", "num_tokens", "row_stride", "table_head_stride"])
def _extend_kernel(
    q_ptr, pages_ptr, table_ptr, lines_ptr, lens_ptr, starts_ptr, firsts_ptr, rows_ptr, stops_ptr, out_ptr, lse_ptr,
    scale, num_tokens, q_token, q_head, page_stride, head_stride, row_stride, table_head_stride,
    OWN: tl.constexpr, STARTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, SHORT: tl.constexpr, MOST: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one KV head, one piece of what the tile sees. DIRECT: there is only one."""
    tile, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(firsts_ptr + tile).to(tl.int32)
    row = tl.load(rows_ptr + tile)
    row_stop = tl.load(stops_ptr + row).to(tl.int32)
    if begin < row_stop:
        stop = tl.minimum(begin + TOKENS, row_stop)
        member = tl.arange(0, TOKENS * GROUP_PAD)
        token, of_group = begin + member // GROUP_PAD, member % GROUP_PAD
        dim = tl.arange(0, DIM_PAD)
        living = (token < stop) & (of_group < GROUP)
        live_q = living[:, None] & (dim[None, :] < DIM)
        q_place = token.to(tl.int64) * q_token + (head * GROUP + of_group) * q_head
        q = tl.load(q_ptr + q_place[:, None] + dim[None, :], mask=live_q, other=0.0)
        low, first = token * 0, 0
        if OWN:
            held = tl.load(lens_ptr + row)
            last = held - row_stop + token  # the slot of the query's own token
            limit = held - row_stop + stop
            if STARTS:
                low = tl.load(starts_ptr + token, mask=living, other=0)
                first = tl.load(starts_ptr + begin)
        else:
            limit = tl.load(lens_ptr + row * HEADS + head)
            last = token * 0 + limit
        row_begin = tl.load(stops_ptr + row - 1, mask=row > 0, other=0).to(tl.int32)
        most = tl.where(row_stop - row_begin > TOKENS, MOST // 2, MOST)
        size = tl.cdiv(tl.maximum(tl.cdiv(limit - first, most), SHORT), KEYS) * KEYS
        low_slot = first + piece * size
        end = tl.minimum(low_slot + size, limit)
        table_row = table_ptr + tl.load(lines_ptr + row) * row_stride + head * table_head_stride
        head_ptr = pages_ptr + head.to(tl.int64) * head_stride
        top = tl.full([TOKENS * GROUP_PAD], float("-inf"), tl.float32)
        sums = tl.zeros([TOKENS * GROUP_PAD], tl.float32)
        acc = tl.zeros([TOKENS * GROUP_PAD, DIM_PAD], tl.float32)
        clear = low_slot  # every query of the tile sees all slots from low_slot to here
        if not STARTS:
            common = tl.minimum(end, limit - stop + begin + 1) if OWN else end
            clear = low_slot + tl.maximum(common - low_slot, 0) // KEYS * KEYS
            for at in tl.range(low_slot, clear, KEYS, num_stages=STAGES):
                top, sums, acc = _tile(
                    q, top, sums, acc, at, low, last, end, head_ptr, table_row, scale, page_stride,
                    False, STARTS, PAGE, DIM, DIM_PAD, KEYS, PRECISION,
                )  # fmt: skip
        for at in tl.range(clear, end, KEYS, num_stages=STAGES):
            top, sums, acc = _tile(
                q, top, sums, acc, at, low, last, end, head_ptr, table_row, scale, page_stride,
                True, STARTS, PAGE, DIM, DIM_PAD, KEYS, PRECISION,
            )  # fmt: skip
        safe = tl.where(sums > 0, sums, 1.0)
        lse = tl.where(sums > 0, top + tl.log2(safe), float("-inf"))
        place = token.to(tl.int64) * (HEADS * GROUP) + head * GROUP + of_group
        if DIRECT:
            lse = lse * 0.6931471805599453
        else:
            place += piece.to(tl.int64) * num_tokens * (HEADS * GROUP)
        tl.store(lse_ptr + place, lse, mask=living)
        if low_slot < end or DIRECT:
            tl.store(out_ptr + place[:, None] * DIM + dim[None, :], acc / safe[:, None], mask=live_q)


@triton.jit(do_not_specialize=["pieces", "lines"])
def _merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, pieces, lines,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One token and head: its pieces in order. lines: tokens times heads."""
    line = tl.program_id(0).to(tl.int64)
    number, dim = tl.arange(0, MOST), tl.arange(0, DIM_PAD)
    lse = tl.load(part_lse_ptr + number * lines + line, mask=number < pieces, other=float("-inf"))
    some = lse > float("-inf")  # nothing was written of a piece in which nothing is seen
    place = (number * lines + line)[:, None] * DIM + dim[None, :]
    part = tl.load(part_ptr + place, mask=some[:, None] & (dim[None, :] < DIM), other=0.0)
    top = tl.maximum(tl.max(lse, 0), -1e30)
    weight = tl.exp2(lse - top)
    sums = tl.sum(weight, 0)
    safe = tl.where(sums > 0, sums, 1.0)
    tl.store(out_ptr + line * DIM + dim, tl.sum(part * weight[:, None], 0) / safe, mask=dim < DIM)
    tl.store(lse_ptr + line, tl.where(sums > 0, (top + tl.log2(safe)) * 0.6931471805599453, float("-inf")))


def paged_extend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lines: Tensor,
    lens: Tensor,
    tiles: QueryTiles,
    scale: float,
    *,
    most: int,
    starts: Tensor | None = None,
    tuned: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over what their rows hold, causal where these are a row's last slots.

    q: `[num_tokens, num_heads, head_dim]`, half precision or float32, last dim contiguous, in the order of `tiles`, of the size
    that `tile_size` gives. pages: one layer's view `[num_granules, num_kv_heads, 2, page_size, head_dim]`. table: int32
    `[max_rows, max_pages]`, or `[max_rows, num_kv_heads, max_pages]` where every head has pages of its own. lines: int64
    `[num_rows]`, a row's line of the table. lens: int32, slots held: `[num_rows]`, the tokens' own included, each of which sees
    up to its own; or `[num_rows, num_kv_heads]`, contiguous, of a part all of which every token sees. most: a host bound on
    them. starts: int32 `[num_tokens]`, first slot that each token sees, ascending in a row; of a row's own slots only.

    Returns out like q, contiguous, and lse `[num_tokens, num_heads]`, natural, float32; 0 and -inf where a token sees nothing.
    A token's bits do not depend on the other rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size, own = pages.shape[1], pages.shape[3], lens.dim() == 1
    group, dim_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    tuned = tuned or tuning(head_dim, q.element_size())
    pieces = max(1, min(MOST, triton.cdiv(most, SHORT)))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    parts, part_lse = out, lse
    if pieces > 1:
        parts = torch.empty(pieces, *q.shape, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(pieces, num_tokens, num_heads, dtype=torch.float32, device=q.device)
    _extend_kernel[(len(tiles.firsts), num_kv_heads, pieces)](
        q, pages, table, lines, lens, lens if starts is None else starts, tiles.firsts, tiles.rows, tiles.stops,
        parts, part_lse, scale * 1.4426950408889634, num_tokens, q.stride(0), q.stride(1), pages.stride(0), pages.stride(1),
        table.stride(0), table.stride(1) if table.dim() == 3 else 0,
        OWN=own, STARTS=starts is not None, HEADS=num_kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group),
        TOKENS=tiles.size, PAGE=page_size, DIM=head_dim, DIM_PAD=dim_pad, KEYS=tuned.keys, STAGES=tuned.stages,
        SHORT=SHORT, MOST=MOST, DIRECT=pieces == 1, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuned.warps,
    )  # fmt: skip
    if pieces > 1:
        _merge_kernel[(num_tokens * num_heads,)](
            parts, part_lse, out, lse, pieces, num_tokens * num_heads, DIM=head_dim, DIM_PAD=dim_pad, MOST=MOST, num_warps=2
        )
    return out, lse
