"""Training rows of `micro` and their schedule over the run.

A row is one document of at most `length` tokens: raw records and queries, a drill (records
inside tool results, then questions), an expert's trajectory with late questions, or library
text.  All is drawn from seeds of 1,000,000 and above.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentkv.world import heads, render, tokens
from agentkv.world.render import Ids
from agentkv.world.rows import Shape, draw_dialect, trajectory_row
from agentkv.world.task import FAMILIES
from agentkv.world.words import LETTERS, Names, below, fill, value

KINDS = ("raw", "drill", "text", *FAMILIES)
K3, K4, K8, K16, K32 = 3072, 4352, 8960, 17_408, 33_792  # tasks of that many K bytes with their follow-ups lie inside
MASKABLE = (1024, K4, K8)  # lengths at which a whole mask is affordable
NEVER = 2**30


@dataclass(frozen=True)
class Stage:
    """Until `until` (a fraction of the run): row lengths with shares of tokens, and the mix.

    `gaps`: share of rows with position gaps; `masked`: share of the batches of maskable lengths whose trajectories have
    bodies out of view; `rebuilt`: share of the other trajectories that have placeholders.
    """

    until: float
    lengths: tuple[tuple[int, float], ...]
    mix: tuple[tuple[str, float], ...]
    gaps: float = 0.0
    masked: float = 0.0
    rebuilt: float = 0.0


RAW = (("raw", 1.0),)
Mix = tuple[tuple[str, float], ...]
MIXED: Mix = (
    *(("raw", 0.08), ("drill", 0.16), ("text", 0.03), ("chase", 0.13), ("once", 0.13), ("repair", 0.12)),
    *(("join", 0.13), ("update", 0.11), ("again", 0.11)),
)
STAGES = (
    Stage(0.04, ((384, 1.0),), RAW),
    Stage(0.13, ((1280, 1.0),), RAW),
    Stage(0.25, ((K3, 1.0),), MIXED),
    Stage(0.45, ((K4, 1.0),), MIXED, masked=0.12, rebuilt=0.05),
    Stage(0.65, ((K4, 0.4), (K8, 0.6)), MIXED, gaps=0.2, masked=0.12, rebuilt=0.05),
    Stage(1.01, ((K4, 0.46), (K16, 0.46), (K32, 0.08)), MIXED, gaps=0.2, masked=0.2, rebuilt=0.06),
)
# Further training of weights that know the early stages: the new families and dialects first.
LATE_MIX: Mix = (
    *(("raw", 0.04), ("drill", 0.12), ("text", 0.02), ("chase", 0.10), ("once", 0.16), ("repair", 0.13)),
    *(("join", 0.18), ("update", 0.12), ("again", 0.13)),
)
LATE = (
    Stage(0.10, ((K3, 1.0),), LATE_MIX),
    Stage(0.25, ((K4, 1.0),), LATE_MIX, masked=0.15, rebuilt=0.05),
    Stage(0.45, ((K4, 0.4), (K8, 0.6)), LATE_MIX, gaps=0.2, masked=0.15, rebuilt=0.05),
    Stage(1.01, ((K4, 0.46), (K16, 0.46), (K32, 0.08)), LATE_MIX, gaps=0.2, masked=0.25, rebuilt=0.06),
)


def without_pruning(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same schedule for the twin that never saw a pruned body."""
    return tuple(replace(stage, masked=0.0, rebuilt=0.0) for stage in stages)


@dataclass(frozen=True)
class Batch:
    """Rows of one length: ids, loss weights, positions `[rows, length]`, kind `[rows]`.

    `gone` `[rows, length]`, where given: the index of the first query that no longer sees a token (`NEVER`: all see it).
    """

    ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    positions: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    gone: NDArray[np.int32] | None = None


def stage_at(fraction: float, stages: tuple[Stage, ...] = STAGES) -> Stage:
    """The stage that a fraction of the run falls into."""
    return next(stage for stage in stages if fraction < stage.until or stage is stages[-1])


