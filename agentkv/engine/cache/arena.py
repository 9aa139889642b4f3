"""The arena: one byte range, handed out as units of a few size classes.

A **slab** is a run of units of one class; it belongs to that class until its last unit is free, then its bytes return to
the arena, unless they are claimed. Units never split or merge. Host side only: it hands out offsets and never touches memory.

A **claim** is a number of free units set aside for a class: they lie on slabs of the class, so no other class can take them.
Where free bytes lie badly for it, units move (`cache/compaction.py`), so that every free byte can be had by every class. The
arena is told who copies the bytes (`mover`) and who must know (`followers`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agentkv.engine.core import GRANULE


class ArenaFull(Exception):
    """Fewer units are free than were asked for; nothing was taken. Callers reserve first, so this is a bug of theirs."""


class ArenaError(AssertionError):
    """A unit was freed twice, freed in the wrong class, or the accounts do not add up."""


@dataclass(frozen=True, slots=True)
class UnitClass:
    """A size of unit: `unit_bytes` is a multiple of the granule."""

    name: str
    unit_bytes: int

    def __post_init__(self) -> None:
        if self.unit_bytes <= 0 or self.unit_bytes % GRANULE:
            raise ValueError(f"unit class {self.name!r}: {self.unit_bytes} bytes is not a positive multiple of {GRANULE}")

    @property
    def granules(self) -> int:
        """The same in granules."""
        return self.unit_bytes // GRANULE


class UnitMoves(NamedTuple):
    """Units of one class to copy whole, source[i] to target[i], in order.

    Sources ascend and no target overlaps a source that comes later, so any run of consecutive moves may be read before it is
    written.
    """

    cls: UnitClass
    source: list[int]
    target: list[int]


@dataclass(slots=True, eq=False)
class Slab:
    """A run of `count` units from granule `base` on. free: bit i set, unit i is free."""

    cls: UnitClass
    base: int
    count: int
    free: int
    free_count: int

    @property
    def end(self) -> int:
        """Granule behind the last unit."""
        return self.base + self.count * self.cls.granules

    @property
    def live(self) -> int:
        """Units that are handed out."""
        return self.count - self.free_count

    def units(self) -> list[int]:
        """Those units, ascending."""
        return [self.base + i * self.cls.granules for i in range(self.count) if not self.free >> i & 1]


@dataclass(slots=True)
class Shelf:
    """The slabs of one class. levels[n]: those with n free units, n = 0 the full ones. empty: those with free units only.
    used: units handed out. claimed: free units set aside."""

    levels: defaultdict[int, dict[int, Slab]] = field(default_factory=lambda: defaultdict(dict))
    bases: list[int] = field(default_factory=list)  # sorted
    slabs: dict[int, Slab] = field(default_factory=dict)
    empty: dict[int, Slab] = field(default_factory=dict)
    free_units: int = 0
    used: int = 0
    claimed: int = 0

    def fullest(self) -> Slab | None:
        """The slab with the fewest free units, among those that have one."""
        level = min((free for free, slabs in self.levels.items() if free and slabs), default=0)
        return next(iter(self.levels[level].values())) if level else None


class Arena:
    """Host allocator over `num_granules` granules. A unit is its int offset in granules.

    slab_units: units of a full-sized slab. A slab may be smaller at the end of a free range, and is larger where the largest
    unit seen so far would not fit in it. sticky: slabs that run empty stay with their class until the next `claim`, so that it
    finds what was just freed (a step frees pages that it will want back).
    """

    def __init__(self, num_granules: int, *, slab_units: int = 64) -> None:
        self.num_granules = num_granules
        self.slab_units = slab_units
        self.used_granules = 0
        self.peak_granules = 0
        self.sticky = False
        self.moved_bytes = 0
        self.compactions = 0
        """How often units were moved: who keeps a copy of unit numbers compares it."""
        self.mover: Callable[[list[UnitMoves]], None] | None = None
        """Carries moves out on the device, at once and in order."""
        self.ranges: list[tuple[int, int]] = [(0, num_granules)] if num_granules else []
        """Free granules that no slab has: sorted, never touching."""
        self.shelves: dict[UnitClass, Shelf] = {}
        self.followers: dict[UnitClass, Callable[[dict[int, int]], None]] = {}
        """Who is told {old unit: new unit} whenever units of the class have new places."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all units that are handed out."""
        return self.used_granules * GRANULE

    @property
    def free_bytes(self) -> int:
        """Bytes that no unit takes."""
        return (self.num_granules - self.used_granules) * GRANULE

    @property
    def peak_bytes(self) -> int:
        """Most bytes handed out at once since `reset_peak`."""
        return self.peak_granules * GRANULE

    def reset_peak(self) -> None:
        """Start measuring the peak from the bytes handed out now."""
        self.peak_granules = self.used_granules

    def available(self, cls: UnitClass) -> int:
        """Units of the class that `allocate` could hand out now."""
        return self.shelf(cls).free_units + sum((end - start) // cls.granules for start, end in self.ranges)

    def attainable(self, cls: UnitClass) -> int:
        """The same after moves: all free bytes count, whichever class has them now."""
        return (self.num_granules - self.used_granules) // cls.granules

    def can_hold(self, counts: Iterable[tuple[UnitClass, int]], *, empty: bool = False) -> bool:
        """Are there free bytes for so many units of each of these classes? empty: if nothing were handed out."""
        taken = 0 if empty else self.used_granules
        return sum(cls.granules * count for cls, count in counts) <= self.num_granules - taken

    def fragmented_bytes(self, cls: UnitClass) -> int:
        """Bytes that are free and not claimed by others, but that the class cannot have without a move."""
        claimed = sum(shelf.claimed * other.granules for other, shelf in self.shelves.items() if other is not cls)
        free = self.num_granules - self.used_granules - claimed
        return max(0, free // cls.granules - self.available(cls)) * cls.unit_bytes

    def can_allocate(self, cls: UnitClass, count: int) -> bool:
        """Would `allocate` succeed?"""
        return self.available(cls) >= count

    def fits(self, counts: Iterable[tuple[UnitClass, int]], *, exact: bool = False) -> bool:
        """Could so many units of each of these classes be handed out together as things lie? exact: in slabs that are no
        larger than needed."""
        ranges = list(self.ranges)
        for cls, count in counts:
            short = count - self.shelf(cls).free_units
            while short > 0:
                carved = self._carve(ranges, cls, short if exact else None)
                if carved is None:
                    return False
                short -= carved[1]
        return True

    def claim(self, counts: Iterable[tuple[UnitClass, int]]) -> bool:
        """Set aside so many free units of each of these classes, in place of what they had claimed before; units move if that
        is needed. False if there are too few free bytes; then the claims are what they were. Raises what the mover raises."""
        from agentkv.engine.cache.compaction import make_room

        wanted = list(({cls: shelf.claimed for cls, shelf in self.shelves.items()} | dict(counts)).items())
        if not self.can_hold(wanted):
            return False
        for cls, count in wanted:
            self.shelf(cls).claimed = count
        self.drop_empty()
        exact = not self.fits(wanted)
        if exact:
            make_room(self, wanted)
        for cls, count in wanted:
            shelf = self.shelf(cls)
            while shelf.free_units < count:
                self._new_slab(cls, count - shelf.free_units if exact else None)
        self.drop_empty()
        return True

    def claimed(self, cls: UnitClass) -> int:
        """Free units that are set aside for the class."""
        return self.shelf(cls).claimed

    def used(self, cls: UnitClass) -> int:
        """How many units of the class are handed out."""
        return self.shelf(cls).used

    def allocate(self, cls: UnitClass, count: int) -> list[int]:
        """`count` units, from the fullest slabs first, ascending inside a slab. Raises ArenaFull and takes none if short."""
        if not self.can_allocate(cls, count):
            raise ArenaFull(f"{count} units of {cls.name!r} wanted, {self.available(cls)} free")
        units = self.take(cls, count)
        while len(units) < count:
            self._new_slab(cls)
            units += self.take(cls, count - len(units))
        self.peak_granules = max(self.peak_granules, self.used_granules)
        return units

    def free(self, cls: UnitClass, units: Iterable[int]) -> None:
        """Give units back. Raises ArenaError for a unit that is not handed out in this class."""
        slab, base, end, gone, granules = None, 0, 0, 0, cls.granules
        for unit in units:
            if not base <= unit < end:
                if slab is not None:
                    self._give_back(slab, gone)
                slab = self._slab_of(cls, unit)
                base, end, gone = slab.base, slab.end, 0
            number, rest = divmod(unit - base, granules)
            if rest:
                raise ArenaError(f"{unit} is no unit of {cls.name!r}")
            if slab is not None and (slab.free | gone) >> number & 1:
                raise ArenaError(f"unit {unit} of {cls.name!r} freed twice")
            gone |= 1 << number
        if slab is not None:
            self._give_back(slab, gone)

    def used_units(self, cls: UnitClass) -> Iterator[int]:
        """Every unit of the class that is handed out."""
        for slab in self.shelf(cls).slabs.values():
            yield from slab.units()

    def check(self) -> None:
        """Free ranges and slabs partition the arena, every count is right. Raises ArenaError."""
        spans = list(self.ranges)
        used = 0
        for cls, shelf in self.shelves.items():
            if sorted(shelf.slabs) != shelf.bases:
                raise ArenaError(f"slab index of {cls.name!r} is out of step")
            for slab in shelf.slabs.values():
                spans.append((slab.base, slab.end))
                if slab.free.bit_count() != slab.free_count or shelf.levels[slab.free_count].get(slab.base) is not slab:
                    raise ArenaError(f"slab at {slab.base} of {cls.name!r} miscounts its free units")
                if (not slab.live) is not (slab.base in shelf.empty):
                    raise ArenaError(f"slab at {slab.base} of {cls.name!r} is not where empty slabs are")
                used += slab.live * cls.granules
            free, live = (sum(getattr(slab, name) for slab in shelf.slabs.values()) for name in ("free_count", "live"))
            if (free, live) != (shelf.free_units, shelf.used):
                raise ArenaError(f"class {cls.name!r} miscounts its units")
            if shelf.free_units < shelf.claimed:
                raise ArenaError(f"class {cls.name!r} has {shelf.free_units} free units for claims of {shelf.claimed}")
        if used != self.used_granules:
            raise ArenaError(f"{self.used_granules} granules in the account, {used} in slabs")
        position = 0
        for start, end in sorted(spans):
            if start != position:
                raise ArenaError(f"granules {position} to {start} are lost or double")
            position = end
        if position != self.num_granules:
            raise ArenaError(f"granules {position} to {self.num_granules} are lost")

    # -- slabs, for compaction

    def shelf(self, cls: UnitClass) -> Shelf:
        """The slabs of a class."""
        return self.shelves.setdefault(cls, Shelf())

    def take(self, cls: UnitClass, most: int) -> list[int]:
        """Up to `most` free units of the class's slabs, from the fullest on; no slab is made."""
        shelf, units = self.shelf(cls), list[int]()
        while len(units) < most and (slab := shelf.fullest()) is not None:
            count = min(most - len(units), slab.free_count)
            del shelf.levels[slab.free_count][slab.base]
            shelf.empty.pop(slab.base, None)
            for _ in range(count):
                lowest = slab.free & -slab.free
                slab.free ^= lowest
                units.append(slab.base + (lowest.bit_length() - 1) * cls.granules)
            slab.free_count -= count
            shelf.free_units -= count
            shelf.levels[slab.free_count][slab.base] = slab
        shelf.used += len(units)
        self.used_granules += len(units) * cls.granules
        return units

    def lift(self, slab: Slab) -> None:
        """Remove a slab, with the units that it has handed out; its bytes are a free range."""
        shelf = self.shelf(slab.cls)
        del shelf.slabs[slab.base], shelf.levels[slab.free_count][slab.base]
        del shelf.bases[bisect_left(shelf.bases, slab.base)]
        shelf.empty.pop(slab.base, None)
        shelf.free_units -= slab.free_count
        shelf.used -= slab.live
        self.used_granules -= slab.live * slab.cls.granules
        start, end = slab.base, slab.end
        index = bisect_left(self.ranges, (start, end))
        if index < len(self.ranges) and self.ranges[index][0] == end:
            end = self.ranges.pop(index)[1]
        if index and self.ranges[index - 1][1] == start:
            index -= 1
            start = self.ranges.pop(index)[0]
        self.ranges.insert(index, (start, end))

    def lay(self, cls: UnitClass, base: int, count: int) -> Slab:
        """A slab of free units at granule `base`; all of it must lie in one free range."""
        shelf, end = self.shelf(cls), base + count * cls.granules
        index = bisect_left(self.ranges, (base + 1,)) - 1
        low, high = self.ranges[index]
        self.ranges[index : index + 1] = [(a, b) for a, b in ((low, base), (end, high)) if a < b]
        slab = Slab(cls, base, count, (1 << count) - 1, count)
        shelf.slabs[base] = shelf.empty[base] = shelf.levels[count][base] = slab
        insort(shelf.bases, base)
        shelf.free_units += count
        return slab

    def drop_empty(self) -> None:
        """Give empty slabs back to the arena, as far as claims allow."""
        self.sticky = False
        for shelf in self.shelves.values():
            for slab in list(shelf.empty.values()):
                if shelf.free_units - slab.count >= shelf.claimed:
                    self.lift(slab)

    def _carve(self, ranges: list[tuple[int, int]], cls: UnitClass, most: int | None) -> tuple[int, int] | None:
        """Take a slab's (base, units) out of these free ranges, at most `most` units; None if no unit fits."""
        index = next((i for i, (start, end) in enumerate(ranges) if end - start >= cls.granules), None)
        if index is None:
            return None
        start, end = ranges[index]
        largest = max(each.granules for each in self.shelves)
        full = max(self.slab_units, -(-largest // cls.granules))
        count = min(full if most is None else most, (end - start) // cls.granules)
        rest = start + count * cls.granules
        ranges[index : index + 1] = [(rest, end)] if rest < end else []
        return start, count

    def _new_slab(self, cls: UnitClass, most: int | None = None) -> None:
        carved = self._carve(list(self.ranges), cls, most)
        assert carved is not None, "the caller has seen that it fits"
        self.lay(cls, *carved)

    def _give_back(self, slab: Slab, gone: int) -> None:
        """Units of the slab are free again: bit i set, unit i."""
        shelf, count = self.shelf(slab.cls), gone.bit_count()
        del shelf.levels[slab.free_count][slab.base]
        slab.free |= gone
        slab.free_count += count
        shelf.free_units += count
        shelf.used -= count
        shelf.levels[slab.free_count][slab.base] = slab
        self.used_granules -= count * slab.cls.granules
        if not slab.live:
            shelf.empty[slab.base] = slab
            if not self.sticky and shelf.free_units - slab.count >= shelf.claimed:
                self.lift(slab)

    def _slab_of(self, cls: UnitClass, unit: int) -> Slab:
        shelf = self.shelf(cls)
        index = bisect_left(shelf.bases, unit + 1) - 1
        slab = shelf.slabs[shelf.bases[index]] if index >= 0 else None
        if slab is None or unit >= slab.end or (unit - slab.base) % cls.granules:
            raise ArenaError(f"{unit} is no unit of {cls.name!r}")
        return slab
