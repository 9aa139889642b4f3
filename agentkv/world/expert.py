"""The scripted expert: a pure function of the task and the history.

It thinks nothing aloud and follows the plan; a step counts as done when its command ran with
the planned exit status, so after an error (its own or a planted one) it tries the step again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from agentkv.world.families import Round, Step
from agentkv.world.task import Task
from agentkv.world.words import LETTERS, below

DONE = "done"


class Past(NamedTuple):
    """One command of the history and its exit status."""

    command: str
    code: int


def next_step(round_: Round, history: Sequence[Past], lost: AbstractSet[str] = frozenset()) -> Step | None:
    """The step to take now, or None when the round is finished (then the expert says `DONE`).

    `lost`: commands whose result is out of view and that may be run again; the one that is needed is.
    """
    done = 0
    for past in history:
        if done < len(round_.steps):
            step = round_.steps[done]
            done += past == (step.command, step.code)
    if done == len(round_.steps):
        return None
    step = round_.steps[done]
    missing = [command for command in step.needs if command in lost]
    return Step(missing[0]) if missing else step


def answer(task: Task, question: str) -> str:
    """The answer to a follow-up question."""
    for item in (*task.followups, *task.late):
        if item.question == question:
            return item.answer
    raise ValueError(f"the task has no follow-up {question!r}")


def mistake(rng: random.Random, step: Step) -> str:
    """A wrong command in place of `step`: a path that does not exist or a rule broken."""
    command, _, rest = step.command.partition(" ")
    letter = LETTERS[below(rng, 26)]
    kind = below(rng, 4)
    if kind == 0 and command == "cat" and rest.endswith(".txt"):
        return f"cat {letter}{rest[1:]}"
    if kind == 1 and command in ("cat", "grep"):
        return f"{command} {rest}/{letter}"
    if kind == 2:
        return f"cat /{rest.split(' ')[-1]}"
    return f"cat {letter}{LETTERS[below(rng, 26)]}.log"