def shapes(stages: tuple[Stage, ...]) -> list[tuple[int, bool]]:
    """Every row length of a schedule, without and with a mask."""
    found = {(length, False) for stage in stages for length, _ in stage.lengths}
    found |= {(length, True) for stage in stages if stage.masked for length, _ in stage.lengths if length in MASKABLE}
    return sorted(found)


def draw(rng: random.Random, options: tuple[tuple[str, float], ...]) -> str:
    """One name, by weight."""
    at = rng.random() * sum(weight for _, weight in options)
    for name, weight in options:
        at -= weight
        if at < 0:
            return name
    return options[-1][0]


def batch(rng: random.Random, stage: Stage, batch_tokens: int) -> Batch:
    """One training batch of a stage; the shares of its lengths are of tokens."""
    length = int(draw(rng, tuple((str(length), share) for length, share in stage.lengths)))
    masked = length in MASKABLE and rng.random() < stage.masked
    size = max(1, batch_tokens // length), length
    made = Batch(
        ids=np.zeros(size, np.uint16),
        weights=np.zeros(size, np.float16),
        positions=np.tile(np.arange(length, dtype=np.int32), (size[0], 1)),
        kinds=np.zeros(size[0], np.uint8),
        gone=np.full(size, NEVER, np.int32) if masked else None,
    )
    for i in range(size[0]):
        kind = draw(rng, stage.mix)
        shape: Shape = "masked" if masked else "rebuilt" if rng.random() < stage.rebuilt else "plain"
        _fill_row(made, i, kind, make_row(rng, kind, length, shape))
        if rng.random() < stage.gaps:
            _gap(rng, made.positions[i])
    return made


def _fill_row(made: Batch, i: int, kind: str, row: Ids) -> None:
    length = made.ids.shape[1]
    n = min(len(row.ids), length)
    made.ids[i, :n] = row.ids[:n]
    made.weights[i, :n] = row.weights[:n]
    made.kinds[i] = KINDS.index(kind)
    if made.gone is not None:
        for start, end, at in row.gone:
            made.gone[i, start : max(start, end)] = at


def _gap(rng: random.Random, positions: NDArray[np.int32]) -> None:
    """Shift positions after some random places, in all by 64 up to the whole window."""
    n = len(positions)
    total = 64 * ((tokens.CONTEXT - n) / 64) ** rng.random()
    cuts = 1 + below(rng, 3)
    for _ in range(cuts):
        positions[below(rng, n) :] += int(total / cuts)


def make_row(rng: random.Random, kind: str, length: int, shape: Shape = "plain") -> Ids:
    """One document of a kind; `shape` is for trajectories."""
    if kind in FAMILIES:
        return trajectory_row(rng, kind, length, shape)
    return {"raw": _raw, "drill": _drill, "text": _text}[kind](rng, length)


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
    dialect, place = draw_dialect(rng, length), heads.place(rng)
    heads.head(rng, out, dialect, heads.extra_size(rng, length // 2))
    body = int((length - len(out.ids)) * (0.25 + 0.4 * rng.random()))
    count = 1 + below(rng, 4)
    files = [names.fresh() for _ in range(count)]
    render.user(out, "Read " + ", ".join(f"{name}.txt" for name in files) + ".")
    facts = []
    for name in files:
        lines, shown = fill(names, body // count)
        facts.extend(shown)
        render.call(out, dialect.call(f"cat {name}.txt"), (name,))
        render.result(out, dialect.body("".join(f"{line}\n" for line in lines), 0, place))
    render.text(out, "done")
    while facts and len(out.ids) + 38 <= length:
        fact = facts.pop(below(rng, len(facts)))  # once each: a second answer could be copied from the first
        render.user(out, f"code of {fact.name}?")
        render.text(out, fact.value, (fact.value,))
    return out


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
