"""Training rows from the expert's play: plain, with pruned bodies out of view, or with placeholders in their place.

Pruning follows the session's rule: result `i` of lag `p` goes when a turn that follows result `i + p` has ended.  Results
that a later step still needs stay (as if pinned), except that of a command which can be run again: then the expert runs it
again.  A *masked* row keeps every token and says from which query on a body is out of view (as pruning in place does); a
*rebuilt* row has a placeholder for each body that is gone by the time the first fact is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentkv.world import heads, render, trajectory
from agentkv.world.dialect import DIALECTS, Dialect
from agentkv.world.render import Ids, finish_size, head_size, turn_size
from agentkv.world.task import EVALUATION_SEEDS, Followup, Task, make_task
from agentkv.world.trajectory import Episode, Event, View
from agentkv.world.words import below

PLACEHOLDER = "[pruned]"
SHORT = 4000  # below this the other dialects' frames leave no room for a task
Shape = Literal["plain", "masked", "rebuilt"]
LAGS = (0, 0, 1, 1, 2, 3, 4)


def draw_dialect(rng: random.Random, length: int) -> Dialect:
    """Half of the rows are native."""
    names = list(DIALECTS)
    at = rng.random()
    return DIALECTS[names[0] if at < 0.5 or length < SHORT else names[1] if at < 0.75 else names[2]]


def trajectory_row(rng: random.Random, family: str, length: int, shape: Shape = "plain") -> Ids:
    """The expert's play of a training task, then late questions about what its results showed."""
    dialect = draw_dialect(rng, length)
    smallest = max(900, int(length * 0.33))
    extra = heads.extra_size(rng, length - max(smallest, _least(dialect)))
    largest = max(smallest, int((length - extra) * 0.93))
    seed = EVALUATION_SEEDS + below(rng, 2**40)
    task = make_task(seed, family, largest, training=True, min_bytes=min(smallest, largest), dialect=dialect)
    view = View() if shape == "plain" else _draw_view(rng, family)
    fitting = 1 + (length - extra - task.metadata["bytes"]) // (2 * turn_size(dialect) + finish_size(dialect) + 300)
    task = replace(task, rounds=task.rounds[: 1 if shape == "rebuilt" else max(1, fitting)])
    place = heads.place(rng)
    episode = trajectory.play(task, dialect, 0.05, place=place, view=view)
    out = Ids()
    heads.head(rng, out, dialect, extra)
    write = _Writer(rng, out, dialect, task, episode, view)
    if shape == "rebuilt":
        write.rebuilt()
    else:
        write.plain()
    write.questions(length)
    return out


def _draw_view(rng: random.Random, family: str) -> View:
    """A lag and a keep rule.  With lag 0 who reads again forgets what for, so there the lag is at least 1."""
    lag = LAGS[below(rng, len(LAGS))]
    return View(max(lag, int(family == "again")), 16 + below(rng, 112) if rng.random() < 0.25 else 0)


def _least(dialect: Dialect) -> int:
    """Bytes of a short task with its head."""
    return head_size(dialect) + 9 * turn_size(dialect) + 1000


@dataclass
class _Writer:
    """Appends an episode to `out` and keeps account of which results are out of view."""

    rng: random.Random
    out: Ids
    dialect: Dialect
    task: Task
    episode: Episode
    view: View

    def __post_init__(self) -> None:
        self.pinned = _pinned(self.episode.events, self.view)
        self.results = 0
        self.gone: set[int] = set()

    def plain(self) -> None:
        """Every event as it was; bodies go out of view when their time has come."""
        for event in self.episode.events:
            self._append(event)

    def _append(self, event: Event) -> None:
        trajectory.append(self.out, event, self.dialect)
        if event.role == "result":
            self.results += 1
        elif event.role != "user":
            self._prune(self.results, len(self.out.ids) - 1)  # the newline behind a turn belongs to the next request

    def _prune(self, read: int, at: int) -> None:
        for number in range(read):
            if number in self.gone or number in self.pinned or not self.view.gone(number, read):
                continue
            self.gone.add(number)
            start, end = self.out.bodies[number]
            self.out.gone.append((start + self.view.edges, end - self.view.edges, at))

    def rebuilt(self) -> None:
        """Placeholders stand for what is gone when the first fact is needed; turns before that teach nothing."""
        events = self.episode.events
        moment = _moment(events, self.task)
        read = sum(event.role == "result" for event in events[:moment]) - 1
        self.gone = {number for number in range(read) if number not in self.pinned and self.view.gone(number, read)}
        for i, event in enumerate(events):
            if event.role == "result":
                if self.results in self.gone:
                    event = replace(event, text=_shortened(event.text, self.view.edges))
                self.results += 1
            elif event.role != "user" and i < moment and self.gone:
                event = replace(event, wrong=True)
            trajectory.append(self.out, event, self.dialect)
        self.view = View()  # nothing else goes

    def questions(self, length: int) -> None:
        """Late questions about results in view, to the end of the row; once each, so that no answer stands twice."""
        steps, shown = self.task.rounds[0].steps, [command for command, _ in self.episode.shown]
        latest = {command: number for number, command in enumerate(shown)}
        late = list(self.task.late)
        answers = [event.text for event in self.episode.events if event.text.startswith("echo ") and not event.wrong]
        said = next(text for text in reversed(answers) if text.endswith(" > answer.txt"))
        for _ in range(60 + length // 150):
            if len(self.out.ids) + 40 > length:
                break
            if self.rng.random() < 0.06 or not late:
                self._ask("what did you answer?", said.removeprefix("echo ").removesuffix(" > answer.txt"))
                continue
            item: Followup = late.pop(below(self.rng, len(late)))
            if item.result_index is not None and latest[steps[item.result_index].command] not in self.gone:
                self._ask(item.question, item.answer)

    def _ask(self, question: str, answer: str) -> None:
        render.user(self.out, question)
        self._append(Event("text", answer, tuple(answer.split())))


def _pinned(events: Sequence[Event], view: View) -> set[int]:
    """Results that a step uses after their time."""
    pinned: set[int] = set()
    results = read = 0
    for event in events:
        if event.role == "result":
            results += 1
        elif event.role != "user":
            pinned.update(number for number in event.uses if view.gone(number, read))
            read = results
    return pinned


def _moment(events: Sequence[Event], task: Task) -> int:
    """The first call that needs an earlier result than the latest, or runs a command again to see it; else the last call."""
    results, last, again = 0, 0, task.metadata.get("reread")
    seen = False
    for i, event in enumerate(events):
        results += event.role == "result"
        if event.role == "call":
            last = i
            if any(number < results - 1 for number in event.uses) or (seen and event.text == again):
                return i
            seen = seen or event.text == again
    return last


def _shortened(body: str, edges: int) -> str:
    """What stands for a body after a rebuild; a body no longer than that stays."""
    if len(body) - 2 * edges <= len(PLACEHOLDER):
        return body
    return body[:edges] + PLACEHOLDER + (body[-edges:] if edges else "")
