"""The expert's episodes of evaluation seeds as token ids, with the places where a model is judged.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentkv.world import trajectory
from agentkv.world.dialect import NATIVE, Dialect
from agentkv.world.task import make_task


@dataclass(frozen=True)
class Sample:
    """Ids of an episode with follow-ups; `judged` are (index, question number or -1)."""

    ids: NDArray[np.uint16]
    judged: list[tuple[int, int]]


def sample(seed: int, family: str, low: int, high: int, dialect: Dialect = NATIVE) -> Sample:
    """The expert's episode of an evaluation seed, its conversation of about `low` to `high` bytes."""
    task = make_task(seed, family, high, min_bytes=low, dialect=dialect)
    events = trajectory.play(task, dialect).events
    cut = len(trajectory.encode(events, dialect).ids)
    trajectory.ask(events, task.followups)
    out = trajectory.encode(events, dialect)
    judged: list[tuple[int, int]] = []
    question = -1
    for i, weight in enumerate(out.weights):
        if i >= cut and weight >= 1 and out.weights[i - 1] < 1:
            question += 1
        if weight >= 1:
            judged.append((i, question))
    return Sample(np.array(out.ids, np.uint16), judged)
