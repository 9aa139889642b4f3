"""From which context on a method's decode step is faster than the dense one, by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from agentkv import methods
from agentkv.bench.decode_step import MODEL, row_step
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.row_methods import TINY, row_method, row_text
from agentkv.bench.shapes import SHAPES

BATCHES, LENGTHS = (1, 8, 32), (8192, 32_768, 131_072)
FILE = "crossover.json"
MARGIN = 0.02
"""By so much less time a step is faster, and no tie."""


class Cell(NamedTuple):
    """rows x length tokens: medians in microseconds, and why the method's could not be captured, if so."""

    rows: int
    length: int
    us: float
    dense_us: float
    how: str


def crossover_rows() -> Iterator[Row]:
    """One row a method: the grid of batches and contexts whose dense KV fits the device."""
    for name in TINY:
        yield Row(f"crossover, {MODEL}, {name}", "x dense at most", None, _measure(name))


def fitting(rig: Rig) -> list[tuple[int, int]]:
    """(rows, length): those whose KV takes no more than six tenths of the device's memory."""
    if rig.tiny:
        return [(1, 96), (2, 96)]
    c = SHAPES[MODEL]
    token_bytes = c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * 2 * 2
    memory = torch.cuda.get_device_properties(rig.device).total_memory
    return [(rows, length) for rows in BATCHES for length in LENGTHS if rows * length * token_bytes < 0.6 * memory]


def smallest(cells: list[Cell]) -> dict[str, int | None]:
    """By batch the smallest context from which the method is faster by MARGIN at every longer one that was measured, too; None:
    never."""
    found: dict[str, int | None] = {}
    for rows in sorted({cell.rows for cell in cells}):
        found[str(rows)] = None
        for cell in sorted((each for each in cells if each.rows == rows), key=lambda each: -each.length):
            if cell.us > cell.dense_us * (1 - MARGIN):
                break
            found[str(rows)] = cell.length
    return found


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What users are told, of a run's JSON: conditions, and by method its options, `smallest`, what was measured, when, and of
    which commit: a file that was gone on with has rows of several."""
    told, kept = {}, ("method", "date", "commit", "faster_from", "cells")
    for row in result["rows"]:
        if row["name"].startswith("crossover, ") and "cells" in row:
            told[row["name"].rpartition(", ")[2]] = {key: row[key] for key in kept}
    return {key: result[key] for key in ("device", "date", "commit")} | {"model": MODEL, "methods": told}


def _measure(name: str) -> Callable[[Rig], Measured]:
    def measure(rig: Rig) -> Measured:
        cells = [_cell(rig, name, rows, length) for rows, length in fitting(rig)]
        more = {"method": row_text(rig, name), "faster_from": smallest(cells), "cells": [cell._asdict() for cell in cells]}
        speed = max(cell.dense_us / cell.us for cell in cells)
        return Measured([cell.us for cell in cells], speed, rig.copy, "TB/s", more=more)

    return measure


def _cell(rig: Rig, name: str, rows: int, length: int) -> Cell:
    key = f"crossover dense {rows}x{length}"
    if key not in rig.kept:
        rig.kept[key] = median(row_step(rig, methods.get("dense"), [length] * rows, profile=False).us)
    found = row_step(rig, row_method(rig, name), [length] * rows, profile=False)
    return Cell(rows, length, median(found.us), rig.kept[key], found.how)
