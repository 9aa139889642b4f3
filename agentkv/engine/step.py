"""A step on the device: rows in order, split by phase and form, their integers carried over in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby

import torch
from torch import Tensor

from agentkv.engine.core import Batch, RowWork
from agentkv.engine.forms import Served
from agentkv.engine.pages import KVPages
from agentkv.engine.query_window import QueryRows, QueryWindow
from agentkv.engine.sealed_pages import SealedPages, SealedUnits
from agentkv.engine.tables import RowTable
from agentkv.engine.view import DeviceBatch, GroupRows, PageFill, RowSpan
from agentkv.errors import EngineFault


@dataclass(frozen=True, slots=True)
class Step:
    """A batch on the device. order: index in the batch of each row of `works`: decodes first, then chunks, then what is
    forwarded to be looked at; within each by form.

    draws: (index of the row in `works`, how many of the row's draws come before) of each draw.
    """

    works: tuple[RowWork, ...]
    order: tuple[int, ...]
    token_ids: Tensor
    positions: Tensor
    batches: tuple[DeviceBatch, ...]
    draws: tuple[tuple[int, int], ...]
    ends: Tensor
    """int64 `[num_draws]`: the token of the step that each draw comes after."""


class Packed:
    """Lists of integers on their way to the device, in one copy."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._sizes: list[int] = []
        self._parts: tuple[Tensor, ...] = ()

    def add(self, values: Iterable[int]) -> int:
        """Add a list; what it is found by once it was sent."""
        before = len(self._values)
        self._values.extend(values)
        self._sizes.append(len(self._values) - before)
        return len(self._sizes) - 1

    def send(self, pages: KVPages) -> None:
        """Copy all of them, int64."""
        self._parts = torch.split(pages.send(self._values), self._sizes)

    def __getitem__(self, key: int) -> Tensor:
        return self._parts[key]


@dataclass(frozen=True)
class Stage:
    """What steps are built over: the runner's pages and forms. group_of: layer -> its KV group; sealed: where sealed parts of K
    and V lie, by form; window: of queries, where a method asks for it."""

    pages: KVPages
    served: tuple[Served, ...]
    group_of: tuple[int, ...]
    sealed: tuple[SealedUnits | None, ...]
    window: QueryWindow | None

    def step(self, batch: Batch) -> Step:
        """Order the rows, and carry what the device must know of them there."""
        order = sorted(range(len(batch.rows)), key=lambda index: _kind(batch.rows[index]))
        works = tuple(batch.rows[index] for index in order)
        counts = [len(work.tokens) for work in works]
        draws = tuple(
            (index, i) for index, work in enumerate(works) if work.sample and not work.replay for i in range(work.drafted + 1)
        )
        stops = list(accumulate(counts))
        packed = Packed()
        token_ids = packed.add(token for work in works for token in work.tokens)
        positions = packed.add(work.position + i for work in works for i in range(len(work.tokens)))
        ends = packed.add(stops[index] - 1 - works[index].drafted + i for index, i in draws)
        parts, first = [], 0
        for _, members in groupby(works, key=_kind):
            parts.append(_Part(self, tuple(members), first, packed))
            first += sum(parts[-1].counts)
        packed.send(self.pages)
        batches = tuple(part.batch(packed, packed[positions]) for part in parts)
        return Step(works, tuple(order), packed[token_ids], packed[positions], batches, draws, packed[ends])

    @cached_property
    def places(self) -> tuple[tuple[dict[str, tuple[Tensor, int]], tuple[int, ...]], ...]:
        """By form its tail states by name, and the places of the layers, both counted among its groups."""
        found = []
        for served in self.served:
            place = {group: index for index, group in enumerate(served.form.groups)}
            states = {name: (self.pages.state(group), place[group]) for name, group in served.tail.items()}
            found.append((states, tuple(place[group] for group in self.group_of) if served.method.stores else ()))
        return tuple(found)

    def fill(self, form: int, entries: Tensor, into: dict[str, Tensor]) -> PageFill:
        """Pages of KV whose page state is to be made; see PageFill."""
        tail = self.served[form].tail
        return PageFill(entries, into, self.pages.layer, lambda name: self.pages.state(tail[name]))


class _Part:
    """Rows of one form in one phase: their integers first, and once these are on the device, their batch."""

    def __init__(self, stage: Stage, works: tuple[RowWork, ...], first: int, packed: Packed) -> None:
        self.stage, self.works = stage, works
        self.form = works[0].form
        self.served = stage.served[self.form]
        self.counts = [len(work.tokens) for work in works]
        self.tokens = slice(first, first + sum(self.counts))
        self._rows = packed.add(work.row for work in works)
        self._owners = packed.add(work.row for work in works for _ in work.tokens)
        self._starts = {index: self._starts_in(index) for index in self.served.form.groups}
        self._groups = [self._add_group(index, packed) for index in self.served.form.groups]
        self._bounds = packed.add(work.sealed for work in works)
        self._fill = self._add_fill(packed)
        self._recent = self._add_recent(packed)

    def batch(self, packed: Packed, positions: Tensor) -> DeviceBatch:
        """positions: of the whole step."""
        states, group_of = self.stage.places[self.form]
        rows, owners = packed[self._rows], packed[self._owners]
        groups = (
            self._group_rows(index, [packed[key] for key in keys], rows, owners)
            for index, keys in zip(self.served.form.groups, self._groups, strict=True)
        )
        bounds = tuple(work.sealed for work in self.works)
        units = self.stage.sealed[self.form]
        sealed = SealedPages(self.stage.pages, self.served, units, rows, packed[self._bounds], bounds) if any(bounds) else None
        return DeviceBatch(
            _spans(self.works),
            self.tokens,
            _kind(self.works[0])[0] != 0,
            positions[self.tokens],
            tuple(groups),
            group_of,
            self.stage.pages.layer,
            states,
            form=self.form,
            replay=self.works[0].replay,
            sealed=sealed,
            filled=self._filled(packed),
            recent=self._kept(packed),
            scale=self.served.shape.scale,
        )

    def _add_group(self, index: int, packed: Packed) -> tuple[int, int, int]:
        """Slots of the tokens, lengths of the rows, and first visible slots of the tokens."""
        slots = packed.add(work.slot_in(index) + i for work in self.works for i in range(len(work.tokens)))
        lens = packed.add(work.slot_in(index) + len(work.tokens) for work in self.works)
        return slots, lens, packed.add(chain(*self._starts[index]))

    def _starts_in(self, index: int) -> tuple[tuple[int, ...], ...]:
        """By row the first slot that each token sees; () where all rows see all that the group holds."""
        window = self.stage.pages.groups[index].window
        reaches = [work.reaches[index] if work.reaches else None for work in self.works]
        if window is None and not any(reach is not None and any(reach.first) for reach in reaches):
            return ()
        starts = []
        for work, reach in zip(self.works, reaches, strict=True):
            if reach is not None:
                starts.append(reach.first)
            elif window is None:
                starts.append((0,) * len(work.tokens))
            elif work.slot != work.position:
                raise EngineFault(
                    f"row {work.row} has holes that the batch does not name: {work.slot} slots at position {work.position}"
                )
            else:
                starts.append(tuple(max(0, work.slot + i - window + 1) for i in range(len(work.tokens))))
        return tuple(starts)

    def _group_rows(self, index: int, device: Sequence[Tensor], rows: Tensor, owners: Tensor) -> GroupRows:
        slots, lens, starts = device
        page_size, table = self.stage.pages.groups[index].page_size, self.stage.pages.tables[index]
        host_starts = self._starts[index]
        held = RowTable(
            entries=table,
            rows=rows,
            lens=lens.to(torch.int32),
            host_rows=tuple(work.row for work in self.works),
            host_lens=tuple(work.slot_in(index) + len(work.tokens) for work in self.works),
            page_size=page_size,
            starts=starts.to(torch.int32) if host_starts else None,
            host_starts=host_starts,
        )
        return GroupRows(held, table[owners, slots // page_size].to(torch.int64), slots % page_size)

    def _add_fill(self, packed: Packed) -> tuple[int, int] | None:
        """(rows, pages) of KV that the part's tokens fill; None where nothing is to be made of them."""
        if not self.served.page_states or self.works[0].replay:
            return None
        size = self.stage.pages.groups[0].page_size
        spans = [(work.row, work.slot_in(0), work.slot_in(0) + len(work.tokens)) for work in self.works]
        full = [(row, page) for row, start, stop in spans for page in range(start // size, stop // size)]
        return (packed.add(row for row, _ in full), packed.add(page for _, page in full)) if full else None

    def _filled(self, packed: Packed) -> PageFill | None:
        if self._fill is None:
            return None
        rows, pages = (packed[key] for key in self._fill)
        tables = self.stage.pages.tables
        of = {name: tables[self.served.tail[name]][rows, pages].to(torch.int64) for name in self.served.page_states}
        return self.stage.fill(self.form, tables[0][rows, pages].to(torch.int64), of)

    def _add_recent(self, packed: Packed) -> tuple[int, int, int] | None:
        """(tokens, rows, places) of the queries that are kept."""
        window = self.stage.window
        if window is None or not self.served.method.needs.query_window:
            return None
        firsts = accumulate(self.counts, initial=0)
        kept = [
            (first + token, work.row, place)
            for first, work in zip(firsts, self.works, strict=False)
            for token, place in window.enter(work)
        ]
        if not kept:
            return None
        tokens, rows, places = (packed.add(column) for column in zip(*kept, strict=True))
        return tokens, rows, places

    def _kept(self, packed: Packed) -> QueryRows | None:
        if self._recent is None or self.stage.window is None:
            return None
        tokens, rows, places = (packed[key] for key in self._recent)
        return self.stage.window.rows(tokens, rows, places)


def _kind(work: RowWork) -> tuple[int, int]:
    """(phase, form) of a row; phase 0: decodes, 1: chunks, 2: replays."""
    return (2 if work.replay else 0 if work.decodes else 1), work.form


def _spans(works: Sequence[RowWork]) -> tuple[RowSpan, ...]:
    """Host facts of the rows of one device batch; a row's prompt ends where its first draw is made."""
    ends = accumulate(len(work.tokens) for work in works)
    return tuple(
        RowSpan(
            row=work.row,
            start=end - len(work.tokens),
            end=end,
            position=work.position,
            kv_len=work.slot + len(work.tokens),
            prompt_end=work.sample and work.step == 0,
            seq_id=work.seq_id,
            run=work.run,
            run_from=work.run_from,
        )
        for work, end in zip(works, ends, strict=True)
    )
