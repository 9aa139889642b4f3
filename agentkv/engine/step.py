"""A step on the device: rows in order, split by phase and form, their integers carried over in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, repeat
from types import MappingProxyType

import torch
from torch import Tensor

from agentkv.engine.core import Batch, RowWork
from agentkv.engine.forms import Served
from agentkv.engine.limits import Buckets, Limits, dead, single
from agentkv.engine.pages import KVPages
from agentkv.engine.query_window import QueryRows, QueryWindow
from agentkv.engine.sealed_pages import SealedPages, SealedUnits
from agentkv.engine.tables import RowTable
from agentkv.engine.view import DeviceBatch, GroupRows, PageFill, RowKernel, RowSpan
from agentkv.errors import EngineFault
from agentkv.kernels.query_tiles import QueryTiles, bound_tiles, cut_tiles, tile_size


@dataclass(frozen=True, slots=True)
class Step:
    """A batch on the device. ends: int64 `[num_draws]`, the token of the step that each draw comes after."""

    token_ids: Tensor
    positions: Tensor
    batches: tuple[DeviceBatch, ...]
    ends: Tensor


class Packed:
    """Lists of integers on their way to the device, in one copy. Each begins at a multiple of 16 bytes there: kernels are
    compiled anew for pointers that do not."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self._sizes: list[int] = []

    def add(self, values: Iterable[int]) -> int:
        """Add a list; what it is found by once it was sent."""
        before = len(self.values)
        self.values.extend(values)
        size = len(self.values) - before
        self.values.extend([0] * (size % 2))
        self._sizes += size, size % 2
        return len(self._sizes) // 2 - 1

    def split(self, sent: Tensor) -> tuple[Tensor, ...]:
        """The lists, in the order in which they were added, of all their numbers on the device."""
        return torch.split(sent, self._sizes)[::2]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step before anything of it is on the device. order: index in the batch of each row of `works`: decodes first, then
    chunks, then what is forwarded to be looked at; within each by form. draws: (index of the row in `works`, how many of the
    row's draws come before) of each draw. limits: by part, of a step that is to be captured, () for one that is not; plans of
    equal limits differ in the numbers of `packed` alone. token_ids, positions, ends: where these stand in it; sources: of each
    token, which draw of the step before it is, -1 for none; None where there is no such token. fed: those draws."""

    works: tuple[RowWork, ...]
    order: tuple[int, ...]
    draws: tuple[tuple[int, int], ...]
    parts: tuple[_Part, ...]
    packed: Packed
    token_ids: int
    positions: int
    ends: int
    sources: int | None
    fed: Tensor
    limits: tuple[Limits, ...] = ()

    def build(self, sent: Tensor) -> Step:
        """The step, of the numbers of `packed` on the device, int64."""
        lists = self.packed.split(sent)
        token_ids, positions = lists[self.token_ids], lists[self.positions]
        if self.sources is not None:
            sources = lists[self.sources]
            token_ids = torch.where(sources < 0, token_ids, self.fed[sources.clamp(min=0)])
        batches = tuple(part.batch(lists, positions) for part in self.parts)
        return Step(token_ids, positions, batches, lists[self.ends])


@dataclass(frozen=True)
class Stage:
    """What steps are built over: the runner's pages and forms. group_of: layer -> its KV group; sealed: where sealed parts of K
    and V lie, by form; window: of queries, where a method asks for it; fed: int64 `[max_rows]`, what the last step drew;
    library: see `DeviceBatch`."""

    pages: KVPages
    served: tuple[Served, ...]
    group_of: tuple[int, ...]
    sealed: tuple[SealedUnits | None, ...]
    window: QueryWindow | None
    fed: Tensor
    library: RowKernel | None = None

    def step(self, batch: Batch) -> Step:
        """Order the rows, and carry what the device must know of them there."""
        plan = self.plan(batch)
        return plan.build(self.pages.send(plan.packed.values))

    def plan(self, batch: Batch, buckets: Buckets | None = None, drawn: Mapping[int, int] = MappingProxyType({})) -> Plan:
        """Order the rows, and write down what the device must know of them. buckets: the step is to be captured; its rows
        decode and draw, or read short chunks. drawn: by row, which draw of the step before was the row's."""
        order = sorted(range(len(batch.rows)), key=lambda index: _kind(batch.rows[index]))
        works = tuple(batch.rows[index] for index in order)
        draws = tuple(
            (index, i) for index, work in enumerate(works) if work.sample and not work.replay for i in range(work.drafted + 1)
        )
        parts: list[_Part] = []
        for _, members in groupby(works, key=_kind):
            parts.append(_Part(self, list(members), parts[-1].tokens.stop if parts else 0, buckets))
        packed, rows = Packed(), [work for part in parts for work in part.works]
        token_ids = packed.add(token for work in rows for token in work.tokens)
        positions = packed.add(work.position + i for work in rows for i in range(len(work.tokens)))
        sources = None
        if buckets is not None or any(work.follows for work in works):
            sources = packed.add(drawn[work.row] if work.follows else -1 for work in rows for _ in work.tokens)
        if buckets is None:
            stops = list(accumulate(len(work.tokens) for work in works))
            ends = packed.add(stops[index] - 1 - works[index].drafted + i for index, i in draws)
        else:
            ends = packed.add((*chain(*(part.ends() for part in parts)), *repeat(0, len(rows) - len(draws))))
        for part in parts:
            part.pack(packed)
        limits = tuple(part.limits for part in parts if part.limits is not None)
        return Plan(works, tuple(order), draws, tuple(parts), packed, token_ids, positions, ends, sources, self.fed, limits)

    @cached_property
    def places(self) -> tuple[tuple[dict[str, tuple[Tensor, int]], tuple[int, ...]], ...]:
        """By form its tail states by name, and the places of the layers, both counted among its groups."""
        found = []
        for served in self.served:
            place = {group: index for index, group in enumerate(served.form.groups)}
            states = {name: (self.pages.state(group), place[group]) for name, group in served.tail.items()}
            more = {name: spec.beside[0] for name, spec in served.specs.items() if spec.beside is not None}
            states |= {more[name]: (self.pages.beside(served.tail[name]), states[name][1]) for name in more}
            found.append((states, tuple(place[group] for group in self.group_of) if served.method.stores else ()))
        return tuple(found)

    def fill(self, form: int, entries: Tensor, into: dict[str, Tensor]) -> PageFill:
        """Pages of KV whose page state is to be made; see PageFill."""
        tail = self.served[form].tail
        return PageFill(entries, into, self.pages.layer, lambda name: self.pages.state(tail[name]))


class _Part:
    """Rows of one form in one phase: their integers first, and once these are on the device, their batch.

    works: with dead rows behind the `living` ones where the part is to be captured: then `limits` stand for their numbers.
    tokens: where they lie in the step.
    """

    def __init__(self, stage: Stage, works: list[RowWork], first: int, buckets: Buckets | None) -> None:
        self.stage = stage
        self.form = works[0].form
        self.served = stage.served[self.form]
        self.works = works if buckets is None else single(works)
        self.living = len(self.works)
        self.limits: Limits | None = None
        self._full = self._pages_filled()
        if buckets is not None:
            self.limits = self._limits(buckets)
            self._fill_up(self.limits)
        self._starts = {index: self._starts_in(index) for index in self.served.form.groups}
        self.counts = [len(work.tokens) for work in self.works]
        self.tokens = slice(first, first + sum(self.counts))

    def _fill_up(self, limits: Limits) -> None:
        """With dead rows, and pages of theirs: whether a row fills one now or in a later step, one graph serves both."""
        row, counts = self.stage.pages.dead_row, [1 - bool(limits.tokens)] * (limits.rows - self.living)
        if limits.tokens:
            counts.append(limits.tokens - sum(len(work.tokens) for work in self.works))
        self.works += [dead(self.form, row, count) for count in counts]
        if self.served.page_states:
            most = limits.rows + limits.tokens // self.stage.pages.groups[0].page_size
            self._full += [(row, 0)] * (most - len(self._full))

    def ends(self) -> Iterator[int]:
        """Of the living rows that draw, the token of the step behind which they do: each row's last."""
        stops = accumulate(self.counts[: self.living], initial=self.tokens.start)
        return (stop - 1 for stop, work in zip(islice(stops, 1, None), self.works, strict=False) if work.sample)

    def pack(self, packed: Packed) -> None:
        """Write down what the device must know."""
        self._rows = packed.add(work.row for work in self.works)
        self._owners = packed.add(work.row for work in self.works for _ in work.tokens)
        self._groups = [self._add_group(index, packed) for index in self.served.form.groups]
        self._bounds = packed.add(work.sealed for work in self.works)
        self._fill = packed.add(row for row, _ in self._full), packed.add(page for _, page in self._full)
        self._recent = self._add_recent(packed)
        self._tiles = self._add_tiles(packed)

    def batch(self, lists: Sequence[Tensor], positions: Tensor) -> DeviceBatch:
        """lists: what was packed, on the device. positions: of the whole step."""
        states, group_of = self.stage.places[self.form]
        rows, owners = lists[self._rows], lists[self._owners]
        groups = (
            self._group_rows(place, [lists[key] for key in keys], rows, owners) for place, keys in enumerate(self._groups)
        )
        return DeviceBatch(
            _spans(self.works) if self.limits is None else _any_spans(self.limits),
            self.tokens,
            _kind(self.works[0])[0] != 0,
            positions[self.tokens],
            tuple(groups),
            group_of,
            self.stage.pages.layer,
            states,
            form=self.form,
            replay=self.works[0].replay,
            sealed=self._sealed(rows, lists[self._bounds]),
            filled=self._filled(lists),
            recent=self._kept(lists),
            tiles=QueryTiles(self._tiles[0], *(lists[key] for key in self._tiles[1:])) if self._tiles else None,
            scale=self.served.shape.scale,
            library=self.stage.library,
        )

    def _limits(self, buckets: Buckets) -> Limits:
        form, sealed = self.served.form, max(work.sealed for work in self.works)
        rows, sizes = buckets.of_rows(self.living), [self._sizes(group, buckets) for group in form.groups]
        reads = _kind(self.works[0])[0] != 0
        return Limits(
            form=self.form,
            rows=rows,
            slots=tuple(slots for slots, _ in sizes),
            seen=tuple(seen for _, seen in sizes),
            sealed=buckets.of_slots(sealed, min(self._most(group) for group in form.sealed)) if sealed else 0,
            holes=any(work.slot != work.position for work in self.works),
            tokens=buckets.of_tokens(sum(len(work.tokens) for work in self.works)) if reads else 0,
        )

    def _sizes(self, group: int, buckets: Buckets) -> tuple[int, int]:
        """`slots` and `seen` of the limits. Where not all is seen, what is seen says how much there is to do."""
        lens, starts = [self._length(work, group) for work in self.works], self._starts_in(group)
        most = self._most(group)
        if not starts:
            return buckets.of_slots(max(lens), most), 0
        return most, buckets.of_slots(max(n - first for n, (first, *_) in zip(lens, starts, strict=True)), most)

    def _most(self, group: int) -> int:
        """Slots that a row can have in a group."""
        pages = self.stage.pages
        return pages.tables[group].shape[1] * pages.groups[group].page_size

    def _add_group(self, index: int, packed: Packed) -> tuple[int, int, int]:
        """Slots of the tokens, lengths of the rows, and first visible slots of the tokens."""
        slots = packed.add(chain(*(self._slots(work, index) for work in self.works)))
        lens = packed.add(self._length(work, index) for work in self.works)
        return slots, lens, packed.add(chain(*self._starts[index]))

    def _slots(self, work: RowWork, group: int) -> Iterable[int]:
        """Where a row's tokens enter: the dead all in one place, for which there is always room."""
        if work.row == self.stage.pages.dead_row:
            return repeat(0, len(work.tokens))
        return range(work.slot_in(group), self._length(work, group))

    def _length(self, work: RowWork, group: int) -> int:
        """Slots that a row has with its new tokens."""
        return 1 if work.row == self.stage.pages.dead_row else work.slot_in(group) + len(work.tokens)

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

    def _group_rows(self, place: int, device: Sequence[Tensor], rows: Tensor, owners: Tensor) -> GroupRows:
        index = self.served.form.groups[place]
        slots, lens, starts = device
        page_size, table = self.stage.pages.groups[index].page_size, self.stage.pages.tables[index]
        host_lens, host_starts = self._on_host(place)
        held = RowTable(
            entries=table,
            rows=rows,
            lens=lens.to(torch.int32),
            host_rows=tuple(work.row for work in self.works),
            host_lens=host_lens,
            page_size=page_size,
            starts=starts.to(torch.int32) if self._starts[index] else None,
            host_starts=host_starts,
            exact=self.limits is None,
        )
        return GroupRows(held, table[owners, slots // page_size].to(torch.int64), slots % page_size)

    def _on_host(self, place: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """What the host says of the rows' lengths and first slots in a group."""
        index = self.served.form.groups[place]
        if self.limits is None:
            return tuple(self._length(work, index) for work in self.works), self._starts[index]
        rows, slots, seen = len(self.works), self.limits.slots[place], self.limits.seen[place]
        return (slots,) * rows, ((slots - seen,),) * rows if seen else ()

    def _sealed(self, rows: Tensor, bounds: Tensor) -> SealedPages | None:
        pages, units = self.stage.pages, self.stage.sealed[self.form]
        most = tuple(work.sealed for work in self.works) if self.limits is None else (self.limits.sealed,) * len(self.works)
        return SealedPages(pages, self.served, units, rows, bounds, most) if any(most) else None

    def _pages_filled(self) -> list[tuple[int, int]]:
        """(row, page) of KV that the part's tokens fill, where something is to be made of them."""
        if not self.served.page_states or self.works[0].replay:
            return []
        size = self.stage.pages.groups[0].page_size
        spans = [(work.row, work.slot_in(0), work.slot_in(0) + len(work.tokens)) for work in self.works]
        return [(row, page) for row, start, stop in spans for page in range(start // size, stop // size)]

    def _filled(self, lists: Sequence[Tensor]) -> PageFill | None:
        if not self._full:
            return None
        rows, pages = (lists[key] for key in self._fill)
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
        if self.limits is not None and self.limits.tokens:  # as many, whatever the rows read
            most = min(self.limits.tokens, self.limits.rows * window.size)
            kept += [(0, self.stage.pages.dead_row, 0)] * (most - len(kept))
        if not kept:
            return None
        tokens, rows, places = (packed.add(column) for column in zip(*kept, strict=True))
        return tokens, rows, places

    def _add_tiles(self, packed: Packed) -> tuple[int, ...]:
        """Of short chunks that are to be captured: a tile's size, and what else QueryTiles has."""
        if self.limits is None or not self.limits.tokens:
            return ()
        shape = self.served.shape
        size = tile_size(shape.num_heads // shape.num_kv_heads, shape.head_dim, self.stage.pages.dtype.itemsize)
        most = bound_tiles(self.limits.tokens, len(self.works), size)
        return size, *(packed.add(each) for each in cut_tiles(self.counts, size, most))

    def _kept(self, lists: Sequence[Tensor]) -> QueryRows | None:
        if self._recent is None or self.stage.window is None:
            return None
        tokens, rows, places = (lists[key] for key in self._recent)
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


def _any_spans(limits: Limits) -> tuple[RowSpan, ...]:
    """The same of a captured step: bounds, and no row in particular; of short chunks, each anywhere among their tokens."""
    held = max(limits.slots)
    if limits.tokens:
        return (RowSpan(-1, 0, limits.tokens, held - limits.tokens + limits.holes, held),) * (limits.rows + 1)
    return tuple(RowSpan(-1, i, i + 1, held - 1 + limits.holes, held) for i in range(limits.rows))
