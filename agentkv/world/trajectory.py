"""The expert's conversations: messages for the chat template, ids and weights for training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkv.world import expert, render
from agentkv.world.dialect import NATIVE, Dialect
from agentkv.world.expert import Past
from agentkv.world.render import Ids
from agentkv.world.simulator import Simulator
from agentkv.world.task import Followup, Task


@dataclass(frozen=True)
class Event:
    """One message: role user, call, result or text; `wrong` marks a planted mistake."""

    role: str
    text: str
    copies: tuple[str, ...] = ()
    wrong: bool = False


@dataclass
class Episode:
    """The expert's play of a task: events and the simulator's final state."""

    task: Task
    events: list[Event] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    history: list[Past] = field(default_factory=list)

    def results(self) -> list[str]:
        """Bodies of the tool results in order."""
        return [event.text for event in self.events if event.role == "result"]


def play(task: Task, dialect: Dialect = NATIVE, mistakes: float = 0.0, seed: int = 0) -> Episode:
    """Run the expert in the simulator; with probability `mistakes` a turn is a wrong command."""
    rng = random.Random(f"{task.seed}/{seed}")
    simulator = Simulator(task.files, task.programs)
    episode = Episode(task)
    for round_ in task.rounds:
        episode.events.append(Event("user", round_.prompt))
        past: list[Past] = []
        while (step := expert.next_step(round_, past)) is not None:
            wrong = rng.random() < mistakes
            command = expert.mistake(rng, step) if wrong else step.command
            output, code = simulator.run(command)
            past.append(Past(command, code))
            episode.events.append(Event("call", command, () if wrong else step.copies, wrong))
            episode.events.append(Event("result", dialect.body(output, code)))
            if len(past) > 200:
                raise ValueError(f"seed {task.seed}: the expert does not finish")
        episode.history.extend(past)
        episode.events.append(Event("text", expert.DONE))
    episode.files = simulator.files
    return episode


def ask(events: list[Event], followups: Sequence[Followup]) -> None:
    """Append question and answer turns."""
    for item in followups:
        events.append(Event("user", item.question))
        events.append(Event("text", item.answer, tuple(item.answer.split())))


def messages(events: Sequence[Event], dialect: Dialect = NATIVE) -> list[dict[str, Any]]:
    """The conversation as OpenAI messages."""
    out: list[dict[str, Any]] = [{"role": "system", "content": dialect.system}]
    for i, event in enumerate(events):
        if event.role == "call":
            made = {"id": f"call_{i}", **dialect.call(event.text)}
            out.append({"role": "assistant", "content": "", "tool_calls": [made]})
        elif event.role == "result":
            out.append({"role": "tool", "tool_call_id": f"call_{i - 1}", "content": event.text})
        else:
            role = "assistant" if event.role == "text" else event.role
            out.append({"role": role, "content": event.text})
    return out


def encode(
    events: Sequence[Event],
    dialect: Dialect = NATIVE,
    system: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> Ids:
    """Token ids and loss weights; `system` and `tools` replace the dialect's."""
    out = Ids()
    render.head(out, dialect.system if system is None else system, dialect.tools if tools is None else tools)
    for event in events:
        append(out, event)
    return out


def append(out: Ids, event: Event) -> None:
    """Append one event's tokens."""
    if event.role == "user":
        render.user(out, event.text)
    elif event.role == "result":
        render.result(out, event.text)
    elif event.role == "call":
        render.call(out, event.text, event.copies, 0.0 if event.wrong else render.ASSISTANT)
    else:
        render.text(out, event.text, event.copies)
