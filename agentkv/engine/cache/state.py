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
from agentkv.engine.cache.holding import Holding, Shift, append_run
from agentkv.engine.cache.intervals import clip, merged, normal_edits, size, subtract
from agentkv.engine.cache.pools import KVPools, Pieces
from agentkv.engine.core import Edit, Moves
from agentkv.engine.units import NOTHING, Units
from agentkv.types import Interval


@dataclass(slots=True)
class Change:
    """What the device must do after a state changed. moves: calls to make, in order. first_pages: by group, the first page
    that is another unit than before; () where every page is what it was. new_units: units taken from the arena, net."""

    first_pages: tuple[int, ...]
    new_units: Units
    moves: list[Moves] = field(default_factory=list)

    @classmethod
    def of(cls, shifts: Sequence[Shift]) -> Change:
        """The groups' changes together."""
        return cls(
            tuple(shift.first_page for shift in shifts),
            Units.of(shift.new_units for shift in shifts),
            [moves for shift in shifts for moves in shift.moves],
        )


class KVState:
    """What was computed of a history, and by group the slots that are held of it. Mutable; `fork` makes another holder.

    runs: logical intervals of the tokens that no prune has removed; length: how many they are; logical_length counts all.
    edits: the prunes it has seen, in normal form for a history one token longer than the state (the last token of a history
    has no KV yet). holdings: by group; a full group holds all of `runs`, a window group their end.
    """

    __slots__ = ("closed", "edits", "holdings", "length", "logical_length", "pools", "runs")

    def __init__(self, pools: KVPools) -> None:
        self.pools = pools
        self.holdings: tuple[Holding, ...] = tuple(Holding(pool) for pool in pools.pools)
        self.runs: list[Interval] = []
        self.length = 0
        self.logical_length = 0
        self.edits: tuple[Edit, ...] = ()
        self.closed = False

    @classmethod
    def of(cls, pools: KVPools, length: int, pieces: Pieces) -> KVState:
        """A never pruned state of `length` tokens over pieces that end there and follow one another slot by slot."""
        state = cls(pools)
        starts = [length - sum(piece.stop - piece.start for piece in each) for each in pieces]
        state.holdings = tuple(map(Holding.of, pools.pools, pieces, starts))
        state.length = state.logical_length = length
        state.runs = [(0, length)] if length else []
        return state

    @property
    def slices(self) -> Pieces:
        """Everything it holds."""
        return tuple(holding.slices for holding in self.holdings)

    @property
    def units(self) -> Units:
        """How many units it holds."""
        return Units.of(len(holding.units) for holding in self.holdings)

    @property
    def holes(self) -> list[Interval]:
        """Logical intervals below logical_length that were pruned."""
        return subtract([(0, self.logical_length)], self.runs)

    @property
    def lossy(self) -> bool:
        """Has it been pruned?"""
        return self.length < self.logical_length

    @property
    def pure_length(self) -> int:
        """Leading tokens whose KV depends on the token ids alone: up to the first hole."""
        return self.runs[0][1] if self.runs and self.runs[0][0] == 0 else 0

    def usable(self, limit: int) -> int:
        """Longest length up to `limit` that it can be cut to with every window whole; 0 if there is none."""
        length = min(limit, self.logical_length)
        return length if all(holding.covers(length) for holding in self.holdings) else 0

    def same_edits(self, other: KVState, length: int) -> bool:
        """Have the two seen the same prunes up to logical `length`?"""
        return normal_edits(self.edits, length + 1) == normal_edits(other.edits, length + 1)

    def digest(self, salt: str, token_ids: Sequence[int]) -> bytes:
        """What the slots hold, as 32 bytes: tenant, kept positions, edits and the ids they were computed from."""
        running = hashlib.blake2b(digest_size=32, key=hashlib.blake2b(salt.encode(), digest_size=32).digest())
        running.update(repr((self.runs, [(edit.at, edit.removed) for edit in self.edits])).encode())
        running.update(array("q", token_ids[: self.logical_length]).tobytes())
        return running.digest()

    def fork(self) -> KVState:
        """Another holder of the same slots."""
        self._live()
        child = KVState(self.pools)
        child.holdings = tuple(holding.fork() for holding in self.holdings)
        child.runs, child.length = list(self.runs), self.length
        child.logical_length, child.edits = self.logical_length, self.edits
        return child

    def release(self) -> None:
        """Let go of every slot. Idempotent."""
        if not self.closed:
            for holding in self.holdings:
                holding.release()
            self.closed = True
            self.runs, self.length, self.logical_length = [], 0, 0

    def append(self, count: int) -> Change:
        """Make room for the next `count` tokens, behind the last one in every group; windows are trimmed first.

        Raises ArenaFull before anything else changes.
        """
        self._live()
        returned = self.trim() if self.pools.windowed else NOTHING
        if all(holding.room() >= count for holding in self.holdings):
            change = Change((), NOTHING - returned if returned else NOTHING)
            for holding in self.holdings:
                holding.fill(count, self.logical_length)
        else:
            change = self._grow(count, returned)
        append_run(self.runs, self.logical_length, count)
        self.logical_length += count
        self.length += count
        return change

    def trim(self) -> Units:
        """Let go of pages behind the windows of what may follow; the units that returned."""
        return Units.of(holding.trim(self.logical_length) for holding in self.holdings)

    def restore(self, runs: Iterable[Interval], edits: tuple[Edit, ...], logical_length: int) -> None:
        """Make an empty state one of these tokens; its holdings are restored by the caller, with what they hold of them."""
        self._live()
        self.runs, self.edits, self.logical_length = list(runs), edits, logical_length
        self.length = size(self.runs)

    def cut(self, length: int) -> None:
        """Keep the first `length` logical tokens only. Needs no memory. Raises ValueError where a window would not be whole."""
        self._live()
        if length >= self.logical_length:
            return
        if length and not self.usable(length):
            raise ValueError(f"a window that ends at {length} is not held any more")
        for holding in self.holdings:
            holding.cut(length)
        self.runs = clip(self.runs, 0, length)
        self.length, self.logical_length = size(self.runs), length
        self.edits = normal_edits(self.edits, length + 1)

    def hollow(self, later: KVState) -> None:
        """Let go of everything that `recut` can take from `later`."""
        for mine, theirs in zip(self.holdings, later.holdings, strict=True):
            if theirs.covers(self.logical_length):
                mine.release()

    def recut(self, later: KVState) -> bool:
        """Hold what `later` holds up to this length: a state of the same history that went on, and may have been pruned.

        Groups whose windows it has let go of keep their own slots; False where those have not seen the same prunes.
        """
        self._live()
        length = self.logical_length
        edits = normal_edits(later.edits, length + 1)
        covered = [theirs.covers(length) for theirs in later.holdings]
        if later.logical_length < length or (edits != self.edits and not all(covered)):
            return False
        for index, theirs in enumerate(later.holdings):
            if covered[index]:
                cut = theirs.fork()
                cut.cut(length)
                self.holdings[index].release()
                self.holdings = (*self.holdings[:index], cut, *self.holdings[index + 1 :])
        self.runs = clip(later.runs, 0, length)
        self.length, self.edits = size(self.runs), edits
        return True

    def kept(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The tokens among these that no prune has removed."""
        return [part for start, end in merged(intervals) for part in clip(self.runs, start, end)]

    def page_floor(self, position: int) -> int:
        """Lowest logical position of a token in a page with the token at `position` (which is kept), in any group."""
        floor = position
        for holding in self.holdings:
            for slot, _ in holding.slots_of([(position, position + 1)]):
                floor = min(floor, holding.position(slot - slot % holding.pool.page_size))
        return floor

    def copy_units(self, intervals: Iterable[Interval]) -> Units:
        """Least `spare` that `remove` needs: pages held alone are used again as they are read, shared ones are not."""
        intervals = list(intervals)
        return Units.of(holding.copy_units(intervals) for holding in self.holdings)

    def remove(self, intervals: Iterable[Interval], spare: Units) -> Change:
        """Compaction: the slots of these logical tokens go, later ones move down; pages before the first stay as they are.

        Later pages are gathered into fresh ones. `spare`: how many units more than before may be in use at any moment. When
        they are used up, pages that were read completely are let go and may be taken again (what others hold of them stays),
        so the moves must be carried out in order before anything else runs on the device. It must be `copy_units(intervals)`
        at least; ArenaFull otherwise, and then the state may only be released. Not much more than that is used: a prune is
        there to lower the peak, not to raise it by a copy of everything behind the hole.
        """
        self._live()
        removed = merged(clip(intervals, 0, self.logical_length))
        edits = normal_edits((*self.edits, Edit(self.logical_length + 1, tuple(removed))), self.logical_length + 1)
        shifts = [holding.remove(removed, units) for holding, units in zip(self.holdings, spare.counts, strict=True)]
        self.runs = subtract(self.runs, removed)
        self.length = size(self.runs)
        self.edits = edits
        return Change.of(shifts)

    def _grow(self, count: int, returned: Units) -> Change:
        """`append` where a group needs pages. returned: units that its windows have let go of."""
        plans = [holding.plan(count) for holding in self.holdings]
        needed = Units.of(plan.pages for plan in plans)
        if not self.pools.at_hand(needed):
            raise ArenaFull(f"{needed.counts} pages wanted, {self.pools.free.counts} free")
        change = Change(tuple(plan.first_page for plan in plans), needed - returned)
        for holding, plan in zip(self.holdings, plans, strict=True):
            change.moves += holding.grow(count, self.logical_length, plan)
        return change

    def _live(self) -> None:
        if self.closed:
            raise ValueError("this KV state was released")
