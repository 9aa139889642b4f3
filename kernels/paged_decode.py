"""Paged decode attention on a GPU: few query tokens a row, keys split in pieces over a fixed grid, merged in order.

A row is cut into pieces by its own length alone, and its pieces are merged in logical order, whoever does it, so a row's
result does not depend on the rest of the batch (flash decoding, arXiv 2311.01282). The work list of pieces is built on the
device: nothing here waits for lengths, so a step can be captured in a graph and replayed with other lengths.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentkv.kernels.overlap import follow, overlapping

EDGE = 128
"""The tokens of a piece are a multiple of this, which tiles of 32 to 128 divide."""
FEW, MOST, LONG = 16, 64, 1024
"""A row has about FEW pieces until they are LONG tokens each, then longer rows have more pieces, MOST at most."""
PROGRAMS = 4
"""Programs of the grid for each multiprocessor."""
COUNTERS = 128
"""Most KV heads of a row that has one page table."""


class Cut(NamedTuple):
    """How rows are cut, see FEW; most is a power of two."""

    few: int = FEW
    most: int = MOST
    long: int = LONG


CUT = Cut()


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work list of rows of given lengths; right for every layer in which the lengths are these.

    A **line** is a row, or a KV head of a row where heads hold different numbers of slots. lens: int32 `[num_lines]`, slots
    held. ends: int32 `[num_lines]`, pieces of all lines up to and with this one. pieces: int32 `[max_pieces, 4]`: line, first
    slot, slot behind the last, and line of the page table of each piece. arrived: int32 `[num_lines, COUNTERS]` (one a line
    where lines are heads), pieces that are done, zero between launches: so a plan serves one stream. per_head: are lines heads?
    most: pieces of a line. programs: size of the grid.
    """

    lens: Tensor
    ends: Tensor
    pieces: Tensor
    arrived: Tensor
    per_head: bool
    most: int
    programs: int


def plan_decode(
    lens: Tensor,
    rows: Tensor,
    max_pieces: int,
    firsts: Tensor | None = None,
    programs: int | None = None,
    cut: Cut = CUT,
) -> DecodePlan:
    """Cut rows into pieces, on the device. max_pieces: a host bound on the pieces of all lines, see `bound_pieces`.

    lens: int32 `[num_rows]` or `[num_rows, num_kv_heads]`, contiguous. firsts: the same shape, slots before these are not read.
    rows: int64 `[num_rows]`, lines of the page table.
    """
    num_lines, per_head = lens.numel(), lens.dim() == 2
    arrived = torch.empty(num_lines, 1 if per_head else COUNTERS, dtype=torch.int32, device=lens.device)
    ends = torch.empty(num_lines, dtype=torch.int32, device=lens.device)
    pieces = torch.empty(max_pieces, 4, dtype=torch.int32, device=lens.device)
    _plan_kernel[(num_lines,)](
        lens, firsts if firsts is not None else lens, rows, ends, pieces, arrived, num_lines, num_lines // len(rows),
        HAS_FIRSTS=firsts is not None, LINES_PAD=triton.next_power_of_2(num_lines), COUNTERS=arrived.shape[1],
        EDGE=EDGE, FEW=cut.few, MOST=cut.most, LONG=cut.long,
    )  # fmt: skip
    return DecodePlan(lens, ends, pieces, arrived, per_head, cut.most, programs or _programs(lens.device))


