"""What forms must generate, from histories as plain lists; no pages, no slots, no units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from fake_engine import Content, draw
from fake_kinds import Kind

from agentkv.engine.cache.intervals import common_prefix, edits_to_apply, normal_edits
from agentkv.engine.core import Batch, Edit, RowWork
from agentkv.engine.core import Sequence as Asked
from agentkv.engine.form import Held
from agentkv.engine.llm import LLM
from agentkv.engine.work import SealWork
from agentkv.types import Interval


@dataclass
class Line:
    """What is there of a history. marks: by position. edits: prunes, with the length at which they were made, plus 1."""

    kind: Kind
    ids: list[int] = field(default_factory=list)
    floor: int = 0
    sealed_at: int = 0
    sealed: list[Content] = field(default_factory=list)
    tail: list[Content] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()

    @property
    def length(self) -> int:
        return len(self.ids)

    def copy(self) -> Line:
        other = copy(self)
        other.ids, other.sealed, other.tail, other.marks = list(self.ids), list(self.sealed), list(self.tail), dict(self.marks)
        return other

    def same(self, other: Line) -> bool:
        mine, theirs = ((line.ids, line.floor, line.sealed, line.tail, line.marks, line.edits) for line in (self, other))
        return mine == theirs

    def cut(self, length: int) -> Line | None:
        """As it was with its first tokens only; None where that is not known any more."""
        if length > self.length or (length and length < (self.length if self.kind.marks else self.sealed_at)):
            return None
        if not length:
            return Line(self.kind)
        other = self.copy()
        del other.ids[length:]
        other.tail = [cell for cell in other.tail if cell[0] < length]
        other.edits = normal_edits(other.edits, length + 1)
        return other

    def read(self, token: int, *, replay: bool = False, position: int | None = None) -> Content:
        seen = [*self.sealed, *self.tail]
        marks = [self.marks.get(cell[0]) for cell in seen]
        made, after, own = self.kind.think(seen, marks, self.length if position is None else position, token, replay=replay)
        self.marks.update((cell[0], mark) for cell, mark in zip(seen, after, strict=True) if mark is not None)
        self.tail.append(made)
        if self.kind.marks:
            self.marks[made[0]] = own
        if not replay:
            self.ids.append(token)
        return made

    def runs(self) -> list[tuple[int, ...]]:
        """What is forwarded once more before the seal: made of the tail's tokens."""
        return list(self.kind.replay([token for _, token, _ in self.tail]))

    def replay(self, run: Sequence[int]) -> None:
        """Read a run to no other end than the marks that it leaves."""
        for i, token in enumerate(run):
            self.read(token, replay=True, position=self.length + i)
        del self.tail[len(self.tail) - len(run) :]
        for i in range(len(run)):
            del self.marks[self.length + i]

    def draw(self, seed: int, step: int, vocab: int) -> int:
        return draw([[(*cell, self.marks.get(cell[0], 0)) for cell in (*self.sealed, *self.tail)]], seed, step, vocab)

    def seal(self, *, prompt_end: bool) -> None:
        floor = 0
        if self.kind.floor is not None:
            floor = self.kind.floor(Held(self.length, self.floor, len(self.tail), len(self.sealed), prompt_end))
        if floor <= self.floor:
            return
        cells = self.sealed + [cell for cell in self.tail if cell[0] < floor]
        kept = [cells[i] for i in self.kind.chosen(cells, [self.marks.get(cell[0]) for cell in cells])]
        self.sealed, self.tail = kept, [cell for cell in self.tail if cell[0] >= floor]
        self.floor, self.sealed_at = floor, self.length
        held = self.tail if self.kind.marks == "replays" else (*self.sealed, *self.tail)
        self.marks = {cell[0]: self.marks[cell[0]] for cell in held if cell[0] in self.marks}

    def prune(self, intervals: Iterable[Interval]) -> None:
        removed = tuple((low, min(high, self.length)) for low, high in intervals if low < self.length)

        def left(cells: list[Content]) -> list[Content]:
            return [cell for cell in cells if not any(low <= cell[0] < high for low, high in removed)]

        self.sealed, self.tail = left(self.sealed), left(self.tail)
        self.marks = {cell[0]: self.marks[cell[0]] for cell in (*self.sealed, *self.tail) if cell[0] in self.marks}
        self.edits = normal_edits((*self.edits, Edit(self.length + 1, removed)), self.length + 1)


