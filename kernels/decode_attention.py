"""Decode attention in plain torch, made for the CPU: one or a few queries a row, pages read in place where they lie in runs.

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
    when they are too scattered; full: int64 entries of the full pages; tail: (entry, tokens) of a last page not full."""

    runs: tuple[tuple[int, int, int], ...]
    full: Tensor
    tail: tuple[int, int] | None


def plan_row(entries: Tensor, length: int, page_size: int) -> RowPages:
    """Find the runs of a row. entries: int32 host tensor, the row's table; length: tokens held."""
    num_full, rest = divmod(length, page_size)
    full = entries[:num_full].to(torch.int64)
    tail = (int(entries[num_full]), rest) if rest else None
    return RowPages(_runs(full), full, tail)


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


def decode_attention(
    q: Tensor, pages: Tensor, rows: tuple[RowPages, ...], scale: float, counts: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a row's last tokens, counts[i] of row i (None: one of each), over all that the row holds up to each.

    q: `[num_tokens, num_heads, head_dim]`, row by row. Returns out like q and lse `[num_tokens, num_heads]` (float32, or
    float64 for it).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    start = 0
    for row, count in zip(rows, counts or (1,) * len(rows), strict=True):
        tokens = slice(start, start + count)
        out[tokens], lse[tokens] = _decode_row(q[tokens].to(wide), pages, row, scale)
        start += count
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
    """One row. q: `[count, num_heads, head_dim]` in the wide dtype; returns out like q, lse `[count, num_heads]`.

    The queries of a KV head are one group, whichever token they are of: each page is read once.
    """
    num_kv_heads, page_size, head_dim = pages.shape[1], pages.shape[3], pages.shape[4]
    num_queries = q.shape[0]
    grouped = q.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    group = grouped.shape[1]
    segments = [segment.to(q.dtype) for segment in _segments(pages, row)]
    num_full = len(row.full)
    tail = pages[row.tail[0], :, :, : row.tail[1]].to(q.dtype) if row.tail else None
    length = num_full * page_size + (row.tail[1] if row.tail else 0)

    scores = torch.empty(num_kv_heads, group, length, dtype=q.dtype, device=q.device)
    paged = scores[..., : num_full * page_size].view(num_kv_heads, group, num_full, page_size)
    start = 0
    for segment in segments:
        count = len(segment)
        for head in range(num_kv_heads):
            product = torch.bmm(grouped[head].expand(count, group, head_dim), segment[:, head, 0].transpose(1, 2))
            paged[head, :, start : start + count] = product.transpose(0, 1)
        start += count
    if tail is not None:
        scores[..., num_full * page_size :] = torch.bmm(grouped, tail[:, 0].transpose(1, 2))

    if num_queries > 1:
        _hide_later(scores.view(num_kv_heads, num_queries, -1, length))
    lse = torch.logsumexp(scores.mul_(scale), dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    out = _weigh(weights, segments, tail)
    out = out.view(num_kv_heads, num_queries, -1, head_dim).transpose(0, 1)
    return out.reshape(num_queries, -1, head_dim), lse.view(num_kv_heads, num_queries, -1).transpose(0, 1).flatten(1)


def _hide_later(scores: Tensor) -> None:
    """A token does not see those behind it. scores: `[num_kv_heads, count, group, length]`, the tokens' own slots last."""
    count, length = scores.shape[1], scores.shape[3]
    later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu_(1)
    scores[..., length - count :].masked_fill_(later.unsqueeze(1), -torch.inf)


def _weigh(weights: Tensor, segments: list[Tensor], tail: Tensor | None) -> Tensor:
    """Sum of values: weights `[num_kv_heads, group, length]`; pages are added in logical order."""
    num_kv_heads, group, _ = weights.shape
    start = 0
    heads: list[list[Tensor]] = [[] for _ in range(num_kv_heads)]
    for segment in segments:
        count, page_size = segment.shape[0], segment.shape[3]
        stop = start + count * page_size
        part = weights[..., start:stop].view(num_kv_heads, group, count, page_size).transpose(1, 2)
        for head in range(num_kv_heads):
            heads[head].append(torch.bmm(part[head], segment[:, head, 1]))
        start = stop
    sums = [torch.cat(parts).sum(0) for parts in heads if parts]
    out = torch.stack(sums) if sums else None
    if tail is not None:
        last = torch.bmm(weights[..., start:], tail[:, 1])
        out = last if out is None else out + last
    if out is None:
        raise ValueError("a row without tokens has nothing to attend to")
    return out
