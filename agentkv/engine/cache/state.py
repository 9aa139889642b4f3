"""KVState: the KV that one sequence, chain or checkpoint holds.

Logical positions never change; physical slots are the kept ones in order of position:

    logical   0 1 2 3 4 5 6 7 8 9      runs [(0, 3), (6, 10)], one hole [3, 6)
    physical  0 1 2       3 4 5 6      pages of 4: |0 1 2 6|7 8 9 .|
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentkv.engine.cache.arena import ArenaFull
from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.cache.intervals import clip, merged, normal_edits, size, subtract
from agentkv.engine.core import Edit, Slot
from agentkv.types import Interval

SPARE_SHARE = 16
"""A compaction takes at most a sixteenth of the state's pages beyond what it must have."""

Moves = tuple[list[Slot], list[Slot]]
"""Source and target slots of one call of `Runner.move_slots`."""


@dataclass(slots=True)
class Change:
    """What the device must do after a state changed. moves: calls to make, in order. first_page: first page that is another
    unit than before (the row's table must be rewritten from there). new_units: units taken from the arena, net."""

    first_page: int
    new_units: int = 0
    moves: list[Moves] = field(default_factory=list)


class KVState:
    """One holder of slices, in physical order. Mutable; `fork` makes another holder of the same slots.

    Every slice starts at a page edge and all but the last end at one. length counts slots, logical_length tokens. edits:
    the prunes it has seen, in normal form for a history one token longer than the state (the last token of a history has
    no KV yet). Content of slots is never rewritten, so sharers never notice each other.
    """

    __slots__ = ("closed", "edits", "length", "logical_length", "pool", "runs", "slices", "units")

    def __init__(self, pool: ExtentPool) -> None:
        self.pool = pool
        self.slices: list[Slice] = []
        self.units: list[int] = []
        self.runs: list[Interval] = []
        self.length = 0
        self.logical_length = 0
        self.edits: tuple[Edit, ...] = ()
        self.closed = False

    @classmethod
    def of(cls, pool: ExtentPool, pieces: Iterable[Slice]) -> KVState:
        """A never pruned state over pieces that follow one another slot by slot.

        Where a piece starts inside a page, its copy of that page holds the page's earlier slots too and replaces the
        copy of the piece before it.
        """
        state = cls(pool)
        for extent, start, stop in pieces:
            floor = start - start % pool.page_size
            surplus = start - floor
            while surplus:
                last = state.slices.pop()
                keep = last.stop - surplus
                if keep > last.start:
                    state.slices.append(last._replace(stop=keep))
                surplus = max(0, last.start - keep)
            if state.slices and state.slices[-1].extent is extent and state.slices[-1].stop == floor:
                floor = state.slices.pop().start
            state.slices.append(Slice(extent, floor, stop))
        pool.retain(state.slices)
        state.units = list(pool.units_of(state.slices))
        state.length = state.logical_length = sum(piece.stop - piece.start for piece in state.slices)
        state.runs = [(0, state.length)] if state.length else []
        return state

    @property
    def holes(self) -> list[Interval]:
        """Logical intervals below logical_length that have no slots."""
        return subtract([(0, self.logical_length)], self.runs)

    @property
    def lossy(self) -> bool:
        """Has it been pruned?"""
        return self.length < self.logical_length

    @property
    def pure_length(self) -> int:
        """Leading tokens whose KV depends on the token ids alone: up to the first hole."""
        return self.runs[0][1] if self.runs and self.runs[0][0] == 0 else 0

    @property
    def shared_pages(self) -> int:
        """Leading pages up to the last one that somebody else holds too."""
        page = len(self.units)
        for held in reversed(self.slices):
            mask = self.pool.exclusive(held)
            for unit in range(self.pool.pages(held.stop) - 1, held.start // self.pool.page_size - 1, -1):
                if not mask >> unit & 1:
                    return page
                page -= 1
        return 0

    def digest(self, salt: str, token_ids: Sequence[int]) -> bytes:
        """What the slots hold, as 32 bytes: tenant, kept positions, edits and the ids they were computed from."""
        running = hashlib.blake2b(digest_size=32, key=hashlib.blake2b(salt.encode(), digest_size=32).digest())
        running.update(repr((self.runs, [(edit.at, edit.removed) for edit in self.edits])).encode())
        running.update(array("q", token_ids[: self.logical_length]).tobytes())
        return running.digest()

    def fork(self) -> KVState:
        """Another holder of the same slots."""
        self._live()
        child = KVState(self.pool)
        child.slices, child.units, child.runs = list(self.slices), list(self.units), list(self.runs)
        child.length, child.logical_length, child.edits = self.length, self.logical_length, self.edits
        self.pool.retain(child.slices)
        return child

    def release(self) -> None:
        """Let go of every slot. Idempotent."""
        if not self.closed:
            self.pool.release(self.slices)
            self.closed = True
            self.slices, self.units, self.runs, self.length, self.logical_length = [], [], [], 0, 0

    def append(self, count: int) -> Change:
        """Make room for the next `count` tokens. Their slots are physical `length` and on.

        Raises ArenaFull before anything changes.
        """
        self._live()
        page = self.pool.page_size
        offset = self.length % page
        copies = bool(offset) and not self.pool.writable(self.slices[-1])
        first_page = self.length // page if copies else len(self.units)
        needed = self.pool.pages(self.length + count) - first_page
        change = Change(first_page)
        if needed > self.pool.free_units:
            raise ArenaFull(f"{needed} pages wanted, {self.pool.free_units} free")
        if offset and not copies:
            tail = self.slices[-1]
            self.slices[-1] = tail._replace(stop=min(tail.stop + count, tail.stop + page - offset))
            self.pool.swap(tail, self.slices[-1])
        if needed:
            fresh = self.pool.make(needed, self.length + count - first_page * page)
            change.new_units = needed
            if copies:
                source = self.units[-1]
                change.moves.append(([(source, i) for i in range(offset)], [(fresh.extent.units[0], i) for i in range(offset)]))
                self._keep(self.length - offset)
            self.slices.append(fresh)
            self.units.extend(fresh.extent.units)
        start = self.runs[-1][0] if self.runs and self.runs[-1][1] == self.logical_length else self.logical_length
        end = self.logical_length + count
        self.runs[-1:] = [(start, end)] if start < self.logical_length else [*self.runs[-1:], (start, end)]
        self.logical_length = end
        self.length = size(self.runs)
        return change

    def cut(self, length: int) -> None:
        """Keep the first `length` logical tokens only. Needs no memory."""
        self._live()
        if length >= self.logical_length:
            return
        runs = clip(self.runs, 0, length)
        self._keep(size(runs))
        self.runs, self.logical_length = runs, length
        self.edits = normal_edits(self.edits, length + 1)

    def slots_of(self, intervals: Iterable[Interval]) -> list[Interval]:
        """Physical intervals of the kept tokens among these logical ones."""
        out: list[Interval] = []
        start = 0
        wanted = merged(intervals)
        for low, high in self.runs:
            out += [(start + a - low, start + b - low) for a, b in clip(wanted, low, high)]
            start += high - low
        return merged(out)

    def position(self, slot: int) -> int:
        """Logical position of a physical slot; the logical length where the slot is not there yet."""
        for start, end in self.runs:
            if slot < end - start:
                return start + slot
            slot -= end - start
        return self.logical_length

    def copy_units(self, intervals: Iterable[Interval]) -> int:
        """Least `spare` that `remove` needs: pages held alone are used again as they are read, shared ones are not."""
        slots = self.slots_of(intervals)
        if not slots or (len(slots) == 1 and slots[0][1] == self.length):
            return 0
        first_page = slots[0][0] // self.pool.page_size
        new_pages = self.pool.pages(self.length - size(slots)) - first_page
        return min(new_pages, max(0, self.shared_pages - first_page) + 1)

    def between(self, low: int, high: int) -> list[Slice]:
        """Slices of physical slots [low, high), exact to the slot; nothing is retained."""
        out: list[Slice] = []
        position = 0
        for extent, start, stop in self.slices:
            a, b = max(low, position), min(high, position + stop - start)
            if a < b:
                out.append(Slice(extent, start + a - position, start + b - position))
            position += stop - start
        return out

    def remove(self, intervals: Iterable[Interval], spare: int) -> Change:
        """Compaction: the slots of these logical tokens go, later ones move down; pages before the first stay as they are.

        Later pages are gathered into fresh ones. `spare`: how many units more than before may be in use at any moment. When
        they are used up, pages that were read completely are let go and may be taken again (what others hold of them stays),
        so the moves must be carried out in order before anything else runs on the device. It must be `copy_units(intervals)`
        at least; ArenaFull otherwise, and then the state may only be released. Not much more than that is used: a prune is
        there to lower the peak, not to raise it by a copy of everything behind the hole.
        """
        self._live()
        spare = min(spare, self.copy_units(intervals) + len(self.units) // SPARE_SHARE)
        removed = merged(clip(intervals, 0, self.logical_length))
        slots = self.slots_of(removed)
        edits = normal_edits((*self.edits, Edit(self.logical_length + 1, tuple(removed))), self.logical_length + 1)
        change = Change(len(self.units))
        if slots:
            first, last = slots[0][0], slots[-1][1]
            change.first_page = first // self.pool.page_size
            kept = subtract([(change.first_page * self.pool.page_size, self.length)], slots)
            if last == self.length and len(slots) == 1:
                before = self.pool.free_units
                self._keep(first)
                change.new_units = before - self.pool.free_units
            else:
                _Compaction(self, change, spare).run([slot for run in kept for slot in range(*run)])
        self.runs = subtract(self.runs, removed)
        self.edits = edits
        return change

    def slot(self, index: int) -> Slot:
        """(unit, offset) of a physical slot."""
        return self.units[index // self.pool.page_size], index % self.pool.page_size

    def _keep(self, slots: int) -> None:
        """Hold the first `slots` physical slots only."""
        kept = self.between(0, slots)
        index = len(kept) - 1 if kept and kept[-1] != self.slices[len(kept) - 1] else len(kept)
        self.pool.retain(kept[index:])
        self.pool.release(self.slices[index:])
        self.slices = kept
        del self.units[self.pool.pages(slots) :]
        self.length = slots

    def _live(self) -> None:
        if self.closed:
            raise ValueError("this KV state was released")


class _Compaction:
    """One run of `KVState.remove`: kept slots from the first changed page on are gathered into fresh pages."""

    def __init__(self, state: KVState, change: Change, spare: int) -> None:
        self.state, self.pool, self.change, self.spare = state, state.pool, change, spare
        self.base = change.first_page * self.pool.page_size
        self.end = state.length
        self.old_units = state.units[change.first_page :]
        self.sources = state.between(self.base, self.end)
        before = state.between(0, self.base)
        self.pool.retain([*before, *self.sources])
        self.pool.release(state.slices)
        state.slices = before
        del state.units[change.first_page :]

    def run(self, order: list[int]) -> None:
        """order: physical slots from `base` on that stay, ascending. Raises ArenaFull if `spare` was too small."""
        done = 0
        while done < len(order):
            pages = min(self.spare, self.pool.pages(len(order) - done))
            if pages:
                done += self._gather(pages, order[done : done + pages * self.pool.page_size])
            elif not self._let_go(order[done] // self.pool.page_size * self.pool.page_size):
                self.pool.release(self.sources)
                raise ArenaFull("compaction has used up its spare pages")
        self._let_go(self.end)
        self.state.length = self.base + len(order)

    def _gather(self, pages: int, slots: list[int]) -> int:
        page, fresh = self.pool.page_size, self.pool.make(pages, len(slots))
        source = [(self.old_units[(slot - self.base) // page], slot % page) for slot in slots]
        target = [(fresh.extent.units[i // page], i % page) for i in range(len(slots))]
        self.change.moves.append((source, target))
        self.change.new_units += pages
        self.spare -= pages
        self.state.slices.append(fresh)
        self.state.units.extend(fresh.extent.units)
        return len(slots)

    def _let_go(self, upto: int) -> int:
        """Release source slots below physical `upto`; the units that returned."""
        rest: list[Slice] = []
        position = self.end
        for piece in reversed(self.sources):
            low = position - (piece.stop - piece.start)
            if position > upto:
                rest.insert(0, piece._replace(start=piece.start + max(0, upto - low)))
            position = low
        before = self.pool.free_units
        self.pool.retain(rest)
        self.pool.release(self.sources)
        self.sources = rest
        returned = self.pool.free_units - before
        self.spare += returned
        self.change.new_units -= returned
        return returned