@dataclass
class Play:
    """A request that is being answered on a line. due: prunes still to come. runs: replays still to come, None before the
    prompt's end is reached; sealed: the prompt's seal is behind it."""

    line: Line
    prompt: int
    due: list[Edit] = field(default_factory=list)
    runs: list[tuple[int, ...]] | None = None
    sealed: bool = False

    def copy(self) -> Play:
        return Play(self.line.copy(), self.prompt, list(self.due), None if self.runs is None else list(self.runs), self.sealed)

    def read(self, token: int) -> Content:
        line = self.line
        while self.due and self.due[0].at - 1 == line.length:
            line.prune(self.due.pop(0).removed)
        if self.sealed:
            line.seal(prompt_end=False)
        return line.read(token)

    def read_on(self) -> None:
        """After the prompt was read, or a run of its replays: is it to be sealed now?"""
        if self.runs is None:
            self.runs = self.line.runs()
        if not self.runs and not self.sealed:
            self.line.seal(prompt_end=True)
            self.sealed = True


def answer(
    line: Line, prompt: Sequence[int], *, count: int = 4, seed: int = 0, edits: Iterable[Edit] = (), vocab: int = 5
) -> list[int]:
    """Let a line that holds a part of the prompt go on: all of the prompt, its seal, then token by token; its newest token is
    not read."""
    due = edits_to_apply(normal_edits(line.edits, line.length + 1), normal_edits(edits, len(prompt)), line.length)
    assert due is not None
    assert line.ids == list(prompt[: line.length])
    play = Play(line, len(prompt), due)
    for token in prompt[line.length :]:
        play.read(token)
    made = [line.draw(seed, 0, vocab)]
    if count == 1 and line.runs():
        return made  # it is over before it is replayed
    play.read_on()
    while play.runs:
        line.replay(play.runs.pop(0))
        play.read_on()
    while len(made) < count:
        play.read(made[-1])
        made.append(line.draw(seed, len(made), vocab))
    return made


