"""The newest queries of each row's prompt, kept for its seal."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.engine.core import RowWork
from agentkv.engine.sparse import ModelShape
from agentkv.kernels.place_rows import place_rows


class QueryWindow:
    """A ring of rotated queries by row and layer, `[max_rows + 1, num_layers, size, num_heads, head_dim]` in the model's dtype.
    The last line is that of dead rows, which fill up a captured step.

    Only prompts enter: what is decoded and what is forwarded to be looked at leaves no trace. A row starts afresh with a new
    sequence, and when it has been sealed.
    """

    def __init__(self, max_rows: int, shape: ModelShape, size: int, device: torch.device) -> None:
        self.size = size
        dims = (max_rows + 1, shape.num_layers, size, shape.num_heads, shape.head_dim)
        self._ring = torch.empty(dims, dtype=getattr(torch, shape.dtype), device=device)
        self._counts = [0] * max_rows
        self._owners = [-1] * max_rows

    @staticmethod
    def bytes(max_rows: int, shape: ModelShape, size: int) -> int:
        """What it takes of the device's memory."""
        itemsize: int = getattr(torch, shape.dtype).itemsize
        return (max_rows + 1) * shape.num_layers * size * shape.num_heads * shape.head_dim * itemsize

    def enter(self, work: RowWork) -> list[tuple[int, int]]:
        """(token of the row's, place in the ring) of what the step adds; counts it as there. What later tokens of the prompt
        will overwrite is not written."""
        if work.replay or (work.sample and work.step):
            return []
        if work.position == 0 or self._owners[work.row] != work.seq_id:
            self._counts[work.row], self._owners[work.row] = 0, work.seq_id
        before, count = self._counts[work.row], len(work.tokens)
        self._counts[work.row] += count
        first = max(0, count + work.to_come - self.size)
        return [(token, (before + token) % self.size) for token in range(first, count)]

    def forget(self, row: int) -> None:
        """What the row asked so far is done with."""
        self._counts[row] = 0

    def newest(self, row: int, layers: range, most: int) -> Tensor:
        """The row's last queries of some layers, at most `most`, oldest first: `[num_layers, w, num_heads, head_dim]`."""
        ring, count = self._ring[row, layers.start : layers.stop], self._counts[row]
        turn = count % self.size
        known = ring[:, :count] if count < self.size else torch.cat((ring[:, turn:], ring[:, :turn]), 1)
        return known[:, max(0, known.shape[1] - most) :]

    def rows(self, tokens: Tensor, rows: Tensor, places: Tensor) -> QueryRows:
        """Where a batch's queries go, int64 each: tokens of the batch, their rows, and the places in their rings."""
        return QueryRows(self._ring, tokens, rows, places)


class QueryRows(NamedTuple):
    """Which queries of a batch are kept, and where: see `QueryWindow.rows`."""

    ring: Tensor
    tokens: Tensor
    rows: Tensor
    places: Tensor

    def keep(self, layer: int, q: Tensor) -> None:
        """Keep them of the batch's rotated queries `[num_tokens, num_heads, head_dim]`."""
        place_rows(self.ring[:, layer], self.rows, self.places, q, self.tokens)
