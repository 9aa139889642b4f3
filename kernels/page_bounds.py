"""Elementwise bounds of the keys of pages (arXiv 2406.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def page_bounds(pages: Tensor, entries: Tensor, bounds: Tensor, targets: Tensor, counts: Tensor | None = None) -> None:
    """Write the least and the greatest value of each key channel of each page.

    pages: `[num_granules, num_kv_heads, 2, page_size, head_dim]` (see store_kv); a view of head pages has one head. entries:
    int64 `[num_pages]`, granules. bounds: `[num_bounds, num_kv_heads, 2, head_dim]` in pages' dtype, minimum then maximum,
    last dim contiguous; page i goes to bounds[targets[i]], targets int64 `[num_pages]`, all different. counts: int32
    `[num_pages]`, slots from a page's start that hold keys, at least 1; None where pages are whole.
    """
    if pages.is_cuda and pages.dtype != torch.float64:
        from agentkv.kernels.page_bounds_triton import write_bounds

        write_bounds(pages, entries, bounds, targets, counts)
        return
    keys = pages[entries, :, 0]
    low = high = keys
    if counts is not None:
        empty = (torch.arange(keys.shape[2], device=keys.device) >= counts.unsqueeze(1))[:, None, :, None]
        low, high = keys.masked_fill(empty, torch.inf), keys.masked_fill(empty, -torch.inf)
    bounds[targets] = torch.stack((low.amin(2), high.amax(2)), 2)


def layer_step(layers: Sequence[Tensor]) -> int | None:
    """Elements from one layer to the next, where all have the same strides and lie at equal distances; otherwise None."""
    steps = {after.data_ptr() - before.data_ptr() for before, after in pairwise(layers)} or {0}
    if len(steps) > 1 or any(each.stride() != layers[0].stride() for each in layers):
        return None
    return steps.pop() // layers[0].element_size()


def layer_bounds(layers: Sequence[Tensor], entries: Tensor, bounds: Tensor, targets: Tensor) -> None:
    """`page_bounds` of whole pages in every layer: bounds `[num_bounds, num_layers, num_kv_heads, 2, head_dim]`. Layers that
    lie at equal distances in one memory, as those of a stripe, are one launch on a GPU."""
    if layers[0].is_cuda and layers[0].dtype != torch.float64:
        from agentkv.kernels.page_bounds_triton import write_layer_bounds

        step = layer_step(layers)
        if step is not None:
            write_layer_bounds(layers[0], len(layers), step, entries, bounds, targets)
            return
    for layer, pages in enumerate(layers):
        page_bounds(pages, entries, bounds[:, layer], targets)
