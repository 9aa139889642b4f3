"""A task of the agent world: files, a request, the expert's plan and what counts as solved.

Evaluation seeds lie below 1,000,000; the training form refuses them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentkv.world import families, lookups
from agentkv.world.dialect import NATIVE, Dialect
from agentkv.world.families import Draft, Round
from agentkv.world.programs import Program
from agentkv.world.render import finish_size, head_size, turn_size
from agentkv.world.words import below

EVALUATION_SEEDS = 1_000_000
FAMILIES: dict[str, Callable[[Draft], None]] = {
    "chase": families.chase,
    "once": families.once,
    "repair": families.repair,
    "join": lookups.join,
    "update": lookups.update,
    "again": lookups.again,
}
BY_SEED = ("chase", "once", "repair")  # the families that a seed alone can give
SMALLEST = 2048
LARGEST = 32_768
SLACK = 9  # tokens a turn beyond its frames: error texts and the like


class Followup(NamedTuple):
    """A later question; `result_index` counts tool results and is None for own commands."""

    question: str
    answer: str
    result_index: int | None


@dataclass(frozen=True)
class Task:
    """One task.  `rounds[0]` is the request; further rounds exist in the training form only."""

    seed: int
    family: str
    files: dict[str, str]
    programs: dict[str, Program]
    rounds: tuple[Round, ...]
    answer: str
    followups: tuple[Followup, ...]
    late: tuple[Followup, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The user's request."""
        return self.rounds[0].prompt


def family_of(seed: int) -> str:
    """The family of a seed; any run of three seeds has each of them once."""
    return BY_SEED[seed % len(BY_SEED)]


def make_task(
    seed: int,
    family: str | None = None,
    max_bytes: int = 8192,
    training: bool = False,
    min_bytes: int = SMALLEST,
    dialect: Dialect = NATIVE,
) -> Task:
    """The task of `seed`: its whole conversation in `dialect` has about `min_bytes` to `max_bytes` bytes."""
    if training == (seed < EVALUATION_SEEDS):
        raise ValueError(f"seed {seed}: seeds below {EVALUATION_SEEDS} are for evaluation only, others for training")
    if seed < 0 or max_bytes > LARGEST or max_bytes < min_bytes:
        raise ValueError(f"a task has a seed >= 0 and {min_bytes} to {LARGEST} bytes, not {seed} and {max_bytes}")
    if not training and min_bytes < SMALLEST:
        raise ValueError(f"evaluation tasks have at least {SMALLEST} bytes")
    name = family or family_of(seed)
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known: {', '.join(FAMILIES)}")
    rng = random.Random(seed)
    size = round(math.exp(math.log(min_bytes) + rng.random() * math.log(max_bytes / min_bytes)))
    draft = Draft(rng, size - head_size(dialect), training, turn_size(dialect) + SLACK, finish_size(dialect))
    FAMILIES[name](draft)
    return _finish(seed, name, draft, size)


def _finish(seed: int, family: str, draft: Draft, size: int) -> Task:
    rng = draft.rng
    late = [Followup(f"code of {fact.name}?", fact.value, at) for at, fact in draft.facts]
    based = [item for item, (_, fact) in zip(late, draft.facts, strict=True) if fact.base]
    chosen: list[Followup] = []
    # One question for each result that shows facts, so that some source is always resident.
    for at in sorted({item.result_index or 0 for item in based}):
        here = [item for item in based if item.result_index == at]
        chosen.append(here[below(rng, len(here))])
    chosen.append(Followup("what did you answer?", draft.answer, None))
    return Task(
        seed=seed,
        family=family,
        files=dict(draft.files),
        programs=dict(draft.programs),
        rounds=tuple(draft.rounds),
        answer=draft.answer,
        followups=tuple(chosen),
        late=tuple(late),
        metadata={"bytes": size, **draft.metadata},
    )
