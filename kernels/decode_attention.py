"""Decode attention in plain torch, made for the CPU: one query token a row, pages read in place where they lie in runs.

A row's result depends on its own tokens alone: every page is one product, and pages are summed in logical order, whether
they were read in place or gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_RUNS = 8  # past this many runs one gather is cheaper than a product per run


@dataclass(frozen=True, slots=True)
class RowPages:
    """The pages that one row reads. runs: (entry, stride, count) of full pages in granules, in logical order, or empty
    when they are too scattered; full: int64 entries of the full pages; head, tail: (entry, first slot, slots read) of a first
    and a last page that are read in part."""

    runs: tuple[tuple[int, int, int], ...]
    full: Tensor
    tail: tuple[int, int, int] | None
    head: tuple[int, int, int] | None = None


def plan_row(entries: Tensor, length: int, page_size: int, start: int = 0) -> RowPages:
    """Find the runs of a row. entries: int32 host tensor, the row's table; length: slots held; start: first one to read."""
    first, skip = divmod(start, page_size)
    num_full, rest = divmod(length, page_size)
    head = None
    if skip and first < num_full:
        head = (int(entries[first]), skip, page_size - skip)
        first, skip = first + 1, 0
    full = entries[first:num_full].to(torch.int64)
    tail = (int(entries[num_full]), skip, rest - skip) if rest else None
    return RowPages(_runs(full), full, tail, head)


def _runs(full: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Split entries into maximal runs of one positive stride; empty when there are more than _MOST_RUNS."""
    listed = full.tolist()
    runs: list[tuple[int, int, int]] = []
    start = 0
    while start < len(listed):
        stop = start + 1
        stride = listed[stop] - listed[start] if stop < len(listed) else 1
        while stop < len(listed) and stride > 0 and listed[stop] - listed[stop - 1] == stride:
            stop += 1
        runs.append((listed[start], max(stride, 1), stop - start))
        if len(runs) > _MOST_RUNS:
            return ()
        start = stop
    return tuple(runs)


def decode_attention(q: Tensor, pages: Tensor, rows: tuple[RowPages, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one query token a row over the slots of its plan.

    q: `[num_rows, num_heads, head_dim]`. Returns out like q and lse `[num_rows, num_heads]` (float32, or float64 for it); 0
    and -inf for a row that holds nothing.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for index, row in enumerate(rows):
        out[index], lse[index] = _decode_row(q[index].to(wide), pages, row, scale)
    return out, lse


def _segments(pages: Tensor, row: RowPages) -> list[Tensor]:
    """Full pages `[count, num_kv_heads, 2, page_size, head_dim]`: views of runs, or one gathered copy."""
    if not len(row.full):
        return []
    if not row.runs:
        return [pages[row.full]]
    step, *inner = pages.stride()
    return [
        pages.as_strided((count, *pages.shape[1:]), (stride * step, *inner), pages.storage_offset() + entry * step)
        for entry, stride, count in row.runs
    ]


def _decode_row(q: Tensor, pages: Tensor, row: RowPages, scale: float) -> tuple[Tensor, Tensor]:
    """One row. q: `[num_heads, head_dim]` in the wide dtype; returns out like q, lse `[num_heads]`."""
    num_kv_heads, page_size, head_dim = pages.shape[1], pages.shape[3], pages.shape[4]
    grouped = q.view(num_kv_heads, -1, head_dim)
    group = grouped.shape[1]
    segments = [segment.to(q.dtype) for segment in _segments(pages, row)]
    num_full = len(row.full)
    head_part, tail = (_part(pages, place, q.dtype) for place in (row.head, row.tail))
    begin = row.head[2] if row.head else 0
    end = begin + num_full * page_size
    length = end + (row.tail[2] if row.tail else 0)

    scores = torch.empty(num_kv_heads, group, length, dtype=q.dtype, device=q.device)
    paged = scores[..., begin:end].view(num_kv_heads, group, num_full, page_size)
    start = 0
    for segment in segments:
        count = len(segment)
        for head in range(num_kv_heads):
            product = torch.bmm(grouped[head].expand(count, group, head_dim), segment[:, head, 0].transpose(1, 2))
            paged[head, :, start : start + count] = product.transpose(0, 1)
        start += count
    if head_part is not None:
        scores[..., :begin] = torch.bmm(grouped, head_part[:, 0].transpose(1, 2))
    if tail is not None:
        scores[..., end:] = torch.bmm(grouped, tail[:, 0].transpose(1, 2))

    lse = torch.logsumexp(scores.mul_(scale), dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    out = _weigh(weights, head_part, segments, tail, head_dim)
    return out.reshape(-1, head_dim), lse.reshape(-1)


def _part(pages: Tensor, place: tuple[int, int, int] | None, dtype: torch.dtype) -> Tensor | None:
    """`[num_kv_heads, 2, slots, head_dim]` of a page that is read in part."""
    if place is None:
        return None
    entry, first, count = place
    return pages[entry, :, :, first : first + count].to(dtype)


def _weigh(weights: Tensor, head_part: Tensor | None, segments: list[Tensor], tail: Tensor | None, head_dim: int) -> Tensor:
    """Sum of values: weights `[num_kv_heads, group, length]`; full pages are added in logical order, then the parts."""
    num_kv_heads, group, _ = weights.shape
    start = begin = 0 if head_part is None else head_part.shape[2]
    heads: list[list[Tensor]] = [[] for _ in range(num_kv_heads)]
    for segment in segments:
        count, page_size = segment.shape[0], segment.shape[3]
        stop = start + count * page_size
        part = weights[..., start:stop].view(num_kv_heads, group, count, page_size).transpose(1, 2)
        for head in range(num_kv_heads):
            heads[head].append(torch.bmm(part[head], segment[:, head, 1]))
        start = stop
    sums = [torch.cat(parts).sum(0) for parts in heads if parts]
    out = torch.stack(sums) if sums else weights.new_zeros(num_kv_heads, group, head_dim)
    for edge, weight in ((head_part, weights[..., :begin]), (tail, weights[..., start:])):
        if edge is not None:
            out = out + torch.bmm(weight, edge[:, 1])
    return out
