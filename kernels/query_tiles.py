"""Tokens of several rows in tiles: which of them one program of `paged_extend` takes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """A step's tokens, row by row, as tiles of at most `size` tokens of one row.

    firsts, rows: int64 `[num_tiles]`, a tile's first token and its row, counted in the step. stops: int64 `[num_rows]`, token
    behind the last of each row. lines: int64 `[num_tokens]`, the row of each token. A tile that begins at its row's stop is
    empty.
    """

    size: int
    firsts: Tensor
    rows: Tensor
    stops: Tensor
    lines: Tensor

    def seen(self, lens: Tensor) -> Tensor:
        """Slots up to each token's own, int32 `[num_tokens]`. lens: int32 `[num_rows]`; a row's last slots are its tokens'."""
        token = torch.arange(len(self.lines), device=lens.device)
        return lens[self.lines] - (self.stops[self.lines] - 1 - token).to(torch.int32)


def tile_size(group: int, head_dim: int, itemsize: int) -> int:
    """Tokens of a tile: with the `group` query heads of a KV head they fill the rows of a program's matrix instructions; fewer
    where there is no room for them, and in float32, which has no such instructions."""
    rows = max(32, min(128, 16384 // head_dim)) if itemsize < 4 else 32
    return max(1, rows // (1 << (group - 1).bit_length()))


def cut_tiles(counts: Sequence[int], size: int, most: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Firsts, rows, stops and lines of rows with so many tokens, see QueryTiles; empty tiles up to `most`, no fewer than there
    are."""
    stops = list(accumulate(counts))
    tiles = [(first, row) for row, stop in enumerate(stops) for first in range(stop - counts[row], stop, size)]
    tiles += [(stops[-1], len(stops) - 1)] * (most - len(tiles))
    lines = [row for row, count in enumerate(counts) for _ in repeat(None, count)]
    return [first for first, _ in tiles], [row for _, row in tiles], stops, lines


def bound_tiles(num_tokens: int, num_rows: int, size: int) -> int:
    """Tiles that so many tokens of so many rows can make, at most."""
    return num_tokens // size + num_rows
