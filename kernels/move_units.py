"""Copy whole units of the arena, as plain bytes: defragmentation, and the way to and from host memory."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 8
"""Bytes of the words that are copied."""
CHUNK_BYTES = 64 << 20
"""Most bytes that are read before they are written."""


def unit_rows(arena: Tensor, unit_bytes: int, granule: int) -> Tensor:
    """int64 `[num_granules - unit_granules + 1, unit_bytes / 8]`: row g is the unit that starts at granule g (rows overlap).

    arena: uint8 `[num_granules * granule]`. Offsets are counted in 64 bits whatever the arena's size.
    """
    words = arena.view(torch.int64)
    count = (arena.numel() - unit_bytes) // granule + 1
    return words.as_strided((count, unit_bytes // WORD), (granule // WORD, 1))


def move_units(rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy units from granule to granule, in order. rows: see `unit_rows`. source, target: int64 `[num_units]`.

    Sources ascend and no target overlaps a source that comes later, so a chunk is read whole before it is written.
    """
    chunk = max(1, CHUNK_BYTES // (rows.shape[1] * WORD))
    for start in range(0, len(source), chunk):
        part = slice(start, start + chunk)
        rows[target[part]] = rows[source[part]]
