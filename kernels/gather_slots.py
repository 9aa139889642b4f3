"""Copy slots that differ by KV head: compaction into fresh pages, and contiguous K and V for scoring."""

from __future__ import annotations

import torch
from torch import Tensor

Places = tuple[Tensor, Tensor]
"""(entries, offsets): int64 `[num_kv_heads, n]` each, the granule of a slot's page and the slot inside it."""


def move_head_slots(
    source_pages: Tensor, source: Places, target_pages: Tensor, target: Places, valid: Tensor | None = None
) -> None:
    """Copy K and V of each head's source slots to the target slots with the same index.

    source_pages, target_pages: `[num_granules, num_kv_heads, 2, page_size, head_dim]` of one dtype; page sizes may differ. A
    view with one head is of head pages: then entries name the head's own page. valid: bool `[num_kv_heads, n]`, others are
    not copied and may name anything. Slots from two places are two calls. No target may be another slot's source or target
    in the same call (compaction writes fresh units).
    """
    if source_pages.is_cuda and source_pages.dtype != torch.float64:
        from agentkv.kernels.gather_slots_triton import copy_slots

        copy_slots(source_pages, source, target_pages, target, valid)
        return
    (source_entries, source_offsets), (target_entries, target_offsets) = source, target
    if not source_entries.numel():
        return
    read_heads, write_heads = (
        _heads(pages, len(source_entries)).expand_as(source_entries) for pages in (source_pages, target_pages)
    )
    if valid is not None:
        # without asking the device which are valid: the others repeat the first that is, or nothing moves onto itself
        first, some = valid.flatten().to(torch.int8).argmax().view(1), valid.any()
        source_entries, source_offsets, target_entries, target_offsets, read_heads, write_heads = (
            torch.where(valid, each, torch.where(some, each.flatten().index_select(0, first), 0))
            for each in (source_entries, source_offsets, target_entries, target_offsets, read_heads, write_heads)
        )
    moved = source_pages[source_entries, read_heads, :, source_offsets]
    if valid is not None:
        moved = torch.where(some, moved, target_pages[target_entries, write_heads, :, target_offsets])
    target_pages[target_entries, write_heads, :, target_offsets] = moved


def gather_heads(pages: Tensor, entries: Tensor, length: int, lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """K and V `[num_kv_heads, length, head_dim]`, contiguous, of the first `length` slots of each head.

    pages: as in `move_head_slots`. entries: int32 or int64 `[num_kv_heads, num_pages]`, or `[num_pages]` where heads share
    their pages. lens: int32 `[num_kv_heads]`, slots that a head holds; those behind are zeros and their pages never read.
    """
    page_size = pages.shape[3]
    if entries.dim() == 1:
        entries = entries.expand(pages.shape[1], -1)
    if pages.is_cuda and pages.dtype != torch.float64:
        from agentkv.kernels.gather_slots_triton import read_slots

        return read_slots(pages, entries, length, lens)
    slots = torch.arange(length, device=pages.device)
    held = None if lens is None else slots < lens.unsqueeze(1)
    read = entries.to(torch.int64)[:, slots // page_size]
    if held is not None:
        read = read.masked_fill(~held, 0)
    heads = _heads(pages, len(entries))
    k, v = (pages[read, heads, side, slots % page_size] for side in (0, 1))
    if held is not None:
        k, v = (each.masked_fill_(~held.unsqueeze(-1), 0) for each in (k, v))
    return k, v


def _heads(pages: Tensor, num_kv_heads: int) -> Tensor:
    """Head index in the pages `[num_kv_heads, 1]` of each KV head: its own, or 0 where each head has pages of its own."""
    heads = torch.arange(num_kv_heads, device=pages.device).unsqueeze(1)
    return heads if pages.shape[1] == num_kv_heads else heads * 0
