"""The fake runner with several forms: sealed parts, mutable state, page state.

It reads what the tables and reaches say and nothing else, and refuses to write what anybody else can read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fake_engine import Content, FakeRunner, draw, mix
from fake_kinds import KINDS, Kind, Marks

from agentkv.engine.cache.extents import Extent
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.core import GRANULE, SLOT, WHOLE, Batch, EngineConfig, Group, RowWork, StateGroup
from agentkv.engine.llm import LLM
from agentkv.engine.work import PageWork, SealWork, Slot, TailPages

Place = tuple[int, int, int]
"""(group, unit, slot)."""


class SealingRunner(FakeRunner):
    """groups: KV, then those of each kind. made: by sequence, the hashes of the tokens that the last step forwarded."""

    pools: KVPools

    def __init__(self, units: int, page: int, sealed_page: int, kinds: Iterable[Kind], **options: Any) -> None:
        super().__init__(units, page, **options)
        self.kinds = tuple(kinds)
        self.made: dict[int, list[int]] = {}
        self.seals = 0
        self.fail_seal = False
        groups: list[Group] = list(self.groups)

        def add(name: str, shape: tuple[int, ...], size: int, **said: bool) -> int:
            groups.append(StateGroup(name, shape, "uint8", 1, size, **said))
            return len(groups) - 1

        forms = []
        for kind in self.kinds:
            tail, sealed = [0], []
            if kind.marks:
                tail.append(add("marks", (SLOT, GRANULE), page, mutable=True))
            if kind.paged:
                tail.append(add("pages", (GRANULE,), page))
            if kind.floor is not None:
                sealed = [
                    add("kept", (SLOT, 2 * GRANULE), sealed_page, sealed=True),
                    add("lens", (GRANULE,), WHOLE, sealed=True),
                ]
            if kind.floor is not None and kind.marks == "seen":
                sealed.append(add("marks", (SLOT, GRANULE), sealed_page, sealed=True, mutable=True))
            mutable = frozenset(group for group in (*tail, *sealed) if getattr(groups[group], "mutable", False))
            forms.append(kind.form(tuple(tail), tuple(sealed), mutable, sealed_page))
        self.groups, self.forms = tuple(groups), tuple(forms)

    # -- a step

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
        self._extents = self._index()
        self.made = {}
        for work in batch.rows:
            self._check_pages(work)
        drawn = [self._forward(work) for work in batch.rows]
        if self.steps in self.fail_execute:
            raise RuntimeError("device fault")
        return drawn

    def _forward(self, work: RowWork) -> int | None:
        kind, form, token_draws = self.kinds[work.form], self.forms[work.form], list[int]()
        assert work.tokens
        for i, token in enumerate(work.tokens):
            cells, places = self._seen(work, i)
            marks: Marks = [None if place is None else self.get(place) for place in places]
            made, after, own = kind.think(cells, marks, work.position + i, token, replay=work.replay)
            self.made.setdefault(work.seq_id, []).append(made[2])
            for place, before, mark in zip(places, marks, after, strict=True):
                if place is not None and mark != before:
                    self._write_alone(place, mark)
            for group in form.groups:
                unit, slot = self._slot(group, work.row, work.slot_in(group) + i)
                if group == 0:
                    self._write_alone((group, unit, slot), made)
                elif self.groups[group].mutable:
                    self._write_alone((group, unit, slot), own)
                elif slot == self.groups[group].page_size - 1:  # the page is full
                    page = [self.get((0, self._slot(0, work.row, work.slot_in(0) + i)[0], each)) for each in range(slot + 1)]
                    self._write_alone((group, unit, slot), mix(*(cell[2] for cell in page)))
            if work.sample and i >= len(work.tokens) - 1 - work.drafted:
                seen = [(*cell, mark or 0) for cell, mark in zip((*cells, made), (*after, own), strict=True)]
                token_draws.append(draw([seen], work.seed, work.step + len(token_draws), self.vocab))
        work.later += [(token, None) for token in token_draws[1:]]
        self.forwarded += len(work.tokens)
        return token_draws[0] if token_draws else None

    def _seen(self, work: RowWork, index: int) -> tuple[list[Content], list[Place | None]]:
        """What the row's token sees before itself: the sealed part, then the tail from where the host says."""
        form, row = self.forms[work.form], work.row
        cells: list[Content] = []
        places: list[Place | None] = []
        if work.sealed:
            count = self.get((form.sealed[1], self.tables[form.sealed[1], row][0], 0))
            assert count <= work.sealed
            for slot in range(count):
                cells.append(self.get((form.sealed[0], *self._slot(form.sealed[0], row, slot))))
                marked = len(form.sealed) > 2
                places.append((form.sealed[2], *self._slot(form.sealed[2], row, slot)) if marked else None)
        for group in form.groups:
            first, end = 0, work.slot_in(group) + index
            if form.seals:
                reach = work.reaches[group]
                assert reach is not None
                assert len(reach.first) == len(work.tokens)
                first = reach.first[index]
            found = [(group, *self._slot(group, row, slot)) for slot in range(first, end)]
            if group == 0:
                tail, marks = [self.get(place) for place in found], [None] * len(found)
            elif self.groups[group].mutable:
                marks = found
        assert all(work.reaches[group] is None for group in form.sealed if work.reaches)
        return cells + tail, places + marks

    def _check_pages(self, work: RowWork) -> None:
        """Every full page has its state."""
        form = self.forms[work.form]
        if form.paged:
            size = self.groups[0].page_size
            for page in range(work.slot // size):
                cells = [self.get((0, *self._slot(0, work.row, page * size + i))) for i in range(size)]
                item = self.get((form.groups[1], *self._slot(form.groups[1], work.row, page * size)))
                assert item == mix(*(cell[2] for cell in cells)), "stale page state"

    # -- between steps

    def seal(self, work: SealWork) -> int:
        if self.fail_seal:
            raise RuntimeError("seal fault")
        self.seals += 1
        self._extents = self._index()
        kind, form, seal = self.kinds[work.form], self.forms[work.form], work.seal
        old, old_marks = self._sealed(form.sealed, work.old)
        if seal is None:
            kept = [i for i, cell in enumerate(old) if not any(low <= cell[0] < high for low, high in work.removed)]
            assert [len(units) for units in work.new] == [len(units) for units in work.old]
            cells, marks = old, old_marks
        else:
            tail, tail_marks = self._tail(kind, work)
            assert [cell[0] for cell in tail] == [p for low, high in work.runs for p in range(low, high)]
            assert work.held.tail == len(tail)
            assert work.held.floor < seal.floor <= work.held.tokens
            assert [len(units) for units in work.new] == list(seal.units)
            before = [i for i, cell in enumerate(tail) if cell[0] < seal.floor]
            cells = old + [tail[i] for i in before]
            marks = old_marks + [tail_marks[i] for i in before]
            kept = kind.chosen(cells, marks)
            assert len(kept) <= seal.slots
        assert not self.forms[work.form].shrinks or len(old) <= work.held.slots
        assert not kind.appends or len(old) == work.held.slots, "what is kept in front is not what was there"
        self._write_sealed(work, [cells[i] for i in kept], [marks[i] for i in kept])
        return len(kept) if seal is None else seal.slots

    def _sealed(self, groups: tuple[int, ...], units: tuple[list[int], ...]) -> tuple[list[Content], Marks]:
        if not units or not units[1]:
            return [], []
        size = self.groups[groups[0]].page_size
        count = self.get((groups[1], units[1][0], 0))
        cells = [self.get((groups[0], units[0][slot // size], slot % size)) for slot in range(count)]
        if len(groups) < 3:
            return cells, [None] * count
        return cells, [self.get((groups[2], units[2][slot // size], slot % size)) for slot in range(count)]

    def _tail(self, kind: Kind, work: SealWork) -> tuple[list[Content], Marks]:
        def read(pages: TailPages) -> list[Any]:
            size = self.groups[pages.group].page_size
            return [
                self.get((pages.group, pages.units[slot // size - pages.first // size], slot % size))
                for slot in range(pages.first, pages.stop)
            ]

        cells = read(work.tail[0])
        return cells, read(work.tail[1]) if kind.marks else [None] * len(cells)

    def _write_sealed(self, work: SealWork, cells: list[Content], marks: Marks) -> None:
        form, keeps = self.forms[work.form], work.seal.keeps if work.seal else ()
        for index, (group, new) in enumerate(zip(form.sealed, work.new, strict=True)):
            keep = keeps[index] if keeps else 0
            old = work.old[index]
            assert new[:keep] == old[:keep]
            assert not set(new[keep:]) & set(old)
            if index == 1:
                for unit in new:
                    self._write_alone((group, unit, 0), len(cells), shared=work.seal is None)
                continue
            size = self.groups[group].page_size
            for slot, each in enumerate(cells if index == 0 else marks):
                place = group, new[slot // size], slot % size
                if slot < keep * size:
                    assert self.get(place) == each
                else:
                    self._write_alone(place, each, shared=work.seal is None)

    def refresh(self, work: PageWork) -> None:
        form = self.forms[work.form]
        size = self.groups[0].page_size
        for unit, item in zip(*work.units, strict=True):
            made = mix(*(self.get((0, unit, slot))[2] for slot in range(size)))
            self._write(form.groups[1], (item, 0), made)

    # -- cells

    def get(self, place: Place) -> Any:
        group, unit, slot = place
        return self._read(group, (unit, slot))

    def _write_alone(self, place: Place, made: Any, *, shared: bool = False) -> None:
        """shared: a chain's checkpoints may hold by now what a prune wrote for them all."""
        group, unit, slot = place
        extent, index = self._extents[group][unit]
        at = index * self.pools.pools[group].page_size + slot
        readers = sum(count for (start, stop), count in extent.holders.items() if start <= at < stop)
        assert readers == 1 or (shared and readers), f"{readers} hold what is written"
        self._write(group, (unit, slot), made)

    def _index(self) -> list[dict[int, tuple[Extent, int]]]:
        return [
            {unit: (extent, i) for extent in pool.extents for i, unit in enumerate(extent.units) if extent.alive >> i & 1}
            for pool in self.pools.pools
        ]

    def _granules(self, group: int, slot: Slot) -> range:
        found = self.groups[group]
        if isinstance(found, StateGroup) and not found.by_slot:
            return range(slot[0], slot[0] + found.stripe_bytes // GRANULE)
        return super()._granules(group, slot)


def sealing_engine(
    units: int = 40,
    page: int = 4,
    sealed_page: int = 3,
    *,
    kinds: Iterable[Kind] = KINDS,
    window: int = 10_000,
    max_rows: int = 4,
    step_tokens: int = 16,
    checkpoints: int = 2,
    patience: int = 256,
    warm_pages: int = 0,
    lookup: int = 0,
    **options: Any,
) -> LLM:
    """An engine whose forms are these kinds, with memory for `units` pages of KV."""
    runner = SealingRunner(units, page, sealed_page, kinds, step_tokens=step_tokens, max_rows=max_rows)
    config = EngineConfig(
        memory=runner.num_granules * GRANULE,
        window=window,
        page_size=page,
        max_rows=max_rows,
        step_tokens=step_tokens,
        checkpoints=checkpoints,
        patience=patience,
        warm_memory=warm_pages * runner.groups[0].stripe_bytes,
        lookup=lookup,
    )
    llm = LLM(config, runner, **options)
    runner.pools = llm.pools
    return llm
