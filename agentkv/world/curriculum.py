"""Training rows of `micro` and their schedule over the run.

A row is one document of at most `length` tokens: raw records and queries, a drill (records
inside tool results, then questions), an expert's trajectory with late questions, or library
text.  All is drawn from seeds of 1,000,000 and above.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentkv.world import render, tokens, trajectory
from agentkv.world.dialect import BASH_TOOL, SYSTEM
from agentkv.world.render import Ids
from agentkv.world.task import EVALUATION_SEEDS, FAMILIES, Followup, Task, make_task
from agentkv.world.trajectory import Event
from agentkv.world.words import LETTERS, Names, below, fill, prose, value

KINDS = ("raw", "drill", "text", *FAMILIES)
LONGEST = 9728  # 8K tasks with their follow-ups lie inside


@dataclass(frozen=True)
class Stage:
    """Until `until` (a fraction of the run): row lengths with shares of tokens, and the mix."""

    until: float
    lengths: tuple[tuple[int, float], ...]
    mix: tuple[tuple[str, float], ...]
    gaps: float = 0.0
    drops: float = 0.0


RAW = (("raw", 1.0),)
MIXED = (("raw", 0.12), ("drill", 0.20), ("text", 0.03), ("chase", 0.24), ("once", 0.24), ("repair", 0.17))
STAGES = (
    Stage(0.04, ((384, 1.0),), RAW),
    Stage(0.13, ((1280, 1.0),), RAW),
    Stage(0.28, ((2048, 1.0),), MIXED),
    Stage(0.52, ((4096, 1.0),), MIXED, drops=0.1),
    Stage(1.01, ((2048, 0.15), (4096, 0.2), (LONGEST, 0.65)), MIXED, gaps=0.2, drops=0.15),
)
# Further training of weights that have been through the early stages.
LATE_MIX = (("raw", 0.06), ("drill", 0.18), ("text", 0.03), ("chase", 0.21), ("once", 0.32), ("repair", 0.20))
LATE = (Stage(1.01, ((2048, 0.1), (4096, 0.25), (LONGEST, 0.65)), LATE_MIX, gaps=0.1, drops=0.15),)


@dataclass(frozen=True)
class Batch:
    """Rows of one length: ids, loss weights, positions `[rows, length]`, kind `[rows]`."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    positions: NDArray[np.int32]
    kinds: NDArray[np.uint8]


def stage_at(fraction: float, stages: tuple[Stage, ...] = STAGES) -> Stage:
    """The stage that a fraction of the run falls into."""
    return next(stage for stage in stages if fraction < stage.until or stage is stages[-1])


def draw(rng: random.Random, options: tuple[tuple[str, float], ...]) -> str:
    """One name, by weight."""
    at = rng.random() * sum(weight for _, weight in options)
    for name, weight in options:
        at -= weight
        if at < 0:
            return name
    return options[-1][0]


def draw_length(rng: random.Random, stage: Stage, batch_tokens: int) -> int:
    """A row length; shares are of tokens, and every batch has about as many."""
    return int(draw(rng, tuple((str(length), share) for length, share in stage.lengths)))


