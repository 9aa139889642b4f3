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

from agentkv.kernels.decode_pieces_triton import piece_kernel
from agentkv.kernels.merge_pieces_triton import TOGETHER, merge_kernel
from agentkv.kernels.overlap import overlapping

EDGE = 128
"""The tokens of a piece are a multiple of this, which tiles of 32 to 128 divide."""
FEW, MOST, LONG = 16, 64, 1024
"""A row has about FEW pieces until they are LONG tokens each, then longer rows have more pieces, MOST at most."""


class Cut(NamedTuple):
    """How rows are cut, see FEW; most is a power of two."""

    few: int = FEW
    most: int = MOST
    long: int = LONG


CUT = Cut()
SHARE, MERGE_WARPS = 64, 2
"""Dims of a head that one program of the merge has, and its warps."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work list of rows of given lengths; right for every layer in which the lengths are these.

    A **line** is a row, or a KV head of a row where heads hold different numbers of slots. lens: int32 `[num_lines]`, slots
    held. ends: int32 `[num_lines]`, pieces of all lines up to and with this one. pieces: int32 `[max_pieces, 4]`: line, first
    slot, slot behind the last, and line of the page table of each piece. per_head: are lines heads?
    """

    lens: Tensor
    ends: Tensor
    pieces: Tensor
    per_head: bool


def plan_decode(lens: Tensor, rows: Tensor, max_pieces: int, firsts: Tensor | None = None, cut: Cut = CUT) -> DecodePlan:
    """Cut rows into pieces, on the device. max_pieces: a host bound on the pieces of all lines, see `bound_pieces`.

    lens: int32 `[num_rows]` or `[num_rows, num_kv_heads]`, contiguous. firsts: the same shape, slots before these are not read.
    rows: int64 `[num_rows]`, lines of the page table.
    """
    num_lines, per_head = lens.numel(), lens.dim() == 2
    ends = torch.empty(num_lines, dtype=torch.int32, device=lens.device)
    pieces = torch.empty(max_pieces, 4, dtype=torch.int32, device=lens.device)
    _plan_kernel[(num_lines,)](
        lens, firsts if firsts is not None else lens, rows, ends, pieces, num_lines, num_lines // len(rows),
        HAS_FIRSTS=firsts is not None, LINES_PAD=triton.next_power_of_2(num_lines), EDGE=EDGE,
        FEW=cut.few, MOST=cut.most, LONG=cut.long,
    )  # fmt: skip
    return DecodePlan(lens, ends, pieces, per_head)


def bound_pieces(num_lines: int, total_slots: int, cut: Cut = CUT) -> int:
    """Pieces that lines with so many visible slots in all can have, at most."""
    return min(num_lines * cut.most, num_lines + total_slots // EDGE)


def grid_of(device: torch.device, programs: int) -> int:
    """Programs of a grid that has so many on each multiprocessor."""
    if device.type != "cuda":
        return 3  # the interpreter runs them one after another
    return torch.cuda.get_device_properties(device).multi_processor_count * programs


@triton.jit
def _size_of(seen, EDGE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr):
    """Tokens of one piece of a line with that many visible slots."""
    size = tl.maximum(tl.minimum(tl.cdiv(seen, FEW), LONG), tl.cdiv(seen, MOST))
    return tl.maximum(tl.cdiv(size, EDGE), 1) * EDGE


@triton.jit(do_not_specialize=["lens_ptr", "firsts_ptr", "rows_ptr", "num_lines", "lines_a_row"])
def _plan_kernel(
    lens_ptr, firsts_ptr, rows_ptr, ends_ptr, pieces_ptr, num_lines, lines_a_row,
    HAS_FIRSTS: tl.constexpr, LINES_PAD: tl.constexpr, EDGE: tl.constexpr,
    FEW: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr,
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
    number = tl.arange(0, MOST)
    live = number < mine
    place = pieces_ptr + (begin + number) * 4
    start = low + number * size
    tl.store(place, line + number * 0, mask=live)
    tl.store(place + 1, start, mask=live)
    tl.store(place + 2, tl.minimum(start + size, stop), mask=live)
    tl.store(place + 3, (tl.load(rows_ptr + line // lines_a_row) + number * 0).to(tl.int32), mask=live)


Merge = Literal["after", "overlap"]
"""When the kernel that merges the pieces is launched: behind the first, or while it runs (programmatic dependent launch)."""


class Tuning(NamedTuple):
    """How the kernel is compiled: warps of a program, stages of its pipeline, tokens of a tile. programs: of a multiprocessor.
    merge: when it is launched."""

    warps: int
    stages: int
    block: int
    programs: int = 2
    merge: Merge = "after"


def tuning(row_bytes: int) -> Tuning:
    """What serves all shapes best on an H200 (docs/bench/tune-decode.json): small tiles in many programs are faster where rows
    are many (3 to 6 %), and a third slower where there is one. row_bytes: of one key; the programs of a multiprocessor fit its
    shared memory together."""
    if row_bytes <= 128:
        return Tuning(4, 4, 64, 3)
    if row_bytes <= 256:
        return Tuning(4, 2, 128)
    return Tuning(4, 2, 64) if row_bytes <= 512 else Tuning(4, 2, 32)


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
    group = num_heads // num_kv_heads
    members, dim_pad = group * queries, max(16, triton.next_power_of_2(head_dim))
    share = min(dim_pad, SHARE)
    if tuned is None:
        tuned = tuning(q.shape[-1] * pages.element_size())
        tuned = tuned._replace(merge="overlap") if overlapping(q.device)["OVERLAP"] else tuned
    overlap = tuned.merge == "overlap"
    items = len(plan.pieces) * (1 if plan.per_head else num_kv_heads)
    parts = torch.empty(items, members, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(items, members, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    shared = {"HEADS": num_kv_heads, "GROUP": group, "QUERIES": queries, "PER_HEAD": plan.per_head, "DIM": head_dim}
    shared |= {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}
    piece_kernel[(min(grid_of(q.device, tuned.programs), items),)](
        q, pages, table, q if bias is None else bias, plan.lens, plan.ends, plan.pieces, parts, part_lse,
        lse if scores is None else scores,
        scale * 1.4426950408889634, plan.ends.numel(), q.stride(0), q.stride(1), pages.stride(1),
        table.stride(0), table.stride(1) if table.dim() == 3 else 0, 0 if bias is None else bias.stride(1),
        0 if scores is None else scores.stride(1),
        HAS_BIAS=bias is not None,
        MEMBERS_PAD=max(16, triton.next_power_of_2(members)), PAGE=page_size, PAGE_STRIDE=pages.stride(0), DIM_PAD=dim_pad,
        BLOCK=tuned.block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", NUM_STAGES=tuned.stages, num_warps=tuned.warps,
        BY_SLOT=by_slot, HAS_SCORES=scores is not None, **shared,
    )  # fmt: skip
    merge_kernel[(num_tokens, num_heads, dim_pad // share)](
        parts, part_lse, plan.ends, out, lse, SHARE=share, AT_ONCE=TOGETHER, num_warps=MERGE_WARPS, **shared
    )
    return out, lse
