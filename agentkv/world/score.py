"""Teacher-forced scores: is every assistant token right when the expert's history is given?

A task counts when all assistant tokens of the request are right, which makes the greedy run
the expert's.  Follow-up questions are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agentkv.world import trajectory
from agentkv.world.micro_model import Micro
from agentkv.world.task import FAMILIES, make_task

BUCKETS = {"2K": (2048, 3000), "4K": (4000, 5000), "8K": (7000, 8192)}


@dataclass(frozen=True)
class Sample:
    """Ids of an episode with follow-ups; `judged` are (index, question number or -1)."""

    ids: list[int]
    judged: list[tuple[int, int]]


def sample(seed: int, family: str, low: int, high: int) -> Sample:
    """The expert's episode of an evaluation seed."""
    task = make_task(seed, family, high, min_bytes=low)
    events = trajectory.play(task).events
    cut = len(trajectory.encode(events).ids)
    trajectory.ask(events, task.followups)
    out = trajectory.encode(events)
    judged: list[tuple[int, int]] = []
    question = -1
    for i, weight in enumerate(out.weights):
        if i >= cut and weight >= 1 and out.weights[i - 1] < 1:
            question += 1
        if weight >= 1:
            judged.append((i, question))
    return Sample(out.ids, judged)


@torch.no_grad()
def predictions(model: Micro, rows: list[list[int]]) -> torch.Tensor:
    """The likeliest next token at each place of padded rows, `[rows, length]` on the CPU."""
    device = model.embed_tokens.weight.device
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    positions = torch.arange(length, device=device).expand(len(rows), -1)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model(ids.to(device), positions)
        return model.logits(hidden).argmax(-1).cpu()


def judge(item: Sample, best: list[int]) -> tuple[bool, int, int]:
    """Whether the task was right, right follow-ups, and how many follow-ups there were."""
    wrong = {question for at, question in item.judged if best[at - 1] != item.ids[at]}
    asked = {question for _, question in item.judged if question >= 0}
    return -1 not in wrong, len(asked - wrong), len(asked)


def score(model: Micro, seeds: int, first: int = 0, rows: int = 16, families: list[str] | None = None) -> dict[str, Any]:
    """Scores by family and length over `seeds` evaluation seeds from `first` on."""
    table: dict[str, Any] = {}
    for family in families or FAMILIES:
        table[family] = {}
        for bucket, (low, high) in BUCKETS.items():
            items = [sample(first + s, family, low, high) for s in range(seeds)]
            good = right = asked = 0
            for at in range(0, len(items), rows):
                part = items[at : at + rows]
                best = predictions(model, [item.ids for item in part]).tolist()
                for item, line in zip(part, best, strict=True):
                    task, hits, questions = judge(item, line)
                    good, right, asked = good + task, right + hits, asked + questions
            table[family][bucket] = {"success": good / seeds, "followups": right / max(asked, 1), "n": seeds}
    return table


def lowest(table: dict[str, Any]) -> tuple[float, float]:
    """The smallest and the mean success of a table, for choosing among checkpoints."""
    values = [cell["success"] for family in table.values() for cell in family.values()]
    return min(values), sum(values) / len(values)
