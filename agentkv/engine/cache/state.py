"""KVState: the KV that one sequence, chain or checkpoint holds.

Logical positions never change; physical slots are the kept ones in order of position:

    logical   0 1 2 3 4 5 6 7 8 9      runs [(0, 3), (6, 10)], one hole [3, 6)
    physical  0 1 2       3 4 5 6      pages of 4: |0 1 2 6|7 8 9 .|
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from agentkv.engine.cache.arena import ArenaFull
from agentkv.engine.cache.extents import Slice
from agentkv.engine.cache.holding import Growth, Holding, Shift, append_run
from agentkv.engine.cache.intervals import clip, merged, normal_edits, size, subtract
from agentkv.engine.cache.pools import KVPools, Pieces
from agentkv.engine.core import Edit, Reach
from agentkv.engine.form import Form, Held, Seal
from agentkv.engine.units import NOTHING, Units
from agentkv.engine.work import PageWork, SealWork, TailPages, Work
from agentkv.types import Interval


@dataclass(slots=True)
class Change:
    """What the device must do after a state changed. moves: calls to make, in order. first_pages: by group, the first page
    that is another unit than before; () where every page is what it was. new_units: units taken from the arena, net."""

    first_pages: tuple[int, ...]
    new_units: Units
    moves: list[Work] = field(default_factory=list)

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
    has no KV yet). holdings: by group; of the groups that the form fills, a full one holds all of `runs`, a window group their
    end.

    Where the form seals: floor: the tail begins here, and its holdings have let go of whole pages before it. sealed_at: logical
    length at the last seal, below which the state cannot be cut; slots: most slots of the sealed part in a layer and head.
    owned: nobody else holds what steps rewrite.
    """

    __slots__ = (
        "closed",
        "edits",
        "floor",
        "form",
        "holdings",
        "length",
        "logical_length",
        "owned",
        "pools",
        "runs",
        "sealed_at",
        "slots",
    )

    def __init__(self, pools: KVPools, form: Form | None = None) -> None:
        self.pools = pools
        self.form = form or pools.forms[0]
        self.holdings: tuple[Holding, ...] = tuple(Holding(pool) for pool in pools.pools)
        self.floor = self.sealed_at = self.slots = 0
        self.owned = True
        self.runs: list[Interval] = []
        self.length = 0
        self.logical_length = 0
        self.edits: tuple[Edit, ...] = ()
        self.closed = False

    @classmethod
    def of(cls, pools: KVPools, length: int, pieces: Pieces, form: Form | None = None) -> KVState:
        """A never pruned state of `length` tokens over pieces that end there and follow one another slot by slot."""
        state = cls(pools, form)
        starts = [length - sum(piece.stop - piece.start for piece in each) for each in pieces]
        state.holdings = tuple(
            Holding.of(pool, each, start) if pool.group in state.form.groups else Holding(pool)
            for pool, each, start in zip(pools.pools, pieces, starts, strict=True)
        )
        state.owned = not state.form.mutable
        state.length = state.logical_length = length
        state.runs = [(0, length)] if length else []
        return state

    @property
    def slices(self) -> Pieces:
        """Everything it holds."""
        return tuple(holding.slices for holding in self.holdings)

    @property
    def filled(self) -> tuple[Holding, ...]:
        """Holdings that every token enters."""
        return tuple(self.holdings[group] for group in self.form.groups)

    @property
    def sealed(self) -> tuple[Holding, ...]:
        """Holdings of the sealed part."""
        return tuple(self.holdings[group] for group in self.form.sealed)

    @property
    def resident(self) -> int:
        """Slots that are held of a full layer and head, at most."""
        return self.slots + size(clip(self.runs, self.floor, self.logical_length))

    @property
    def evicted(self) -> int:
        """Tokens that were not pruned and have no slot in a full layer and head any more, at least."""
        return max(0, self.length - self.resident)  # slots may be holes

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
        return length if self.form.reaches(self.sealed_at, self.logical_length, length) and self._covered(length) else 0

    def _covered(self, length: int) -> bool:
        return all(holding.covers(length) for holding in self.filled)

    def same_edits(self, other: KVState, length: int) -> bool:
        """Have the two seen the same prunes up to logical `length`?"""
        return normal_edits(self.edits, length + 1) == normal_edits(other.edits, length + 1)

    def digest(self, salt: str, token_ids: Sequence[int]) -> bytes:
        """What the slots hold, as 32 bytes: tenant, kept positions, edits and the ids they were computed from."""
        running = hashlib.blake2b(digest_size=32, key=hashlib.blake2b(salt.encode(), digest_size=32).digest())
        held = self.runs, [(edit.at, edit.removed) for edit in self.edits], self.floor, self.sealed_at
        running.update(repr(held).encode())
        running.update(array("q", token_ids[: self.logical_length]).tobytes())
        return running.digest()

    def fork(self) -> KVState:
        """Another holder of the same slots."""
        self._live()
        child = KVState(self.pools, self.form)
        child.floor, child.sealed_at, child.slots = self.floor, self.sealed_at, self.slots
        child.owned = self.owned = not self.form.mutable
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
            self.floor = self.sealed_at = self.slots = 0

    def append(self, count: int) -> Change:
        """Make room for the next `count` tokens, behind the last one in every group; windows are trimmed first.

        Raises ArenaFull before anything else changes.
        """
        self._live()
        returned = self.trim() if self.pools.windowed else NOTHING
        if self.owned and all(holding.room() >= count for holding in self.filled):
            change = Change((), NOTHING - returned if returned else NOTHING)
            for holding in self.filled:
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
        self.take_back(length)

    def take_back(self, length: int) -> None:
        """`cut` where what comes after `length` has left no trace in what is before it."""
        for holding in self.holdings:
            holding.cut(length)
        if not length:
            self.floor = self.sealed_at = self.slots = 0
        self.runs = clip(self.runs, 0, length)
        self.length, self.logical_length = size(self.runs), length
        self.edits = normal_edits(self.edits, length + 1)

    def hollow(self, later: KVState) -> None:
        """Let go of everything that `recut` can take from `later`."""
        for mine, given in zip(self.holdings, self.given(later), strict=True):
            if given:
                mine.release()

    def given(self, later: KVState) -> list[bool]:
        """By group: are this state's slots a cut of the later one's?"""
        length = self.logical_length
        cut = self.form is later.form and self.form.reaches(later.sealed_at, later.logical_length, length)
        return [cut and theirs.covers(length) for theirs in later.holdings]

    def recut(self, later: KVState) -> bool:
        """Hold what `later` holds up to this length: a state of the same history that went on, and may have been pruned.

        Groups whose windows it has let go of keep their own slots; False where those have not seen the same prunes.
        """
        self._live()
        length = self.logical_length
        edits = normal_edits(later.edits, length + 1)
        covered = self.given(later)
        if later.logical_length < length or (edits != self.edits and not all(covered)):
            return False
        for index, theirs in enumerate(later.holdings):
            if covered[index]:
                cut = theirs.fork()
                cut.cut(length)
                self.holdings[index].release()
                self.holdings = (*self.holdings[:index], cut, *self.holdings[index + 1 :])
        if all(covered):
            self.floor, self.sealed_at, self.slots = later.floor, later.sealed_at, later.slots
            self.owned = later.owned = not self.form.mutable
        self.runs = clip(later.runs, 0, length)
        self.length, self.edits = size(self.runs), edits
        return True

    def kept(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The tokens among these that no prune has removed."""
        return [part for start, end in merged(intervals) for part in clip(self.runs, start, end)]

    def page_floor(self, position: int) -> int:
        """Lowest logical position of a token in a page with the token at `position` (which is kept), in any group."""
        floor = position
        for holding in self.filled:
            for slot, _ in holding.slots_of([(position, position + 1)]):
                floor = min(floor, holding.position(slot - slot % holding.pool.page_size))
        return floor

    def copy_units(self, intervals: Iterable[Interval]) -> Units:
        """Least `spare` that `remove` needs: pages held alone are used again as they are read, shared ones are not."""
        intervals = list(intervals)
        again = self._rewrites(intervals)
        return Units.of(
            len(holding.units) * (again and holding.pool.group not in self.form.stays)
            if holding.pool.sealed
            else holding.copy_units(intervals)
            for holding in self.holdings
        )

    def left_by(self, intervals: Iterable[Interval]) -> list[tuple[list[Slice], int]]:
        """By group: what `remove` would go on holding of the present slices, and how many fresh units it would fill."""
        intervals = list(intervals)
        again = self._rewrites(intervals)
        return [
            ([], len(holding.units))
            if again and holding.pool.sealed and holding.pool.group not in self.form.stays
            else holding.left_by(intervals)
            for holding in self.holdings
        ]

    def _rewrites(self, removed: Iterable[Interval]) -> bool:
        """Has the sealed part seen some of these?"""
        return any(holding.units for holding in self.sealed) and any(start < self.floor for start, _ in removed)

    def remove(self, intervals: Iterable[Interval], spare: Units) -> Change:
        """Compaction: the slots of these logical tokens go, later ones move down; pages before the first stay as they are.

        Later pages are gathered into fresh ones. `spare`: how many units more than before may be in use at any moment. When
        they are used up, pages that were read completely are let go and may be taken again (what others hold of them stays),
        so the moves must be carried out in order before anything else runs on the device. It must be `copy_units(intervals)`
        at least; ArenaFull otherwise, and then the state may only be released. Not much more than that is used: a prune is
        there to lower the peak, not to raise it by a copy of everything behind the hole. Several groups take no more than that
        at all: what is spare of one is spare of the other only once. A sealed part that has seen these tokens is written anew
        without them.
        """
        self._live()
        removed = merged(clip(intervals, 0, self.logical_length))
        if len(self.form.groups) > 1:
            spare = spare.least(self.copy_units(removed))
        edits = normal_edits((*self.edits, Edit(self.logical_length + 1, tuple(removed))), self.logical_length + 1)
        work = self._work(None, None, tuple(removed)) if self._rewrites(removed) else None
        shifts = [
            Shift(holding.next_page) if holding.pool.sealed else holding.remove(removed, units)
            for holding, units in zip(self.holdings, self._all(spare), strict=True)
        ]
        change = Change.of(shifts)
        if work is not None:
            counts = [len(units) for units in work.old]
            stays = [count * (group in self.form.stays) for group, count in zip(self.form.sealed, counts, strict=True)]
            change.new_units -= self._refill(work, counts, stays)
            change.first_pages = tuple(
                0 if holding.pool.sealed else first for holding, first in zip(self.holdings, change.first_pages, strict=True)
            )
            change.moves.append(work)  # as it was decided: its new units may lie where the tail's old ones did
        if self.form.paged:
            change.moves.append(self._pages_from(change))
        self.runs = subtract(self.runs, removed)
        self.length = size(self.runs)
        self.edits = edits
        return change

    def seal(self, held: Held, seal: Seal, row: int | None) -> Change:
        """Replace the sealed part by one of the tokens before `seal.floor`, and let go of whole pages of the tail before it.

        Raises ArenaFull before anything changes. The new units are written by the change's work, which must be carried out
        before anything else touches the device's memory.
        """
        self._live()
        if not self.form.holes:
            slots = min(seal.slots, self.slots + size(clip(self.runs, self.floor, seal.floor)))  # pruned tokens leave none
            seal = replace(seal, slots=slots) if slots else Seal(seal.floor, 0, (0,) * len(seal.units))
        keeps = seal.keeps or (0,) * len(seal.units)
        fresh = self._by_sealed(units - keep for units, keep in zip(seal.units, keeps, strict=True))
        if not self.pools.at_hand(fresh):
            raise ArenaFull(f"{fresh.counts} units wanted for a seal, {self.pools.free.counts} free")
        work = self._work(seal, row, (), held)
        returned = self._refill(work, seal.units, keeps)
        firsts = [holding.next_page for holding in self.holdings]
        for group, keep in zip(self.form.sealed, keeps, strict=True):
            firsts[group] = keep
        left = [0] * len(self.holdings)
        for holding in self.filled:
            left[holding.pool.group] = holding.let_go(self._slot_of(holding, seal.floor))
        self.floor, self.sealed_at, self.slots = seal.floor, self.logical_length, seal.slots
        return Change(tuple(firsts), NOTHING - returned - Units(tuple(left)), [work])

    def held(self, prompt_end: bool) -> Held:
        """Its lengths, for the form's functions."""
        tail = size(clip(self.runs, self.floor, self.logical_length))
        return Held(self.logical_length, self.floor, tail, self.slots, prompt_end)

    def reaches(self, count: int) -> tuple[Reach | None, ...]:
        """Of the newest `count` tokens, where they enter each group and what they see of it; None: all before them."""
        position = self.logical_length - count
        out: list[Reach | None] = []
        for holding in self.holdings:
            entered = holding.length - count
            if holding.pool.sealed or holding.pool.group not in self.form.groups:
                out.append(None)
            elif holding.pool.window is not None:
                out.append(Reach(entered, holding.first_visible(position, count)))
            elif self.form.seals:
                out.append(Reach(entered, (self._slot_of(holding, self.floor),) * count))
            else:
                out.append(None)
        return tuple(out)

    def shrink_sealed(self, slots: int) -> None:
        """The device says that a prune left so few slots: whole pages that are empty now are given back."""
        if slots < self.slots and self.form.shrinks:
            self.slots = slots
            for holding in self.sealed:
                if not (holding.pool.whole and slots):
                    pages = holding.pool.pages(slots)
                    holding.keep(pages * holding.pool.page_size)

    def _work(self, seal: Seal | None, row: int | None, removed: tuple[Interval, ...], held: Held | None = None) -> SealWork:
        """What the device must know; `new` is filled in by `_refill`."""
        tails = []
        for holding in self.filled:
            first = self._slot_of(holding, self.floor)
            skipped = first // holding.pool.page_size - holding.first_page
            tails.append(TailPages(holding.pool.group, first, holding.length, holding.units[skipped:]))
        runs = tuple(clip(self.runs, self.floor, self.logical_length))
        old = tuple(list(holding.units) for holding in self.sealed)
        form = self.pools.forms.index(self.form)
        return SealWork(form, row, held or self.held(False), seal, runs, tuple(tails), old, (), removed)

    def _refill(self, work: SealWork, units: Iterable[int], keeps: Iterable[int]) -> Units:
        """New units of the sealed part in place of the old ones; what returned beyond what was taken."""
        pairs = list(zip(self.sealed, units, keeps, strict=True))
        net = [holding.refill(count, keep) - (count - keep) for holding, count, keep in pairs]
        work.new = tuple(list(holding.units) for holding in self.sealed)
        return self._by_sealed(net)

    def _pages_from(self, change: Change) -> PageWork:
        """Full pages from the first that was changed on."""
        units = []
        first = min((change.first_pages[group] for group in self.form.groups), default=0)
        for holding in self.filled:
            full = holding.length // holding.pool.page_size
            units.append(holding.units[max(0, first - holding.first_page) : full - holding.first_page])
        return PageWork(self.pools.forms.index(self.form), tuple(units))

    def _slot_of(self, holding: Holding, position: int) -> int:
        """Slot of the first held token from a logical position on."""
        return holding.start + size(clip(holding.runs, 0, position))

    def _by_sealed(self, counts: Iterable[int]) -> Units:
        by_group = dict(zip(self.form.sealed, counts, strict=True))
        return Units.of(by_group.get(group, 0) for group in range(len(self.holdings)))

    def _all(self, units: Units) -> tuple[int, ...]:
        return (*units.counts, *[0] * (len(self.holdings) - len(units.counts)))

    def _grow(self, count: int, returned: Units) -> Change:
        """`append` where a group needs pages, or must own what it rewrites. returned: units that its windows have let go of."""
        shared = [] if self.owned else [self.holdings[group] for group in sorted(self.form.mutable)]
        copies = {holding.pool.group: holding.shared_units() for holding in shared}
        plans = {holding.pool.group: holding.plan(count) for holding in self.filled}
        for group in copies.keys() & plans.keys():
            holding = self.holdings[group]
            plans[group] = Growth(holding.next_page, holding.pool.pages(holding.length + count) - holding.next_page, False)
        needed = Units.of(
            copies.get(group, 0) + (plans[group].pages if group in plans else 0) for group in range(len(self.holdings))
        )
        if not self.pools.at_hand(needed):
            raise ArenaFull(f"{needed.counts} pages wanted, {self.pools.free.counts} free")
        moves = [move for holding in shared for move in holding.own()]
        self.owned = True
        firsts = tuple(
            holding.first_page if copies.get(group) else plans[group].first_page if group in plans else holding.next_page
            for group, holding in enumerate(self.holdings)
        )
        change = Change(firsts, needed - returned, moves)
        for group, plan in plans.items():
            change.moves += self.holdings[group].grow(count, self.logical_length, plan)
        return change

    def _live(self) -> None:
        if self.closed:
            raise ValueError("this KV state was released")
