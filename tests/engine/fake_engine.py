"""A runner without a model, and what it must produce, computed from the logical history alone.

The fake keeps what was written in each slot of each group: position, token and a hash of everything the token could see, in
every group, when it was written. The next token is a hash of all that is visible. So a stale page, a missing copy, a wrong
slot, a page freed too early, or a prune at the wrong moment changes what is generated. `Oracle` knows no pages: it plays the
history in a list.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agentkv.engine.core import GRANULE, Batch, Edit, EngineConfig, KVGroup, Request, RowWork
from agentkv.engine.form import Form
from agentkv.engine.llm import LLM
from agentkv.engine.units import Units
from agentkv.engine.work import Slot
from agentkv.types import Sampling

Content = tuple[int, int, int]
"""(position, token, hash of what was visible)."""

Windows = tuple[int | None, ...]
"""The window of each group."""

ALL: Windows = (None,)


def mix(*values: int) -> int:
    return hash(values) & 0xFFFFFFFFFFFF


def content(visible: list[list[Content]], position: int, token: int) -> Content:
    """visible: by group, what the token sees."""
    return position, token, mix(position, token, *(h for group in visible for _, _, h in group))


def draw(visible: list[list[Content]], seed: int, step: int, vocab: int) -> int:
    """visible: by group, what the last token sees, itself included."""
    return mix(seed, step, *(mix(*each) for group in visible for each in group)) % vocab


def seen(history: list[Content], position: int, windows: Windows) -> list[list[Content]]:
    """By group, what a token at this position sees of the contents before it (or of its own)."""
    return [[each for each in history if window is None or each[0] > position - window] for window in windows]


def copying(visible: list[list[Content]], seed: int, step: int, vocab: int) -> int:
    """Mostly what followed the last three tokens before, so that guesses come true now and then."""
    tokens, chance = [token for _, token, _ in max(visible, key=len)], draw(visible, seed, step, 4 * vocab)
    places = [end for end in range(3, len(tokens)) if tokens[end - 3 : end] == tokens[-3:]]
    return tokens[places[-1]] % vocab if places and chance % 4 else chance // 4


@dataclass
class Done:
    """Implements `core.Launched`."""

    drawn: list[int | None]
    by_row: dict[int, int]

    def wait(self) -> list[int | None]:
        return self.drawn


class FakeRunner:
    """Implements `runner_protocol.Runner` over a dictionary of granules."""

    ahead = False

    def __init__(
        self,
        units: int,
        page_size: int,
        *,
        vocab: int = 5,
        step_tokens: int | None = None,
        max_rows: int = 64,
        windows: Windows = ALL,
        slack: int = 3,
    ) -> None:
        self.groups = tuple(
            KVGroup((index,), 1, 64 * (2, 3, 5)[index], 2, page_size, window, slack) for index, window in enumerate(windows)
        )
        self.forms = (Form(tuple(range(len(windows)))),)
        self.num_granules = units * (self.groups[0].stripe_bytes // GRANULE)
        self.vocab = self.vocab_size = vocab
        self.step_tokens = step_tokens
        self.max_rows = max_rows
        self.draw = draw
        self.cells: dict[int, Any] = {}
        self.tables: dict[tuple[int, int], dict[int, int]] = {}
        self.forwarded = 0
        self.steps = 0
        self.fail_execute: set[int] = set()
        self.fail_move = False

    def execute(self, batch: Batch) -> list[int | None]:
        self.steps += 1
        assert self.step_tokens is None or batch.num_tokens <= self.step_tokens
        rows = [work.row for work in batch.rows]
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_rows for row in rows)
        for row, first, units, group in batch.table_updates:
            for page, unit in enumerate(units, start=first):
                assert 0 <= unit < self.num_granules
                self.tables.setdefault((group, row), {})[page] = unit
        owners: dict[tuple[int, Slot], int] = {}
        for work in batch.rows:  # nobody may write where another row writes
            for group in range(len(self.groups)):
                for i in range(len(work.tokens)):
                    assert (
                        owners.setdefault((group, self._slot(group, work.row, work.slot_in(group) + i)), work.row) == work.row
                    )
        drawn = [self._forward(work) for work in batch.rows]
        if self.steps in self.fail_execute:
            raise RuntimeError("device fault")
        return drawn

    def launch(self, batch: Batch, after: Done | None = None) -> Done:
        """Carried out at once, as a device's queue is in order; what it draws is told when it is waited for."""
        for work in batch.rows:
            if work.follows:
                assert work.tokens == [0]
                assert after is not None
                work.tokens = [after.by_row[work.row]]
        drawn = self.execute(batch)
        return Done(drawn, {work.row: token for work, token in zip(batch.rows, drawn, strict=True) if token is not None})

    def _forward(self, work: RowWork) -> int | None:
        assert work.tokens
        visible: list[list[Content]] = []
        draws: list[int] = []
        for i, token in enumerate(work.tokens):
            visible = [self._visible(group, work, i) for group in range(len(self.groups))]
            made = content(visible, work.position + i, token)
            for group in range(len(self.groups)):
                self._write(group, self._slot(group, work.row, work.slot_in(group) + i), made)
                visible[group].append(made)
            if work.sample and i >= len(work.tokens) - 1 - work.drafted:
                draws.append(self.draw(visible, work.seed, work.step + len(draws), self.vocab))
        self.forwarded += len(work.tokens)
        work.later += [(token, None) for token in draws[1:]]
        return draws[0] if draws else None

    def _visible(self, group: int, work: RowWork, index: int) -> list[Content]:
        """What the row's token sees before itself: all, or from where the host says."""
        first, end = 0, work.slot_in(group) + index
        if self.groups[group].window is not None:
            reach = work.reaches[group]
            assert reach is not None
            assert len(reach.first) == len(work.tokens)
            first = reach.first[index]
        return [self._read(group, self._slot(group, work.row, slot)) for slot in range(first, end)]

    def move_slots(self, source: list[Slot], target: list[Slot], group: int = 0) -> None:
        assert len(source) == len(target) == len(set(target))
        if self.fail_move:
            raise RuntimeError("copy fault")
        contents = [self._read(group, slot) for slot in source]
        for slot, each in zip(target, contents, strict=True):
            self._write(group, slot, each)

    def move_units(self, unit_bytes: int, source: list[int], target: list[int]) -> None:
        """Whole units, in order; what a unit is written over is gone."""
        assert sorted(source) == source
        if self.fail_move:
            raise RuntimeError("copy fault")
        for old, new in zip(source, target, strict=True):
            self.put_unit(unit_bytes, new, self.get_unit(unit_bytes, old))

    def read_units(self, unit_bytes: int, units: list[int]) -> memoryview:
        return memoryview(pickle.dumps([self.get_unit(unit_bytes, unit) for unit in units]))

    def write_units(self, unit_bytes: int, units: list[int], data: memoryview) -> None:
        if self.fail_move:
            raise RuntimeError("copy fault")
        for unit, cells in zip(units, pickle.loads(data), strict=True):
            self.put_unit(unit_bytes, unit, cells)

    def get_unit(self, unit_bytes: int, unit: int) -> list[Any]:
        """What was last written to each of its granules, whoever did."""
        return [self.cells.get(granule) for granule in range(unit, unit + unit_bytes // GRANULE)]

    def put_unit(self, unit_bytes: int, unit: int, cells: list[Any]) -> None:
        assert 0 <= unit <= self.num_granules - unit_bytes // GRANULE
        self.cells.update(zip(range(unit, unit + unit_bytes // GRANULE), cells, strict=True))

    def _slot(self, group: int, row: int, slot: int) -> Slot:
        page_size = self.groups[group].page_size
        return self.tables[group, row][slot // page_size], slot % page_size

    def _granules(self, group: int, slot: Slot) -> range:
        """Where a slot's bytes lie: slots of a unit follow one another."""
        size = self.groups[group].token_bytes // GRANULE
        return range(slot[0] + slot[1] * size, slot[0] + (slot[1] + 1) * size)

    def _read(self, group: int, slot: Slot) -> Content:
        found = {self.cells[granule] for granule in self._granules(group, slot)}
        assert len(found) == 1, "other bytes were written here since"
        (written_by, made) = found.pop()
        assert written_by == group
        return made

    def _write(self, group: int, slot: Slot, made: Content) -> None:
        for granule in self._granules(group, slot):
            self.cells[granule] = group, made


class Oracle:
    """What a history generates: every token sees what is left of those before it, edits at `at` go before token at - 1."""

    def __init__(self, vocab: int = 5, windows: Windows = ALL) -> None:
        self.vocab = vocab
        self.windows = windows
        self.draw = draw

    def visible(self, token_ids: list[int], edits: Iterable[Edit], length: int) -> list[Content]:
        out: list[Content] = []
        for position in range(length):
            out = self.edited(out, edits, position)
            self.write(out, position, token_ids[position])
        return out

    def write(self, history: list[Content], position: int, token: int) -> None:
        history.append(content(seen(history, position, self.windows), position, token))

    def edited(self, visible: list[Content], edits: Iterable[Edit], position: int) -> list[Content]:
        gone = [interval for edit in edits if edit.at - 1 == position for interval in edit.removed]
        return [content for content in visible if not any(start <= content[0] < end for start, end in gone)]

    def generate(
        self, token_ids: list[int], edits: Iterable[Edit], seed: int, count: int, stop: Iterable[int] = ()
    ) -> list[int]:
        prompt = len(token_ids)
        ids = list(token_ids)
        visible = self.visible(ids, edits, prompt)
        while True:
            ids.append(self.draw(seen(visible, len(ids) - 1, self.windows), seed, len(ids) - prompt, self.vocab))
            if len(ids) - prompt == count or ids[-1] in stop:
                return ids[prompt:]
            self.write(visible, len(ids) - 1, ids[-1])


def engine(
    units: int = 32,
    page_size: int = 4,
    *,
    window: int = 10_000,
    max_rows: int = 4,
    step_tokens: int = 16,
    checkpoints: int = 2,
    patience: int = 256,
    step_timeout: float = 300.0,
    windows: Windows = ALL,
    slack: int = 3,
    warm_pages: int = 0,
    lookup: int = 0,
    **options: object,
) -> LLM:
    """An engine over a fake runner, with memory for `units` pages of its first group, and `warm_pages` in host memory."""
    runner = FakeRunner(units, page_size, step_tokens=step_tokens, max_rows=max_rows, windows=windows, slack=slack)
    config = EngineConfig(
        memory=runner.num_granules * GRANULE,
        window=window,
        page_size=page_size,
        max_rows=max_rows,
        step_tokens=step_tokens,
        checkpoints=checkpoints,
        patience=patience,
        step_timeout=step_timeout,
        warm_memory=warm_pages * runner.groups[0].stripe_bytes,
        lookup=lookup,
    )
    return LLM(config, runner, **options)  # type: ignore[arg-type]


def request(
    token_ids: list[int],
    chain: str | None = None,
    *,
    max_tokens: int | None = 4,
    seed: int = 0,
    edits: Iterable[Edit] = (),
    **options: object,
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, stop=options.pop("stop", ()))  # type: ignore[arg-type]
    return Request(token_ids=list(token_ids), sampling=sampling, chain_id=chain, edits=tuple(edits), **options)  # type: ignore[arg-type]


def unit_bytes(llm: LLM) -> int:
    """Of the first group."""
    return llm.pools.pools[0].cls.unit_bytes


def reclaim(llm: LLM, units: int) -> int:
    """Ask for so many units of the one group more; how many returned."""
    (free,) = llm.pools.free.counts
    return llm.oracle.reclaim(Units((free + units,))).total


def run(llm: LLM, *, limit: int = 10_000) -> None:
    """Step until there is no work, checking every account after each step."""
    for _ in range(limit):
        if not llm.has_work:
            return
        llm.step()
        llm.check()
    raise AssertionError("no progress")


def turn(llm: LLM, token_ids: list[int], chain: str | None = None, **options: object) -> list[int]:
    """One request from add to commit; the generated ids."""
    seq = llm.add(request(token_ids, chain, **options))  # type: ignore[arg-type]
    run(llm)
    assert seq.fault is None
    made = seq.token_ids[seq.num_prompt_tokens :]
    llm.commit(seq, made)
    llm.check()
    return made