def bound_pieces(num_lines: int, total_slots: int, cut: Cut = CUT) -> int:
    """Pieces that lines with so many visible slots in all can have, at most."""
    return min(num_lines * cut.most, num_lines + total_slots // EDGE)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter runs them one after another
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS


@triton.jit
def _size_of(seen, EDGE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr):
    """Tokens of one piece of a line with that many visible slots."""
    size = tl.maximum(tl.minimum(tl.cdiv(seen, FEW), LONG), tl.cdiv(seen, MOST))
    return tl.maximum(tl.cdiv(size, EDGE), 1) * EDGE


@triton.jit(do_not_specialize=["lens_ptr", "firsts_ptr", "rows_ptr", "num_lines", "lines_a_row"])
def _plan_kernel(
    lens_ptr, firsts_ptr, rows_ptr, ends_ptr, pieces_ptr, arrived_ptr, num_lines, lines_a_row,
    HAS_FIRSTS: tl.constexpr, LINES_PAD: tl.constexpr, COUNTERS: tl.constexpr,
    EDGE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """One line: where its pieces stand in the list (behind those of all lines before it), and the pieces."""
    line = tl.program_id(0)
    every = tl.arange(0, LINES_PAD)
    length = tl.load(lens_ptr + every, mask=every < num_lines, other=0)
    first = tl.load(firsts_ptr + every, mask=every < num_lines, other=0) if HAS_FIRSTS else length * 0
    seen = length - first
    count = tl.maximum(tl.cdiv(seen, _size_of(seen, EDGE, FEW, MOST, LONG)), 1)  # nothing to see: one piece without slots
    begin = tl.sum(tl.where(every < line, count, 0), 0)
    mine = tl.sum(tl.where(every == line, count, 0), 0)
    stop = tl.sum(tl.where(every == line, length, 0), 0)
    low = tl.sum(tl.where(every == line, first, 0), 0)
    size = _size_of(stop - low, EDGE, FEW, MOST, LONG)
    tl.store(ends_ptr + line, begin + mine)
    tl.store(arrived_ptr + line * COUNTERS + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    number = tl.arange(0, MOST)
    live = number < mine
    place = pieces_ptr + (begin + number) * 4
    start = low + number * size
    tl.store(place, line + number * 0, mask=live)
    tl.store(place + 1, start, mask=live)
    tl.store(place + 2, tl.minimum(start + size, stop), mask=live)
    tl.store(place + 3, (tl.load(rows_ptr + line // lines_a_row) + number * 0).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["lens_ptr", "num_lines", "bias_stride", "scores_stride"])
def _piece_kernel(
    q_ptr, pages_ptr, table_ptr, bias_ptr, lens_ptr, ends_ptr, pieces_ptr, part_ptr, part_lse_ptr, arrived_ptr,
    out_ptr, lse_ptr, scores_ptr,
    scale, num_lines, q_token_stride, q_head_stride, page_stride, head_stride, row_stride, table_head_stride, bias_stride,
    scores_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS_PAD: tl.constexpr, PER_HEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, MOST: tl.constexpr, MERGE_PAD: tl.constexpr, CHUNK: tl.constexpr,
    COUNTERS: tl.constexpr, MERGE: tl.constexpr, BY_SLOT: tl.constexpr, HAS_SCORES: tl.constexpr,
):  # fmt: skip
    """Pieces number pid, pid + grid, ...: each one's part of out (float32, normalised) and its log-sum-exp (base 2)."""
    MEMBERS: tl.constexpr = GROUP * QUERIES
    follow(MERGE == "overlap")
    total = tl.load(ends_ptr + num_lines - 1)
    if not PER_HEAD:
        total = total * HEADS
    member = tl.arange(0, MEMBERS_PAD)
    dim = tl.arange(0, DIM_PAD)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        piece = pieces_ptr + (item if PER_HEAD else item // HEADS) * 4
        line, low, stop, table_line = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        row = line // HEADS if PER_HEAD else line
        head = line % HEADS if PER_HEAD else item % HEADS

        live_q = (member[:, None] < MEMBERS) & (dim[None, :] < DIM)
        token_of = row * QUERIES + member // GROUP
        q_offset = token_of.to(tl.int64)[:, None] * q_token_stride + (head * GROUP + member % GROUP)[:, None] * q_head_stride
        q = tl.load(q_ptr + q_offset + dim[None, :], mask=live_q, other=0.0)
        table_row = table_ptr + table_line.to(tl.int64) * row_stride + head * table_head_stride
        if QUERIES > 1:
            last = tl.load(lens_ptr + line) - QUERIES + member // GROUP  # the slot of the member's own token
        top = tl.full([MEMBERS_PAD], float("-inf"), tl.float32)
        sums = tl.zeros([MEMBERS_PAD], tl.float32)
        acc = tl.zeros([MEMBERS_PAD, DIM_PAD], tl.float32)
        for first in tl.range(low, stop, BLOCK, num_stages=NUM_STAGES):
            token = first + tl.arange(0, BLOCK)
            live = token < stop
            entry = tl.load(table_row + (token if BY_SLOT else token // PAGE), mask=live, other=0).to(tl.int64)
            if BY_SLOT:
                place = entry // PAGE * page_stride + head * head_stride + (entry % PAGE) * DIM
            else:
                place = entry * page_stride + head * head_stride + (token % PAGE) * DIM
            offset = place[:, None] + dim[None, :]
            live_kv = live[:, None] & (dim[None, :] < DIM)
            k = tl.load(pages_ptr + offset, mask=live_kv, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if HAS_SCORES:
                line_scores = scores_ptr + (line * HEADS * GROUP + head * GROUP + member).to(tl.int64) * scores_stride
                mask_scores = (member[:, None] < GROUP) & live[None, :]
                tl.store(line_scores[:, None] + token[None, :], score, mask=mask_scores)
            if HAS_BIAS:
                bias = bias_ptr + (row * HEADS + head).to(tl.int64) * bias_stride + token
                score += tl.load(bias, mask=live, other=0.0)[None, :] * 1.4426950408889634
            seen = live[None, :]
            if QUERIES > 1:
                seen = seen & (token[None, :] <= last[:, None])
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            if QUERIES > 1 or HAS_BIAS:
                new_top = tl.maximum(new_top, -1e30)  # a member may see nothing of a block
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            v = tl.load(pages_ptr + offset + PAGE * DIM, mask=live_kv, other=0.0)
            acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
            sums = sums * shrink + tl.sum(weight, 1)
            top = new_top

        sums_safe = tl.where(sums > 0, sums, 1.0)
        lse = tl.where(sums > 0, top + tl.log2(sums_safe), float("-inf"))
        out = member.to(tl.int64) + item * MEMBERS
        tl.store(part_ptr + out[:, None] * DIM + dim[None, :], acc / sums_safe[:, None], mask=live_q)
        tl.store(part_lse_ptr + out, lse, mask=member < MEMBERS)
        if MERGE == "last":
            begin = tl.load(ends_ptr + line - 1, mask=line > 0, other=0)
            count = tl.load(ends_ptr + line) - begin
            counter = arrived_ptr + (line if PER_HEAD else line * COUNTERS + head)
            tl.debug_barrier()  # all of this program's part is written before it is counted
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()  # and read after that
                tl.store(counter, 0)
                first_item = begin if PER_HEAD else begin * HEADS + head
                _merge_line(
                    part_ptr, part_lse_ptr, out_ptr, lse_ptr, row, head, first_item, count,
                    HEADS, GROUP, QUERIES, 1 if PER_HEAD else HEADS, DIM, DIM_PAD, MERGE_PAD, MOST, CHUNK,
                )  # fmt: skip


@triton.jit
def _merge_line(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, row, head, first_item, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, STEP: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, MERGE_PAD: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All members of a row and KV head: their pieces in logical order, items first_item, + STEP, ...; CHUNK at a time, so
    that many loads are on their way together."""
    MEMBERS: tl.constexpr = GROUP * QUERIES
    member = tl.arange(0, MERGE_PAD)
    dim = tl.arange(0, DIM_PAD)
    live_out = (member[:, None] < MEMBERS) & (dim[None, :] < DIM)
    every = tl.arange(0, MOST)
    mask_lse = (every[:, None] < count) & (member[None, :] < MEMBERS)
    place_lse = (first_item + every * STEP).to(tl.int64)[:, None] * MEMBERS + member[None, :]
    lses = tl.load(part_lse_ptr + place_lse, mask=mask_lse, other=float("-inf"), cache_modifier=".cg")
    top = tl.maximum(tl.max(lses, 0), -1e30)  # members of the padding have none
    sums = tl.sum(tl.exp2(lses - top[None, :]), 0)
    acc = tl.zeros([MERGE_PAD, DIM_PAD], tl.float32)
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        live = (number[:, None] < count) & (member[None, :] < MEMBERS)
        place = (first_item + number * STEP).to(tl.int64)[:, None] * MEMBERS + member[None, :]
        lse = tl.load(part_lse_ptr + place, mask=live, other=float("-inf"), cache_modifier=".cg")
        mask = live[:, :, None] & (dim[None, None, :] < DIM)
        part = tl.load(part_ptr + place[:, :, None] * DIM + dim[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        acc += tl.sum(part * tl.exp2(lse - top[None, :])[:, :, None], 0)
    sums_safe = tl.where(sums > 0, sums, 1.0)
    token = row * QUERIES + member // GROUP
    line_out = token.to(tl.int64) * (HEADS * GROUP) + head * GROUP + member % GROUP
    tl.store(out_ptr + line_out[:, None] * DIM + dim[None, :], acc / sums_safe[:, None], mask=live_out)
    total = tl.where(sums > 0, top + tl.log2(sums_safe), float("-inf"))
    tl.store(lse_ptr + line_out, total * 0.6931471805599453, mask=member < MEMBERS)


@triton.jit
def _merge_kernel(
    part_ptr, part_lse_ptr, ends_ptr, out_ptr, lse_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PER_HEAD: tl.constexpr,
    DIM: tl.constexpr, SHARE: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr = False,
    beside_ptr=None, beside_lse_ptr=None,
):  # fmt: skip
    """One query token, one head, SHARE of its dims: its pieces in logical order, then what lies beside, if anything: another
    part's out and natural log-sum-exp, contiguous."""
    follow(OVERLAP)
    token, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    MEMBERS: tl.constexpr = GROUP * QUERIES
    row = token // QUERIES
    kv_head = head // GROUP
    member = (token % QUERIES) * GROUP + head % GROUP
    line = row * HEADS + kv_head if PER_HEAD else row
    begin = tl.load(ends_ptr + line - 1, mask=line > 0, other=0)
    count = tl.load(ends_ptr + line) - begin
    dim = share * SHARE + tl.arange(0, SHARE)
    number = tl.arange(0, MOST)
    live = number < count
    item = begin + number if PER_HEAD else (begin + number) * HEADS + kv_head
    place = item.to(tl.int64) * MEMBERS + member
    lse = tl.load(part_lse_ptr + place, mask=live, other=float("-inf"))
    part = tl.load(part_ptr + place[:, None] * DIM + dim[None, :], mask=live[:, None] & (dim[None, :] < DIM), other=0.0)
    line_out = token.to(tl.int64) * (HEADS * GROUP) + head
    top = tl.maximum(tl.max(lse, 0), -1e30)  # a line may hold nothing
    if beside_ptr is not None:
        beside_lse = tl.load(beside_lse_ptr + line_out) * 1.4426950408889634
        top = tl.maximum(top, beside_lse)
    weight = tl.exp2(lse - top)
    sums = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0)
    if beside_ptr is not None:
        weight_beside = tl.exp2(beside_lse - top)
        sums += weight_beside
        out += tl.load(beside_ptr + line_out * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32) * weight_beside
    sums_safe = tl.where(sums > 0, sums, 1.0)
    out = out / sums_safe
    tl.store(out_ptr + line_out * DIM + dim, out, mask=dim < DIM)
    total = tl.where(sums > 0, (top + tl.log2(sums_safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + line_out, total, mask=share == 0)


Merge = Literal["after", "last", "overlap"]
"""Who merges the pieces: a second kernel, the program that finishes a row and KV head last, or a second kernel that is launched
before the first has ended (Hopper's programmatic dependent launch)."""


class Tuning(NamedTuple):
    """How the kernel is compiled: warps of a program, stages of its pipeline, tokens of a tile; who merges the pieces."""

    warps: int
    stages: int
    block: int
    merge: Merge = "after"


def tuning(row_bytes: int, per_head: bool = False) -> Tuning:
    """What serves all shapes best on an H200 (docs/bench/tune.json): a single row needs large tiles, and many rows lose 5 to
    7 % by them. row_bytes: of one key; where they are many, large tiles would not fit the shared memory. per_head: heads that
    hold slots of their own number hold few, and small programs, of which more fit at a time, are done with them sooner."""
    if per_head and row_bytes <= 256:
        return Tuning(2, 4, 64)
    return Tuning(4, 4, 128) if row_bytes <= 256 else Tuning(4, 2, 64)


def paged_decode(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    queries: int = 1,
    bias: Tensor | None = None,
    tuned: Tuning | None = None,
    by_slot: bool = False,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` tokens a row over the slots that the plan names; the row's last slots are theirs.

    q: `[num_rows * queries, num_heads, head_dim]`, half precision or float32, last dim contiguous. pages: one layer's view
    `[num_granules, num_kv_heads, 2, page_size, head_dim]`. table: int32 `[max_rows, max_pages]`, or `[max_rows,
    num_kv_heads, max_pages]` where every head has pages of its own; by_slot: int64, names a slot in each column, see
    `ragged_decode`. bias: float32 `[num_rows, num_kv_heads, max_len]`,
    contiguous, added to the scaled scores. scores: float32 `[num_rows, num_heads, max_len]`, contiguous, of one query a row and
    lines that are rows: where the scaled score of each slot is left, times log2(e).
    Returns out like q and lse `[num_tokens, num_heads]`, natural, float32; 0 and -inf for a line that holds nothing.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.shape[1], pages.shape[3]
    if not plan.per_head and num_kv_heads > COUNTERS:
        raise ValueError(f"{num_kv_heads} KV heads in one page table; {COUNTERS} is the most")
    group = num_heads // num_kv_heads
    members, dim_pad = group * queries, max(16, triton.next_power_of_2(head_dim))
    merge_pad = triton.next_power_of_2(members)
    chunk = max(1, min(plan.most, 4096 // (merge_pad * dim_pad)))
    share = min(dim_pad, 32)
    if tuned is None:
        tuned = tuning(q.shape[-1] * pages.element_size(), plan.per_head)
        tuned = tuned._replace(merge="overlap") if overlapping(q.device)["OVERLAP"] else tuned
    overlap = tuned.merge == "overlap"
    items = len(plan.pieces) * (1 if plan.per_head else num_kv_heads)
    parts = torch.empty(items, members, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(items, members, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    shared = {"HEADS": num_kv_heads, "GROUP": group, "QUERIES": queries, "PER_HEAD": plan.per_head, "DIM": head_dim}
    shared |= {"MOST": plan.most, **({"launch_pdl": True} if overlap else {})}
    _piece_kernel[(min(plan.programs, items),)](
        q, pages, table, q if bias is None else bias, plan.lens, plan.ends, plan.pieces, parts, part_lse, plan.arrived,
        out, lse, lse if scores is None else scores,
        scale * 1.4426950408889634, plan.ends.numel(), q.stride(0), q.stride(1), pages.stride(0), pages.stride(1),
        table.stride(0), table.stride(1) if table.dim() == 3 else 0, 0 if bias is None else bias.stride(1),
        0 if scores is None else scores.stride(1),
        HAS_BIAS=bias is not None,
        MEMBERS_PAD=max(16, triton.next_power_of_2(members)), PAGE=page_size, DIM_PAD=dim_pad, BLOCK=tuned.block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", NUM_STAGES=tuned.stages, num_warps=tuned.warps,
        MERGE_PAD=merge_pad, CHUNK=chunk, COUNTERS=COUNTERS, MERGE=tuned.merge, BY_SLOT=by_slot, HAS_SCORES=scores is not None,
        **shared,
    )  # fmt: skip
    if tuned.merge != "last":
        _merge_kernel[(num_tokens, num_heads, dim_pad // share)](
            parts, part_lse, plan.ends, out, lse, SHARE=share, OVERLAP=overlap, num_warps=2, **shared
        )
    return out, lse
