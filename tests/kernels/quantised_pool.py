"""A pool of overlapping pages with rows in random order, unused bytes all ones (NaN as scales), and queries for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages, store_fp8, store_keys, store_values

GRANULE = 256
NUMBERS = {torch.float16: np.float16, torch.float32: np.float32}


class Pool(NamedTuple):
    payload: QuantizedPages
    table: Tensor
    rows: Tensor
    lens: Tensor
    k: list[Tensor]
    v: list[Tensor]


def make_pool(layout: PageLayout, lens: tuple[int, ...], seed: int = 1, spare: int = 2) -> Pool:
    """k, v: what was stored, a row each, `[whole pages' tokens, num_kv_heads, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    step = -(-layout.page_bytes // GRANULE)
    num_pages = max(1, -(-max(lens) // layout.page_size))
    order = torch.randperm(len(lens) * num_pages, generator=generator).view(len(lens), num_pages).to(torch.int32) * step + 3
    arena = torch.full((((len(lens) * num_pages + 1) * step + 4) * GRANULE,), 255, dtype=torch.uint8)
    count = (arena.numel() - layout.page_bytes) // GRANULE + 1
    payload = QuantizedPages(arena.as_strided((count, layout.page_bytes), (GRANULE, 1)), layout)
    table = torch.full((len(lens) + 2, num_pages + spare), -1, dtype=torch.int32)
    rows = torch.arange(len(lens)).flip(0) + 1
    keys, values = [], []
    for index, length in enumerate(lens):
        used = -(-length // layout.page_size)
        table[rows[index], :used] = order[index, :used]
        shape = (used * layout.page_size, layout.num_kv_heads, layout.head_dim)
        keys.append(torch.randn(shape, generator=generator) * 2 + 1)
        values.append(torch.randn(shape, generator=generator))
        fill(payload, order[index, :used].long(), keys[-1], values[-1], length)
    return Pool(payload, table, rows, torch.tensor(lens, dtype=torch.int32), keys, values)


def fill(payload: QuantizedPages, pages: Tensor, k: Tensor, v: Tensor, length: int) -> None:
    """Store a row's first `length` tokens; keys by whole groups."""
    layout = payload.layout
    slots = torch.arange(length)
    places = pages[slots // layout.page_size], slots % layout.page_size
    if layout.fp8:
        store_fp8(payload, *places, k[:length], v[:length])
        return
    groups = torch.arange(-(-length // layout.key_group))
    by_group = k[: len(groups) * layout.key_group].unflatten(0, (-1, layout.key_group)).transpose(1, 2)
    per_page = layout.page_size // layout.key_group
    store_keys(payload, pages[groups // per_page], groups % per_page, by_group)
    store_values(payload, *places, v[:length])


def shape_of(layout: PageLayout) -> dict:
    """For `quantised_oracle.read_slot`."""
    return {
        "heads": layout.num_kv_heads, "size": layout.page_size, "dim": layout.head_dim, "bits": layout.bits,
        "key_group": layout.key_group, "value_group": layout.value_group, "number": NUMBERS[layout.dtype],
    }  # fmt: skip
