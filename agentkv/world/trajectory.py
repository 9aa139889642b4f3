"""The expert's conversations: messages for the chat template, ids and weights for training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkv.world import expert, render
from agentkv.world.dialect import HERE, NATIVE, Dialect, Place
from agentkv.world.expert import Past
from agentkv.world.families import Round, Step
from agentkv.world.render import Ids
from agentkv.world.simulator import Simulator
from agentkv.world.task import Followup, Task


@dataclass(frozen=True)
class Event:
    """One message: role user, call, result, finish or text; `wrong` marks a planted mistake.

    `uses`: numbers of the results that a call copies from.
    """

    role: str
    text: str
    copies: tuple[str, ...] = ()
    wrong: bool = False
    uses: tuple[int, ...] = ()


@dataclass
class Episode:
    """The expert's play of a task: events and the simulator's final state."""

    task: Task
    events: list[Event] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    history: list[Past] = field(default_factory=list)
    shown: list[tuple[str, str]] = field(default_factory=list)  # command and body of every result

    def results(self) -> list[str]:
        """Bodies of the tool results in order."""
        return [body for _, body in self.shown]


@dataclass(frozen=True)
class View:
    """What pruning leaves in view: results of lag `lag` (None: all) but for `edges` bytes at both ends."""

    lag: int | None = None
    edges: int = 0

    def gone(self, number: int, read: int) -> bool:
        """Whether result `number` is pruned once `read` results have been read by a finished turn."""
        return self.lag is not None and number + self.lag < read

    def shows(self, body: str, text: str) -> bool:
        """Whether `text` stands in what stays of a pruned `body`."""
        return bool(self.edges) and (text in body[: self.edges] or text in body[-self.edges :])


def play(
    task: Task, dialect: Dialect = NATIVE, mistakes: float = 0.0, seed: int = 0, place: Place = HERE, view: View = View()
) -> Episode:
    """Run the expert in the simulator; with probability `mistakes` a turn is a wrong command.

    With a `view` the expert reads again what it needs and can read again; `Event.uses` tells what else it needs.
    """
    player = _Player(task, dialect, random.Random(f"{task.seed}/{seed}"), place, view)
    for round_ in task.rounds:
        player.play(round_, mistakes)
        if (finish := dialect.finish()) is not None:
            player.events.extend((Event("finish", ""), Event("result", finish[1])))
            player.shown.append(("", finish[1]))
        player.events.append(Event("text", expert.DONE))
        player.read = len(player.shown)
    return Episode(task, player.events, player.simulator.files, player.history, player.shown)


class _Player:
    """One run of the expert."""

    def __init__(self, task: Task, dialect: Dialect, rng: random.Random, place: Place, view: View) -> None:
        self.task, self.dialect, self.rng, self.place, self.view = task, dialect, rng, place, view
        self.simulator = Simulator(task.files, task.programs)
        self.events: list[Event] = []
        self.history: list[Past] = []
        self.shown: list[tuple[str, str]] = []  # command and body of every result
        self.latest: dict[str, int] = {}
        self.last: tuple[int, ...] = ()  # the result of the step before, which the next one may follow
        self.read = 0

    def lost(self, step: Step | None) -> frozenset[str]:
        """The command that has to be run again, if the step's records are out of view."""
        again = self.task.metadata.get("reread")
        number = self.latest.get(again, -1) if again else -1
        if step is None or again not in step.needs or number < 0 or not self.view.gone(number, self.read):
            return frozenset()
        seen = self.view.shows(self.shown[number][1], " ".join(step.copies))
        return frozenset() if seen else frozenset((again,))

    def play(self, round_: Round, mistakes: float) -> None:
        """The request and the calls that answer it."""
        first = not self.events
        self.events.append(Event("user", self.dialect.prompt(round_.prompt) if first else round_.prompt))
        past: list[Past] = []
        self.last = ()
        while (step := expert.next_step(round_, past)) is not None:
            step = expert.next_step(round_, past, self.lost(step)) or step
            wrong = self.rng.random() < mistakes
            command = expert.mistake(self.rng, step) if wrong else step.command
            output, code = self.simulator.run(command)
            past.append(Past(command, code))
            uses = () if wrong else (*self.last, *(self.latest[need] for need in step.needs))
            self.events.append(Event("call", command, () if wrong else step.copies, wrong, uses))
            self.read = len(self.shown)
            if code == 0:
                self.latest[command] = len(self.shown)
            if not wrong and step in round_.steps:  # not one that is only taken again
                self.last = (len(self.shown),)
            self.shown.append((command, self.dialect.body(output, code, self.place)))
            self.events.append(Event("result", self.shown[-1][1]))
            if len(past) > 200:
                raise ValueError(f"seed {self.task.seed}: the expert does not finish")
        self.history.extend(past)


def ask(events: list[Event], followups: Sequence[Followup]) -> None:
    """Append question and answer turns."""
    for item in followups:
        events.append(Event("user", item.question))
        events.append(Event("text", item.answer, tuple(item.answer.split())))


def messages(events: Sequence[Event], dialect: Dialect = NATIVE) -> list[dict[str, Any]]:
    """The conversation as OpenAI messages."""
    out: list[dict[str, Any]] = [{"role": "system", "content": dialect.system}]
    for i, event in enumerate(events):
        if event.role in ("call", "finish"):
            made = {"id": f"call_{i}", **_made(event, dialect)}
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
        append(out, event, dialect)
    return out


def append(out: Ids, event: Event, dialect: Dialect = NATIVE) -> None:
    """Append one event's tokens."""
    weight = 0.0 if event.wrong else render.ASSISTANT
    if event.role == "user":
        render.user(out, event.text)
    elif event.role == "result":
        render.result(out, event.text)
    elif event.role == "text":
        render.text(out, event.text, event.copies, weight)
    else:
        render.call(out, _made(event, dialect), event.copies, weight)


def _made(event: Event, dialect: Dialect) -> dict[str, Any]:
    finish = dialect.finish()
    if event.role == "call":
        return dialect.call(event.text)
    if finish is None:
        raise ValueError(f"the dialect {dialect.name} has no call that hands the work in")
    return finish[0]