class Follower:
    """Plays every row of every step in lists, and compares each token's hash and each draw.

    Where a sequence begins, or goes on after a preemption, the row says from which length; there it must continue what its
    chain, its leader or itself had at that length. points: what chains had at their boundaries, as long as it may be had.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.runner = llm, llm.runner
        self.kinds: tuple[Kind, ...] = llm.runner.kinds
        self.plays: dict[int, list[Play]] = {}
        self.before: dict[int, list[Play]] = {}
        """By sequence, before its last step, where that was launched without knowing its token."""
        self.past: dict[int, list[Line]] = {}
        """By sequence, what it had after each step: who answers the same prompt may have been given it before it was sealed."""
        self.points: dict[str, list[Line]] = {}
        self.replayed: dict[int, int] = {}
        self.restarts = 0
        self.broken: list[AssertionError] = []
        """What was found wrong on the device: to the engine it is a fault like others."""
        self._calls = llm.runner.execute, llm.runner.seal, llm.commit, llm.fork, llm.prune
        llm.runner.execute, llm.runner.seal, llm.commit, llm.fork, llm.prune = (
            self.execute,
            self.seal,
            self.commit,
            self.fork,
            self.prune,
        )

    def execute(self, batch: Batch) -> list[int | None]:
        with self._watched():
            drawn = self._calls[0](batch)
            for work, token in zip(batch.rows, drawn, strict=True):
                self._follow(work, [*([] if token is None else [token]), *(draw[0] for draw in work.later)])
        return drawn

    def seal(self, work: SealWork) -> int:
        with self._watched():
            return self._calls[1](work)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (AssertionError, LookupError) as error:
            self.broken.append(error)
            raise

    def _follow(self, work: RowWork, drawn: list[Any]) -> None:
        seq = self.llm._open[work.seq_id]
        if work.replay:
            self._follow_replay(seq, work)
            return
        plays = [play for play in self.plays.get(seq.seq_id, []) if play.line.length == work.position]
        if not plays:
            plays = self._candidates(seq, work.position)
            self.restarts += seq.seq_id in self.plays
            assert plays, f"{seq.seq_id} continues at {work.position} from what nobody had"
        hashes, left = self.runner.made[work.seq_id], []
        self.before[seq.seq_id] = [play.copy() for play in plays] if work.follows else []
        for play in plays:
            made, said = [], []
            for i, token in enumerate(work.tokens):
                made.append(play.read(token)[2])
                if work.sample and i >= len(work.tokens) - 1 - work.drafted:
                    said.append(play.line.draw(work.seed, work.step + len(said), self.runner.vocab))
            if play.line.length == play.prompt:
                play.read_on()
            if (made, said) == (hashes, drawn):
                left.append(play)
        assert left, f"{self.kinds[work.form].name}: other KV than the history has"
        self.plays[seq.seq_id] = left
        self.past.setdefault(seq.seq_id, []).extend(play.line.copy() for play in left)

    def _follow_replay(self, seq: Asked, work: RowWork) -> None:
        for play in self.plays[seq.seq_id]:
            assert play.runs
            assert play.line.length == play.prompt == seq.num_prompt_tokens
            done = work.position - play.prompt
            assert list(play.runs[0][done : done + len(work.tokens)]) == work.tokens
            if done + len(work.tokens) == len(play.runs[0]):
                play.line.replay(play.runs.pop(0))
                play.read_on()
        self.replayed[seq.seq_id] = self.replayed.get(seq.seq_id, 0) + len(work.tokens)

    def _candidates(self, seq: Asked, length: int) -> list[Play]:
        request, kind = seq.request, self.kinds[seq.request.form]
        wanted = normal_edits(request.edits, seq.num_prompt_tokens)
        own = self.plays.get(seq.seq_id, [])
        sources = [(play.line, play) for play in own]
        sources += [(line, None) for line in self.points.get(request.chain_id or "", [])]
        for leader in (request.beside, seq.leader):
            if leader is not None:
                had = [play.line for play in (*self.plays.get(leader.seq_id, []), *self.before.get(leader.seq_id, []))]
                sources += [(line, None) for line in (*had, *self.past.get(leader.seq_id, []))]
        sources.append((Line(kind), None))
        if kind.reuse == "radix":  # a function of the tokens
            scratch = Play(Line(kind), 1 << 30, [edit for edit in wanted if edit.at - 1 < length])
            for token in seq.token_ids[:length]:
                scratch.read(token)
            sources.append((scratch.line, None))
        found: list[Play] = []
        for line, play in sources:
            state = line.cut(length) if line.kind is kind else None
            if state is None or state.ids != seq.token_ids[:length] or any(state.same(other.line) for other in found):
                continue
            due = edits_to_apply(normal_edits(state.edits, length + 1), wanted, length)
            if due is not None:
                begun = play is not None and length >= seq.num_prompt_tokens
                found.append(
                    Play(
                        state,
                        seq.num_prompt_tokens,
                        due,
                        play.runs if play and begun else None,
                        bool(play and begun and play.sealed),
                    )
                )
        return found

    # -- what the caller does to chains

    def commit(self, seq: Asked, generated_ids: list[int]) -> None:
        ids = seq.token_ids[: seq.num_prompt_tokens] + generated_ids
        if seq.state is not None and seq.request.chain_id is not None:
            length = min(common_prefix(ids, seq.token_ids), len(ids) - 1, seq.num_forwarded)
            plays, before = self.plays.get(seq.seq_id, []), self.before.get(seq.seq_id, [])
            if before and all(play.line.length > seq.num_forwarded for play in plays):
                plays = before  # it ended before its last step, and before the seal that came with it
            cuts = [play.line.cut(length) for play in plays] if not seq.replayed else []
            points = self.points.setdefault(seq.request.chain_id, [])
            points += [line for line in cuts if line is not None and not any(line.same(each) for each in points)]
        self._calls[2](seq, generated_ids)

    def fork(self, chain: str, child: str, length: int) -> None:
        self.points[child] = list(self.points.get(chain, []))
        self._calls[3](chain, child, length)

    def prune(self, chain: str, intervals: Iterable[Interval]) -> tuple[int, int]:
        """What is held of the chain may be without these now."""
        intervals, points = list(intervals), self.points.get(chain, [])
        for line in list(points):
            other = line.copy()
            other.prune(intervals)
            if not any(other.same(each) for each in points):
                points.append(other)
        return self._calls[4](chain, intervals)
