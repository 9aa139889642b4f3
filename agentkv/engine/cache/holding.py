"""Holding: the slots that one KV state holds in one KV group.

Slots are numbered in order of position. A window group lets go of whole pages from the front; the numbers of the slots
behind them stay, so pages never move in a table:

    window 4, pages of 4, 13 tokens      slots 0 to 7 let go, start 8, length 13      pages |. . . .|. . . .|8 9 10 11|12 . . .|
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from agentkv.engine.cache.arena import ArenaFull
from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.cache.intervals import clip, merged, size, subtract
from agentkv.engine.windows import first_slots
from agentkv.engine.work import Copies, Moves, Slot, Work
from agentkv.types import Interval

SPARE_SHARE = 16
"""A compaction takes at most a sixteenth of the pages beyond what it must have."""


@dataclass(slots=True)
class Shift:
    """What changed in one group. moves: calls to make, in order. first_page: first page that is another unit than before (the
    row's table must be rewritten from there). new_units: units taken from the arena, net."""

    first_page: int
    new_units: int = 0
    moves: list[Work] = field(default_factory=list)


class Growth(NamedTuple):
    """What the next tokens take in one group. pages: how many fresh ones, from index first_page on. copies: the last page is
    partly filled and not ours to write, so the first fresh one is a copy of it."""

    first_page: int
    pages: int
    copies: bool


class Holding:
    """One holder of slices, in physical order; content of slots is never rewritten, so sharers never notice each other.

    Every slice starts at a page edge and all but the last end at one. Slots [start, length) are held; runs: the logical
    intervals of their tokens. floor: every kept token from this logical position on has a slot here.
    """

    __slots__ = ("__weakref__", "floor", "length", "pool", "runs", "slices", "start", "units")

    def __init__(self, pool: ExtentPool) -> None:
        self.pool = pool
        self.slices: list[Slice] = []
        self.units: list[int] = []
        self.runs: list[Interval] = []
        self.start = self.length = self.floor = 0
        pool.tables.add(self)

    @classmethod
    def of(cls, pool: ExtentPool, pieces: Iterable[Slice], start: int) -> Holding:
        """Of tokens that were never pruned, from position `start` on, over pieces that follow one another slot by slot.

        Where a piece starts inside a page, its copy of that page holds the page's earlier slots too and replaces the
        copy of the piece before it.
        """
        holding = cls(pool)
        slices, length = holding.slices, start
        for extent, low, stop in pieces:
            floor = low - low % pool.page_size
            surplus = low - floor
            while surplus and slices:
                last = slices.pop()
                keep = last.stop - surplus
                if keep > last.start:
                    slices.append(last._replace(stop=keep))
                surplus = max(0, last.start - keep)
            if slices and slices[-1].extent is extent and slices[-1].stop == floor:
                floor = slices.pop().start
            slices.append(Slice(extent, floor, stop))
            length += stop - low
        pool.retain(slices)
        holding.units = list(pool.units_of(slices))
        holding.start = holding.floor = start - start % pool.page_size
        holding.length = length
        holding.runs = [(holding.start, length)] if length > holding.start else []
        return holding

    @property
    def first_page(self) -> int:
        """Index of the page that `units` begins with."""
        return self.start // self.pool.page_size

    @property
    def next_page(self) -> int:
        """Index behind the last page."""
        return self.first_page + len(self.units)

    @property
    def shared_pages(self) -> int:
        """Index behind the last page that somebody else holds too."""
        page = self.first_page + len(self.units)
        for held in reversed(self.slices):
            mask = self.pool.exclusive(held)
            for unit in range(self.pool.pages(held.stop) - 1, held.start // self.pool.page_size - 1, -1):
                if not mask >> unit & 1:
                    return page
                page -= 1
        return self.first_page

    def covers(self, length: int) -> bool:
        """Is everything held that the token at this logical position may see?"""
        return length >= self.covers_from

    @property
    def covers_from(self) -> int:
        """Shortest logical length that is covered, with all that are longer."""
        return 0 if self.floor == 0 or self.pool.window is None else self.floor + self.pool.window - 1

    def fork(self) -> Holding:
        """Another holder of the same slots."""
        child = Holding(self.pool)
        child.slices, child.units, child.runs = list(self.slices), list(self.units), list(self.runs)
        child.start, child.length, child.floor = self.start, self.length, self.floor
        self.pool.retain(child.slices)
        return child

    def restore(self, runs: Iterable[Interval], start: int, floor: int, length: int) -> None:
        """Make an empty holding one of these tokens in slots [start, length), in fresh units whose content is to be written.
        Raises ArenaFull."""
        self.runs, self.start, self.floor, self.length = list(runs), start, floor, length
        pages = self.pool.pages(self.length) - self.first_page
        if pages:
            self.slices = [self.pool.make(pages, self.length - start)]
            self.units = list(self.slices[0].extent.units)

    def follow(self) -> None:
        """Units have moved (see `ExtentPool.tables`)."""
        self.units[:] = self.pool.units_of(self.slices)

    def release(self) -> int:
        """Let go of every slot; units that returned."""
        returned = self.pool.release(self.slices)
        self.slices, self.units, self.runs = [], [], []
        self.start = self.length = self.floor = 0
        return returned

    def fill(self, count: int, position: int) -> None:
        """Slots for `count` tokens from logical `position` on, in what is left of the last page (see `room`)."""
        tail = self.slices[-1]
        self.slices[-1] = self.pool.extend(tail, tail.stop + count)
        append_run(self.runs, position, count)
        self.length += count

    def room(self) -> int:
        """Slots that are left of a last page that is partly filled and ours to write."""
        offset = self.length % self.pool.page_size
        return self.pool.page_size - offset if offset and self.pool.writable(self.slices[-1]) else 0

    def plan(self, count: int) -> Growth:
        """What `count` tokens more will take."""
        page, pages = self.pool.page_size, self.first_page + len(self.units)
        copies = bool(self.length % page) and not self.pool.writable(self.slices[-1])
        first = self.length // page if copies else pages
        return Growth(first, self.pool.pages(self.length + count) - first, copies)

    def refill(self, units: int, keep: int) -> int:
        """A sealed part of so many units, of which the first `keep` stay; the units that returned. Raises ArenaFull."""
        page = self.pool.page_size
        kept = self.between(0, keep * page)
        self.pool.retain(kept)
        fresh = [self.pool.make(units - keep, (units - keep) * page)] if units > keep else []
        returned = self.pool.release(self.slices)
        self.slices = [*kept, *fresh]
        self.units, self.length = list(self.pool.units_of(self.slices)), units * page
        return returned

    def shared_units(self) -> int:
        """Leading units that `own` copies."""
        return self.shared_pages - self.first_page

    def own(self) -> list[Work]:
        """Hold alone what is rewritten: pages up to the last that somebody else holds too become copies. Raises ArenaFull."""
        count, page = self.shared_units(), self.pool.page_size
        if not count:
            return []
        split = min(self.length, self.start + count * page)
        behind = self.between(split, self.length)
        fresh = self.pool.make(count, split - self.start)
        pairs = sorted(zip(self.units[:count], fresh.extent.units, strict=True))
        self.pool.retain(behind)
        self.pool.release(self.slices)
        self.slices = [fresh, *behind]
        self.units = list(self.pool.units_of(self.slices))
        return [Copies([old for old, _ in pairs], [new for _, new in pairs], self.pool.group)]

    def grow(self, count: int, position: int, growth: Growth) -> list[Work]:
        """Slots for `count` tokens from logical `position` on, as planned; the moves to make. Raises ArenaFull."""
        page, moves = self.pool.page_size, list[Work]()
        offset = self.length % page
        if offset and not growth.copies:
            tail = self.slices[-1]
            self.slices[-1] = self.pool.extend(tail, tail.stop + min(count, page - offset))
        if growth.pages:
            fresh = self.pool.make(growth.pages, self.length + count - growth.first_page * page)
            if growth.copies:
                source, target = self.units[-1], fresh.extent.units[0]
                if self.pool.by_slot:  # a page's item is made when the page is full
                    pairs = [(source, i) for i in range(offset)], [(target, i) for i in range(offset)]
                    moves.append(Moves(*pairs, self.pool.group))
                elif self.pool.whole:
                    moves.append(Copies([source], [target], self.pool.group))
                self.keep(self.length - offset)
                self.length += offset
            self.slices.append(fresh)
            self.units.extend(fresh.extent.units)
        append_run(self.runs, position, count)
        self.length += count
        return moves

    def trim(self, length: int) -> int:
        """Let go of pages that no token from logical `length` on will see, nor any a few tokens before; units that returned."""
        if self.pool.window is None:
            return 0
        low = length - (self.pool.window - 1) - self.pool.slack
        if low <= self.floor:
            return 0
        return self.let_go(self.start + size(clip(self.runs, 0, low)))

    def let_go(self, slot: int) -> int:
        """Let go of the pages that lie before this slot; units that returned."""
        slot -= slot % self.pool.page_size
        if slot <= self.start:
            return 0
        length = self.runs[-1][1] if self.runs else self.floor
        self.floor = self.position(slot - 1) + 1
        kept = self.between(slot, self.length)
        self.pool.retain(kept)
        returned = self.pool.release(self.slices)
        self.slices, self.units = kept, self.units[slot // self.pool.page_size - self.first_page :]
        self.runs, self.start = clip(self.runs, self.floor, length), slot
        return returned

    def cut(self, length: int) -> int:
        """Keep tokens below logical `length` only; units that returned. A sealed part stays as long as anything does."""
        if self.pool.sealed and length:
            return 0
        self.runs = clip(self.runs, 0, length)
        if not length:
            return self.release()
        return self.keep(self.start + size(self.runs))

    def keep(self, slots: int) -> int:
        """Hold slots below `slots` only (runs are the caller's); units that returned."""
        kept = self.between(self.start, slots)
        index = len(kept) - 1 if kept and kept[-1] != self.slices[len(kept) - 1] else len(kept)
        self.pool.retain(kept[index:])
        returned = self.pool.release(self.slices[index:])
        self.slices = kept
        del self.units[self.pool.pages(slots) - self.first_page :]
        self.length = slots
        return returned

    def slots_of(self, intervals: Iterable[Interval]) -> list[Interval]:
        """Intervals of slots of the tokens held among these logical ones."""
        out: list[Interval] = []
        start = self.start
        wanted = merged(intervals)
        for low, high in self.runs:
            out += [(start + a - low, start + b - low) for a, b in clip(wanted, low, high)]
            start += high - low
        return merged(out)

    def position(self, slot: int) -> int:
        """Logical position of a held slot; for one past the end, the position behind the last token."""
        slot -= self.start
        for start, end in self.runs:
            if slot < end - start:
                return start + slot
            slot -= end - start
        return self.runs[-1][1] if self.runs else self.floor

    def first_visible(self, position: int, count: int) -> tuple[int, ...]:
        """For `count` tokens from logical `position` on, all held: slot of the oldest token that each of them sees."""
        assert self.pool.window is not None
        return tuple(self.start + slot for slot in first_slots(self.runs, position, count, self.pool.window))

    def between(self, low: int, high: int) -> list[Slice]:
        """Slices of slots [low, high), exact to the slot; nothing is retained."""
        out: list[Slice] = []
        slot = self.start
        for extent, start, stop in self.slices:
            a, b = max(low, slot), min(high, slot + stop - start)
            if a < b:
                out.append(Slice(extent, start + a - slot, start + b - slot))
            slot += stop - start
        return out

    def slot(self, index: int) -> Slot:
        """(unit, offset) of a held slot."""
        return self.units[index // self.pool.page_size - self.first_page], index % self.pool.page_size

    def copy_units(self, intervals: Iterable[Interval]) -> int:
        """Least `spare` that `remove` needs: pages held alone are used again as they are read, shared ones are not."""
        slots = [] if self.pool.whole else self.slots_of(intervals)
        if not slots or (len(slots) == 1 and slots[0][1] == self.length):
            return 0
        first_page = slots[0][0] // self.pool.page_size
        new_pages = self.pool.pages(self.length - size(slots)) - first_page
        return min(new_pages, max(0, self.shared_pages - first_page) + 1)

    def left_by(self, intervals: Iterable[Interval]) -> tuple[list[Slice], int]:
        """What `remove` would go on holding of the present slices, and how many fresh pages it would fill."""
        slots = [] if self.pool.whole else self.slots_of(intervals)
        if not slots:
            return self.slices, 0
        first, page = slots[0][0], self.pool.page_size
        if len(slots) == 1 and slots[0][1] == self.length:
            return self.between(self.start, first), 0
        return self.between(self.start, first - first % page), self.pool.pages(self.length - size(slots)) - first // page

    def remove(self, intervals: Iterable[Interval], spare: int) -> Shift:
        """Compaction: the slots of these logical tokens go, later ones move down; pages before the first stay as they are.

        See `KVState.remove`.
        """
        intervals = merged(intervals)
        slots = self.slots_of(intervals)
        shift = Shift(self.next_page)
        if not slots:
            return shift
        if self.pool.whole:
            self.runs = subtract(self.runs, intervals)
            self.length = self.start + size(self.runs)
            return shift
        spare = min(spare, self.copy_units(intervals) + len(self.units) // SPARE_SHARE)
        first, last = slots[0][0], slots[-1][1]
        shift.first_page = first // self.pool.page_size
        if last == self.length and len(slots) == 1:
            shift.new_units = -self.keep(first)
        else:
            kept = subtract([(shift.first_page * self.pool.page_size, self.length)], slots)
            Compaction(self, shift, spare).run([slot for run in kept for slot in range(*run)])
        self.runs = subtract(self.runs, intervals)
        return shift


def append_run(runs: list[Interval], position: int, count: int) -> None:
    """Let logical intervals end with `count` positions from `position` on."""
    if runs and runs[-1][1] == position:
        runs[-1] = (runs[-1][0], position + count)
    else:
        runs.append((position, position + count))


class Compaction:
    """One run of `Holding.remove`: kept slots from the first changed page on are gathered into fresh pages."""

    def __init__(self, holding: Holding, shift: Shift, spare: int) -> None:
        self.holding, self.pool, self.shift, self.spare = holding, holding.pool, shift, spare
        self.base = shift.first_page * self.pool.page_size
        self.end = holding.length
        index = shift.first_page - holding.first_page
        self.old_units = holding.units[index:]
        self.sources = holding.between(self.base, self.end)
        before = holding.between(holding.start, self.base)
        self.pool.retain([*before, *self.sources])
        self.pool.release(holding.slices)
        holding.slices = before
        del holding.units[index:]

    def run(self, order: list[int]) -> None:
        """order: slots from `base` on that stay, ascending. Raises ArenaFull if `spare` was too small."""
        done = 0
        while done < len(order):
            pages = min(self.spare, self.pool.pages(len(order) - done))
            if pages:
                done += self._gather(pages, order[done : done + pages * self.pool.page_size])
            elif not self._let_go(order[done] // self.pool.page_size * self.pool.page_size):
                self.pool.release(self.sources)
                raise ArenaFull("compaction has used up its spare pages")
        self._let_go(self.end)
        self.holding.length = self.base + len(order)

    def _gather(self, pages: int, slots: list[int]) -> int:
        page, fresh = self.pool.page_size, self.pool.make(pages, len(slots))
        source = [(self.old_units[(slot - self.base) // page], slot % page) for slot in slots]
        target = [(fresh.extent.units[i // page], i % page) for i in range(len(slots))]
        if self.pool.by_slot:
            self.shift.moves.append(Moves(source, target, self.pool.group))
        self.shift.new_units += pages
        self.spare -= pages
        self.holding.slices.append(fresh)
        self.holding.units.extend(fresh.extent.units)
        return len(slots)

    def _let_go(self, upto: int) -> int:
        """Release source slots below `upto`; the units that returned."""
        rest: list[Slice] = []
        position = self.end
        for piece in reversed(self.sources):
            low = position - (piece.stop - piece.start)
            if position > upto:
                rest.insert(0, piece._replace(start=piece.start + max(0, upto - low)))
            position = low
        self.pool.retain(rest)
        returned = self.pool.release(self.sources)
        self.sources = rest
        self.spare += returned
        self.shift.new_units -= returned
        return returned
