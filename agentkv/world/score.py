"""Teacher-forced scores: is every assistant token right when the expert's history is given?

A task counts when all assistant tokens of the request are right, which makes the greedy run
the expert's.  Follow-up questions are counted apart.  Results lie in a table by dialect,
family and length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agentkv.world.dialect import DIALECTS
from agentkv.world.micro_model import Micro
from agentkv.world.samples import Sample, sample
from agentkv.world.task import FAMILIES

BUCKETS = {"2K": (2048, 3000), "4K": (4000, 5000), "8K": (7000, 8192), "16K": (14_000, 16_384)}
REPORTED = {**BUCKETS, "32K": (28_000, 32_768)}  # the longest is reported, not promised
TOKENS = 262_144  # of one forward pass


class Cell(NamedTuple):
    """One cell of the table with the seeds that fill it."""

    dialect: str
    family: str
    bucket: str
    seeds: range


def cells(seeds: int, first: int, buckets: Iterable[str] | None = None) -> list[Cell]:
    """All cells, each over `seeds` evaluation seeds from `first` on; a quarter of them at the longest length."""
    found = []
    for bucket in BUCKETS if buckets is None else buckets:
        count = seeds if bucket in BUCKETS else max(1, seeds // 4)
        found += [Cell(d, f, bucket, range(first, first + count)) for d in DIALECTS for f in FAMILIES]
    return found


def samples(cell: Cell) -> list[Sample]:
    """The expert's episodes of a cell."""
    low, high = REPORTED[cell.bucket]
    return [sample(seed, cell.family, low, high, DIALECTS[cell.dialect]) for seed in cell.seeds]


@torch.no_grad()
def predictions(model: Micro, rows: list[NDArray[np.uint16]]) -> torch.Tensor:
    """The likeliest next token at each place of padded rows, `[rows, length]` on the CPU."""
    device = model.embed_tokens.weight.device
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row.astype("int64"))
    positions = torch.arange(length, device=device).expand(len(rows), -1)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model(ids.to(device), positions)
        return model.logits(hidden).argmax(-1).cpu()


def judge(item: Sample, best: list[int]) -> tuple[bool, int, int]:
    """Whether the task was right, right follow-ups, and how many follow-ups there were."""
    wrong = {question for at, question in item.judged if best[at - 1] != item.ids[at]}
    asked = {question for _, question in item.judged if question >= 0}
    return -1 not in wrong, len(asked - wrong), len(asked)


def score(model: Micro, chosen: list[Cell], filled: Iterable[list[Sample]] | None = None) -> dict[str, Any]:
    """Scores by dialect, family and length; `filled` are the samples of each cell, where they are made elsewhere."""
    table: dict[str, Any] = {}
    for cell, items in zip(chosen, filled or map(samples, chosen), strict=True):
        good = right = asked = 0
        for part in _parts(items):
            best = predictions(model, [item.ids for item in part]).tolist()
            for item, line in zip(part, best, strict=True):
                task, hits, questions = judge(item, line)
                good, right, asked = good + task, right + hits, asked + questions
        row = table.setdefault(cell.dialect, {}).setdefault(cell.family, {})
        row[cell.bucket] = {"success": good / len(items), "followups": right / max(asked, 1), "n": len(items)}
    return table


def _parts(items: list[Sample]) -> Iterator[list[Sample]]:
    """Items in groups that one pass can take."""
    rows = max(1, TOKENS // max(len(item.ids) for item in items))
    for at in range(0, len(items), rows):
        yield items[at : at + rows]


def lowest(table: dict[str, Any]) -> tuple[float, float]:
    """The smallest and the mean success of a table (without the longest), for choosing among checkpoints."""
    values = [
        cell["success"]
        for families in table.values()
        for family in families.values()
        for bucket, cell in family.items()
        if bucket in BUCKETS
    ]
    return min(values), sum(values) / len(values)


def short(table: dict[str, Any]) -> dict[str, Any]:
    """The table's success rates alone, for a log line: a list by length for each dialect and family."""
    return {
        d: {f: [round(cell["success"], 3) for cell in family.values()] for f, family in families.items()}
        for d, families in table.items()
    }
