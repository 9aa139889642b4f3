"""Attention of decode queries over the pieces of their rows, see `paged_decode`: one stream of tiles a program.

A program's pieces are one loop over all their tiles, so that the first tiles of a piece are on their way while the last of the
one before it are worked on: short rows, whose pieces are a tile each, are read as fast as long ones.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl

from agentkv.kernels.overlap import follow


@triton.jit
def _piece_of(pieces_ptr, item, HEADS: tl.constexpr, PER_HEAD: tl.constexpr):
    """Line, first slot, slot behind the last, line of the page table."""
    piece = pieces_ptr + (item if PER_HEAD else item // HEADS) * 4
    return tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)


@triton.jit
def _tiles_of(pieces_ptr, total, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Tiles of all pieces of this program; one without slots is a tile too."""
    tiles = total * 0
    for begin in range(tl.program_id(0), total, tl.num_programs(0) * SPAN):
        items = begin + tl.arange(0, SPAN) * tl.num_programs(0)
        piece = pieces_ptr + (items if PER_HEAD else items // HEADS) * 4
        low = tl.load(piece + 1, mask=items < total, other=0)
        stop = tl.load(piece + 2, mask=items < total, other=0)
        tiles += tl.sum(tl.where(items < total, tl.maximum(tl.cdiv(stop - low, BLOCK), 1), 0), 0)
    return tiles


@triton.jit
def _entries_of(
    table_ptr, item, line, table_line, first, stop, row_stride, table_head_stride,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BY_SLOT: tl.constexpr,
):  # fmt: skip
    """What the page table says of a tile's tokens."""
    head = (line if PER_HEAD else item) % HEADS
    token = (first + tl.arange(0, BLOCK)).to(tl.uint32)  # divided by a shift
    table_row = table_ptr + table_line.to(tl.int64) * row_stride + head * table_head_stride
    return tl.load(table_row + (token if BY_SLOT else token // PAGE), mask=token < stop.to(tl.uint32), other=0)


@triton.jit(do_not_specialize=["lens_ptr", "num_lines", "bias_stride", "scores_stride"])
def piece_kernel(
    q_ptr, pages_ptr, table_ptr, bias_ptr, lens_ptr, ends_ptr, pieces_ptr, part_ptr, part_lse_ptr, scores_ptr,
    scale, num_lines, q_token_stride, q_head_stride, head_stride, row_stride, table_head_stride, bias_stride,
    scores_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS_PAD: tl.constexpr, PER_HEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, BY_SLOT: tl.constexpr, HAS_SCORES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Pieces number pid, pid + grid, ...: each one's part of out (float32, normalised) and its log-sum-exp (base 2).

    What a tile's loads need is there when its turn comes: the page table's entries are read a tile ahead, the piece behind this
    one is known from the moment this one begins.
    """
    MEMBERS: tl.constexpr = GROUP * QUERIES
    follow(OVERLAP)
    total = tl.load(ends_ptr + num_lines - 1)
    if not PER_HEAD:
        total = total * HEADS
    step = tl.num_programs(0)
    item = tl.program_id(0)
    line, first, stop, table_line = _piece_of(pieces_ptr, item, HEADS, PER_HEAD)
    first, stop = tl.where(item < total, first, 0), tl.where(item < total, stop, 0)  # no such piece: nothing is read
    tiles = _tiles_of(pieces_ptr, total, HEADS, PER_HEAD, BLOCK, 32)
    next_item = tl.minimum(item + step, total - 1)
    next_line, next_first, next_stop, next_table = _piece_of(pieces_ptr, next_item, HEADS, PER_HEAD)
    entry = _entries_of(
        table_ptr, item, line, table_line, first, stop, row_stride, table_head_stride, HEADS, PER_HEAD, PAGE, BLOCK, BY_SLOT
    )
    held = stop
    if QUERIES > 1:
        held = tl.load(lens_ptr + line, mask=item < total, other=0)
    member = tl.arange(0, MEMBERS_PAD)
    dim = tl.arange(0, DIM_PAD)
    live_q = (member[:, None] < MEMBERS) & (dim[None, :] < DIM)
    top = tl.full([MEMBERS_PAD], float("-inf"), tl.float32)
    sums = tl.zeros([MEMBERS_PAD], tl.float32)
    acc = tl.zeros([MEMBERS_PAD, DIM_PAD], tl.float32)
    for _ in tl.range(0, tiles, num_stages=NUM_STAGES):
        row = line // HEADS if PER_HEAD else line
        head = (line if PER_HEAD else item) % HEADS
        token_of = row * QUERIES + member // GROUP
        q_offset = token_of.to(tl.int64)[:, None] * q_token_stride + (head * GROUP + member % GROUP)[:, None] * q_head_stride
        q = tl.load(q_ptr + q_offset + dim[None, :], mask=live_q, other=0.0)
        token = first + tl.arange(0, BLOCK)
        live = token < stop
        granule = entry // PAGE if BY_SLOT else entry
        slot = (entry % PAGE if BY_SLOT else token.to(tl.uint32) % PAGE).to(tl.int32)
        if DIM % PAGE_STRIDE == 0:  # a slot is whole granules: they are counted before anything is 64 bits wide
            place = (granule + slot * (DIM // PAGE_STRIDE)).to(tl.int64) * PAGE_STRIDE
        else:
            place = granule.to(tl.int64) * PAGE_STRIDE + slot * DIM
        keys = (pages_ptr + head * head_stride + dim[None, :]) + place[:, None]
        live_kv = live[:, None] & (dim[None, :] < DIM) if DIM < DIM_PAD else live[:, None]
        k = tl.load(keys, mask=live_kv, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SCORES:
            line_scores = scores_ptr + (line * HEADS * GROUP + head * GROUP + member).to(tl.int64) * scores_stride
            tl.store(line_scores[:, None] + token[None, :], score, mask=(member[:, None] < GROUP) & live[None, :])
        if HAS_BIAS:
            bias = bias_ptr + (row * HEADS + head).to(tl.int64) * bias_stride + token
            score += tl.load(bias, mask=live, other=0.0)[None, :] * 1.4426950408889634
        seen = live[None, :]
        if QUERIES > 1:
            seen = seen & (token[None, :] <= (held - QUERIES + member // GROUP)[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(tl.maximum(top, tl.max(score, 1)), -1e30)  # a member may see nothing of a tile
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        v = tl.load(keys + PAGE * DIM, mask=live_kv, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        sums = sums * shrink + tl.sum(weight, 1)
        top = new_top

        is_last = first + BLOCK >= stop
        if is_last:
            sums_safe = tl.where(sums > 0, sums, 1.0)
            part_lse = tl.where(sums > 0, top + tl.log2(sums_safe), float("-inf"))
            part = member.to(tl.int64) + item * MEMBERS
            tl.store(part_ptr + part[:, None] * DIM + dim[None, :], acc * (1.0 / sums_safe)[:, None], mask=live_q)
            tl.store(part_lse_ptr + part, part_lse, mask=member < MEMBERS)
            top = tl.full([MEMBERS_PAD], float("-inf"), tl.float32)
            sums = tl.zeros([MEMBERS_PAD], tl.float32)
            acc = tl.zeros([MEMBERS_PAD, DIM_PAD], tl.float32)

        item = tl.where(is_last, next_item, item)
        line = tl.where(is_last, next_line, line)
        first = tl.where(is_last, next_first, first + BLOCK)
        stop = tl.where(is_last, next_stop, stop)
        table_line = tl.where(is_last, next_table, table_line)
        if QUERIES > 1:
            held = tl.load(lens_ptr + line)
        entry = _entries_of(
            table_ptr, item, line, table_line, first, stop, row_stride, table_head_stride,
            HEADS, PER_HEAD, PAGE, BLOCK, BY_SLOT,
        )  # fmt: skip
        next_item = tl.minimum(item + step, total - 1)
        next_line, next_first, next_stop, next_table = _piece_of(pieces_ptr, next_item, HEADS, PER_HEAD)
