"""The arena: one byte range, handed out as units of a few size classes.

A **slab** is a run of units of one class; it belongs to that class until its last unit is free, then its bytes return to
the arena, unless they are claimed. Units never split or merge. Host side only: it hands out offsets and never touches memory.

A **claim** is a number of free units set aside for a class: they lie on slabs of the class, so no other class can take them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class _Slab:
    base: int  # granules
    count: int  # units
    free: int  # bit i set: unit i is free
    free_count: int


@dataclass(slots=True)
class _Shelf:
    """The slabs of one class. levels[n]: those with n free units, n = 0 the full ones."""

    cls: UnitClass
    levels: list[dict[int, _Slab]]
    bases: list[int] = field(default_factory=list)  # sorted
    slabs: dict[int, _Slab] = field(default_factory=dict)
    empty: dict[int, _Slab] = field(default_factory=dict)  # those with free units only
    free_units: int = 0
    used: int = 0
    claimed: int = 0


class Arena:
    """Host allocator over `num_granules` granules. A unit is its int offset in granules.

    slab_units: units of a full-sized slab (the last slab of a free range may be smaller). sticky: slabs that run empty stay
    with their class until the next `claim`, so that it finds what was just freed (a step frees pages that it will want back).
    """

    def __init__(self, num_granules: int, *, slab_units: int = 64) -> None:
        self.num_granules = num_granules
        self.slab_units = slab_units
        self.used_granules = 0
        self.peak_granules = 0
        self.sticky = False
        self._ranges: list[tuple[int, int]] = [(0, num_granules)] if num_granules else []  # free, sorted, never touching
        self._shelves: dict[UnitClass, _Shelf] = {}

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
        shelf = self._shelves.get(cls)
        return (shelf.free_units if shelf else 0) + sum((end - start) // cls.granules for start, end in self._ranges)

    def can_allocate(self, cls: UnitClass, count: int) -> bool:
        """Would `allocate` succeed?"""
        return self.available(cls) >= count

    def fits(self, counts: Iterable[tuple[UnitClass, int]], *, empty: bool = False) -> bool:
        """Could so many units of each of these classes be handed out together? empty: by an arena with nothing in it."""
        ranges = [(0, self.num_granules)] if empty else list(self._ranges)
        for cls, count in counts:
            shelf = None if empty else self._shelves.get(cls)
            short = count - (shelf.free_units if shelf else 0)
            while short > 0:
                carved = self._carve(ranges, cls.granules)
                if carved is None:
                    return False
                short -= carved[1]
        return True

    def claim(self, counts: Iterable[tuple[UnitClass, int]]) -> bool:
        """Set aside so many free units of each of these classes, in place of what they had claimed before.

        False if they cannot be had together; then the claims are what they were.
        """
        wanted = [(self._shelf(cls), count) for cls, count in counts]
        before = [shelf.claimed for shelf, _ in wanted]
        for shelf, count in wanted:
            shelf.claimed = max(shelf.claimed, count)
        self._drop_empty()
        fits = self.fits((shelf.cls, count) for shelf, count in wanted)
        for (shelf, count), old in zip(wanted, before, strict=True):
            shelf.claimed = count if fits else old
            while shelf.free_units < shelf.claimed:
                self._new_slab(shelf)
        self._drop_empty()
        return fits

    def claimed(self, cls: UnitClass) -> int:
        """Free units that are set aside for the class."""
        shelf = self._shelves.get(cls)
        return shelf.claimed if shelf else 0

    def allocate(self, cls: UnitClass, count: int) -> list[int]:
        """`count` units, from the fullest slabs first, ascending inside a slab. Raises ArenaFull and takes none if short."""
        if not self.can_allocate(cls, count):
            raise ArenaFull(f"{count} units of {cls.name!r} wanted, {self.available(cls)} free")
        shelf = self._shelf(cls)
        units: list[int] = []
        while len(units) < count:
            slab = next((next(iter(level.values())) for level in shelf.levels[1:] if level), None) or self._new_slab(shelf)
            units.extend(self._take(shelf, slab, count - len(units)))
        shelf.used += count
        self.used_granules += count * cls.granules
        self.peak_granules = max(self.peak_granules, self.used_granules)
        return units

    def free(self, cls: UnitClass, units: Iterable[int]) -> None:
        """Give units back. Raises ArenaError for a unit that is not handed out in this class."""
        shelf = self._shelf(cls)
        for unit in units:
            slab = self._slab_of(shelf, unit)
            bit = 1 << ((unit - slab.base) // cls.granules)
            if slab.free & bit:
                raise ArenaError(f"unit {unit} of {cls.name!r} freed twice")
            del shelf.levels[slab.free_count][slab.base]
            slab.free |= bit
            slab.free_count += 1
            shelf.free_units += 1
            shelf.used -= 1
            self.used_granules -= cls.granules
            shelf.levels[slab.free_count][slab.base] = slab
            if slab.free_count == slab.count:
                shelf.empty[slab.base] = slab
                if not self.sticky and shelf.free_units - slab.count >= shelf.claimed:
                    self._drop_slab(shelf, slab)

    def used(self, cls: UnitClass) -> int:
        """How many units of the class are handed out."""
        shelf = self._shelves.get(cls)
        return shelf.used if shelf else 0

    def used_units(self, cls: UnitClass) -> Iterator[int]:
        """Every unit of the class that is handed out."""
        shelf = self._shelf(cls)
        for slab in shelf.slabs.values():
            yield from (slab.base + i * cls.granules for i in range(slab.count) if not slab.free >> i & 1)

    def check(self) -> None:
        """Free ranges and slabs partition the arena, every count is right. Raises ArenaError."""
        spans = [(start, end) for start, end in self._ranges]
        used = 0
        for cls, shelf in self._shelves.items():
            if sorted(shelf.slabs) != shelf.bases:
                raise ArenaError(f"slab index of {cls.name!r} is out of step")
            for slab in shelf.slabs.values():
                spans.append((slab.base, slab.base + slab.count * cls.granules))
                if slab.free.bit_count() != slab.free_count or shelf.levels[slab.free_count].get(slab.base) is not slab:
                    raise ArenaError(f"slab at {slab.base} of {cls.name!r} miscounts its free units")
                if (slab.free_count == slab.count) is not (slab.base in shelf.empty):
                    raise ArenaError(f"slab at {slab.base} of {cls.name!r} is not where empty slabs are")
                used += (slab.count - slab.free_count) * cls.granules
            free, units = (sum(getattr(slab, name) for slab in shelf.slabs.values()) for name in ("free_count", "count"))
            if (free, units - free) != (shelf.free_units, shelf.used):
                raise ArenaError(f"class {cls.name!r} miscounts its free units")
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

    def _shelf(self, cls: UnitClass) -> _Shelf:
        if cls not in self._shelves:
            self._shelves[cls] = _Shelf(cls, [{} for _ in range(self.slab_units + 1)])
        return self._shelves[cls]

    def _slab_of(self, shelf: _Shelf, unit: int) -> _Slab:
        index = bisect_left(shelf.bases, unit + 1) - 1
        slab = shelf.slabs[shelf.bases[index]] if index >= 0 else None
        if slab is None or unit >= slab.base + slab.count * shelf.cls.granules or (unit - slab.base) % shelf.cls.granules:
            raise ArenaError(f"{unit} is no unit of {shelf.cls.name!r}")
        return slab

    def _take(self, shelf: _Shelf, slab: _Slab, limit: int) -> list[int]:
        count = min(limit, slab.free_count)
        del shelf.levels[slab.free_count][slab.base]
        shelf.empty.pop(slab.base, None)
        units = []
        for _ in range(count):
            lowest = slab.free & -slab.free
            slab.free ^= lowest
            units.append(slab.base + (lowest.bit_length() - 1) * shelf.cls.granules)
        slab.free_count -= count
        shelf.free_units -= count
        shelf.levels[slab.free_count][slab.base] = slab
        return units

    def _carve(self, ranges: list[tuple[int, int]], granules: int) -> tuple[int, int] | None:
        """Take a slab's (base, units) out of these free ranges; None if no unit fits."""
        index = next((i for i, (start, end) in enumerate(ranges) if end - start >= granules), None)
        if index is None:
            return None
        start, end = ranges[index]
        count = min(self.slab_units, (end - start) // granules)
        rest = start + count * granules
        ranges[index : index + 1] = [(rest, end)] if rest < end else []
        return start, count

    def _new_slab(self, shelf: _Shelf) -> _Slab:
        carved = self._carve(self._ranges, shelf.cls.granules)
        assert carved is not None, "the caller has seen that it fits"
        start, count = carved
        slab = _Slab(start, count, (1 << count) - 1, count)
        shelf.slabs[start] = shelf.empty[start] = slab
        insort(shelf.bases, start)
        shelf.levels[count][start] = slab
        shelf.free_units += count
        return slab

    def _drop_empty(self) -> None:
        """Give empty slabs back to the arena, as far as claims allow."""
        self.sticky = False
        for shelf in self._shelves.values():
            for slab in list(shelf.empty.values()):
                if shelf.free_units - slab.count >= shelf.claimed:
                    self._drop_slab(shelf, slab)

    def _drop_slab(self, shelf: _Shelf, slab: _Slab) -> None:
        del shelf.slabs[slab.base], shelf.empty[slab.base], shelf.levels[slab.count][slab.base]
        shelf.bases.remove(slab.base)
        shelf.free_units -= slab.count
        start, end = slab.base, slab.base + slab.count * shelf.cls.granules
        index = bisect_left(self._ranges, (start, end))
        if index < len(self._ranges) and self._ranges[index][0] == end:
            end = self._ranges.pop(index)[1]
        if index and self._ranges[index - 1][1] == start:
            index -= 1
            start = self._ranges.pop(index)[0]
        self._ranges.insert(index, (start, end))