def batch(rng: random.Random, stage: Stage, batch_tokens: int) -> Batch:
    """One training batch of a stage."""
    length = draw_length(rng, stage, batch_tokens)
    rows = max(1, batch_tokens // length)
    ids = np.zeros((rows, length), np.uint16)
    weights = np.zeros((rows, length), np.float16)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    kinds = np.zeros(rows, np.uint8)
    for i in range(rows):
        kind = draw(rng, stage.mix)
        drop = kind in FAMILIES and rng.random() < stage.drops
        row, place = make_row(rng, kind, length, drop)
        n = min(len(row.ids), length)
        ids[i, :n] = row.ids[:n]
        weights[i, :n] = row.weights[:n]
        positions[i, :n] = place[:n]
        positions[i, n:] += place[n - 1] + 1 - n  # padding goes on counting
        if rng.random() < stage.gaps:
            _gap(rng, positions[i], n)
        kinds[i] = KINDS.index(kind)
    return Batch(ids, weights, positions, kinds)


def _gap(rng: random.Random, positions: NDArray[np.int32], n: int) -> None:
    """Shift positions after some random places, in all by 64 to 32,768."""
    total = 64 * 2 ** (rng.random() * 9)
    cuts = 1 + below(rng, 3)
    for _ in range(cuts):
        positions[below(rng, n) :] += int(total / cuts)


def make_row(rng: random.Random, kind: str, length: int, drop: bool = False) -> tuple[Ids, list[int]]:
    """One document of a kind, with the position of each token."""
    if kind in FAMILIES:
        return _trajectory(rng, kind, length, drop)
    row = {"raw": _raw, "drill": _drill, "text": _text}[kind](rng, length)
    return row, list(range(len(row.ids)))


def _raw(rng: random.Random, length: int) -> Ids:
    """Records `abc 1234` and queries `?abc 1234` for an earlier record at a uniform distance."""
    out = Ids()
    known: dict[str, str] = {}
    order: list[str] = []
    while len(out.ids) + 10 <= length:
        if order and rng.random() < 0.5:
            name = order[below(rng, len(order))]
            out.add(tokens.plain(f"?{name} "))
            out.add(tokens.plain(known[name]), 1.0)
            out.add([10])
            continue
        name = "".join(LETTERS[below(rng, 26)] for _ in range(3))
        if order and rng.random() < 0.3:
            other = order[below(rng, len(order))]
            at = below(rng, 3)
            name = other[:at] + name[at] + other[at + 1 :]
        if name not in known:
            known[name] = value(rng)
            order.append(name)
            out.add(tokens.plain(f"{name} {known[name]}\n"))
    return out


def _drill(rng: random.Random, length: int) -> Ids:
    """Tool results full of records, then questions to the end of the row."""
    names = Names(rng)
    out = Ids()
    _head(rng, out)
    body = int(length * (0.25 + 0.4 * rng.random()))
    count = 1 + below(rng, 4)
    files = [names.fresh() for _ in range(count)]
    render.user(out, "Read " + ", ".join(f"{name}.txt" for name in files) + ".")
    facts = []
    for name in files:
        lines, shown = fill(names, body // count)
        facts.extend(shown)
        render.call(out, f"cat {name}.txt", (name,))
        render.result(out, "\n".join(lines))
    render.text(out, "done")
    while facts and len(out.ids) + 38 <= length:
        fact = facts.pop(below(rng, len(facts)))  # once each: a second answer could be copied from the first
        _question(out, f"code of {fact.name}?", fact.value)
    return out


def _question(out: Ids, question: str, answer: str) -> None:
    render.user(out, question)
    render.text(out, answer, tuple(answer.split()))


def _head(rng: random.Random, out: Ids) -> None:
    """The system block; in some rows other instructions precede it or the schema is spelt otherwise."""
    system, tool = SYSTEM, BASH_TOOL
    if rng.random() < 0.15:
        extra = "\n".join(prose(rng).capitalize() + "." for _ in range(1 + below(rng, 12)))
        system = f"{extra}\n\n{system}"
    if rng.random() < 0.25:
        tool = json.loads(json.dumps(tool))
        function = tool["function"]
        if rng.random() < 0.5:
            function["description"] = prose(rng).capitalize() + "."
        if rng.random() < 0.5:
            function["parameters"]["additionalProperties"] = False
        if rng.random() < 0.5:
            function["parameters"]["properties"]["command"]["description"] = prose(rng)
    render.head(out, system, [tool])


def _trajectory(rng: random.Random, family: str, length: int, drop: bool) -> tuple[Ids, list[int]]:
    """The expert's play of a training task, then late questions about what its results showed."""
    smallest = max(900, int(length * 0.33))
    seed = EVALUATION_SEEDS + below(rng, 2**40)
    task = make_task(seed, family, int(length * 0.93), training=True, min_bytes=smallest)
    dropped = _droppable(rng, task) if drop else set()
    if drop:
        task = replace(task, rounds=task.rounds[:1])
    episode = trajectory.play(task, mistakes=0.0 if drop else 0.05)
    out = Ids()
    _head(rng, out)
    result = -1
    for event in episode.events:
        # Without the body the call that it led to cannot be known.
        blind = event.role == "call" and result in dropped
        result += event.role == "result"
        trajectory.append(out, replace(event, wrong=True) if blind else event)
    late = [item for item in task.late if item.result_index not in dropped]
    missing = sum(out.bodies[i][1] - out.bodies[i][0] for i in dropped)
    _ask_late(rng, out, task, episode.events, late, length + missing)
    return _cut(out, dropped)


def _ask_late(rng: random.Random, out: Ids, task: Task, events: list[Event], late: list[Followup], limit: int) -> None:
    for _ in range(60):
        if len(out.ids) + 40 > limit:
            break
        if rng.random() < 0.06 or not late:
            said = next(e.text for e in reversed(events) if e.text.startswith("echo "))
            _question(out, "what did you answer?", said.removeprefix("echo ").removesuffix(" > answer.txt"))
        else:
            item = late.pop(below(rng, len(late)))
            _question(out, item.question, item.answer)


def _droppable(rng: random.Random, task: Task) -> set[int]:
    """Results that nothing later needs; a random part of them, as if pruned."""
    steps = task.rounds[0].steps
    first = 0 if task.family == "chase" else 1
    candidates = [i for i in range(first, len(steps)) if steps[i].command.startswith("cat ")]
    share = rng.random()
    return {i for i in candidates if rng.random() < share}


def _cut(out: Ids, dropped: set[int]) -> tuple[Ids, list[int]]:
    """Remove dropped bodies; other tokens keep their positions."""
    place = list(range(len(out.ids)))
    for i in sorted(dropped, reverse=True):
        start, end = out.bodies[i]
        for items in (out.ids, out.weights, place):
            del items[start:end]
    return out, place


@cache
def _library() -> tuple[Path, ...]:
    return tuple(sorted(Path(os.__file__).parent.glob("*.py")))


def _text(rng: random.Random, length: int) -> Ids:
    """A piece of the standard library's source."""
    files = _library()
    out = Ids()
    while len(out.ids) < length:
        data = files[below(rng, len(files))].read_bytes()
        start = below(rng, max(1, len(data) - length))
        out.add(list(data[start : start + length - len(out.ids)]), 0.1)
    return out
