"""Extents: immutable runs of units, counted by who holds which slots of them.

A **slot** of an extent is counted from its first unit: unit `slot // page_size`, offset `slot % page_size`. A **slice**
is slots `[start, stop)` of an extent; it holds every unit it touches. Units return to the arena when no slice touches
them any more, also one by one. Who may write is a question of slices too: slots past every other holder's end are free
to write (the write lease), because nobody reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol
from weakref import WeakSet

from agentkv.engine.cache.arena import Arena, ArenaError, UnitClass
from agentkv.engine.core import WHOLE


class Extent:
    """A run of units made by one chunk or compaction.

    holders: how many slices there are of each [start, stop). cached: those among them that the radix cache holds.
    alive: bit i set while unit i is not freed.
    """

    __slots__ = ("alive", "cached", "holders", "units")

    def __init__(self, units: list[int]) -> None:
        self.units = tuple(units)
        self.holders: Counter[tuple[int, int]] = Counter()
        self.cached: Counter[tuple[int, int]] = Counter()
        self.alive = (1 << len(units)) - 1


class Slice(NamedTuple):
    """Slots [start, stop) of an extent."""

    extent: Extent
    start: int
    stop: int


class Table(Protocol):
    """Something that lists the units of its slices."""

    def follow(self) -> None:
        """Units have moved: read the numbers anew."""
        ...


class ExtentPool:
    """All extents of one KV group, which has a unit class to itself; a page of `page_size` slots is one unit.

    group: its index among the groups. window: tokens that a query sees, None for all; slack: how many more are kept. by_slot,
    sealed, mutable: see StateGroup. tables: whoever lists units of this pool beside its slices; `follow` is called when units
    have moved.
    """

    def __init__(
        self,
        arena: Arena,
        cls: UnitClass,
        page_size: int,
        *,
        group: int = 0,
        window: int | None = None,
        slack: int = 0,
        by_slot: bool = True,
        sealed: bool = False,
        mutable: bool = False,
    ) -> None:
        self.arena = arena
        self.cls = cls
        self.page_size = page_size
        self.group = group
        self.window = window
        self.slack = slack
        self.by_slot, self.sealed, self.mutable = by_slot, sealed, mutable
        self.total_units = arena.attainable(cls)
        self.extents: set[Extent] = set()
        self.tables: WeakSet[Table] = WeakSet()
        arena.followers[cls] = self._follow

    @property
    def free_units(self) -> int:
        """Units that nobody holds."""
        return self.arena.available(self.cls)

    @property
    def whole(self) -> bool:
        """Does a sequence have one page, whatever its length?"""
        return self.page_size >= WHOLE

    def pages(self, slots: int) -> int:
        """Pages that `slots` slots take."""
        return -(-slots // self.page_size)

    def make(self, units: int, stop: int) -> Slice:
        """A fresh extent of `units` units, held by the one slice [0, stop) that is returned. Raises ArenaFull."""
        extent = Extent(self.arena.allocate(self.cls, units))
        self.extents.add(extent)
        made = Slice(extent, 0, stop)
        self.retain([made])
        return made

    def retain(self, slices: Iterable[Slice], *, cached: bool = False) -> None:
        """Hold slices. cached: the radix cache does."""
        for extent, start, stop in slices:
            extent.holders[start, stop] += 1
            if cached:
                extent.cached[start, stop] += 1

    def release(self, slices: Iterable[Slice], *, cached: bool = False) -> int:
        """Drop holds; units that nobody touches any more return to the arena. How many did."""
        returned = 0
        for extent, start, stop in slices:
            if cached:
                _drop(extent.cached, (start, stop))
            if not _drop(extent.holders, (start, stop)):
                returned += self._free_unheld(extent)
        return returned

    def extend(self, tail: Slice, stop: int) -> Slice:
        """Hold more of the extent than `tail` does, up to `stop`, instead of it."""
        extent, start, end = tail
        extent.holders[start, stop] += 1
        _drop(extent.holders, (start, end))
        return Slice(extent, start, stop)

    def writable(self, tail: Slice) -> bool:
        """May the holder of `tail` write past its stop inside its last page? Not if another slice reads there."""
        page_end = self.pages(tail.stop) * self.page_size
        return not any(stop > tail.stop and start < page_end for start, stop in tail.extent.holders)

    def exclusive(self, held: Slice) -> int:
        """The units of the extent that the holder of this slice alone holds, as a mask."""
        once = twice = 0
        for (start, stop), count in held.extent.holders.items():
            mask = self._range_mask(start, stop)
            twice |= mask if count > 1 else once & mask
            once |= mask
        return once & ~twice & self._range_mask(held.start, held.stop)

    def only_cached(self, slices: Iterable[Slice]) -> bool:
        """Does a unit of these slices live by the radix cache alone?"""
        for extent, start, stop in slices:
            outside = self._mask(extent.holders - extent.cached)
            if self._range_mask(start, stop) & ~outside:
                return True
        return False

    def returned(self, released: Iterable[Slice], retained: Iterable[Slice] = ()) -> int:
        """Units that would really return if `retained` were held and then `released` let go."""
        change: dict[Extent, Counter[tuple[int, int]]] = {}
        for extent, start, stop in released:
            change.setdefault(extent, Counter())[start, stop] += 1
        kept: dict[Extent, Counter[tuple[int, int]]] = {}
        for extent, start, stop in retained:
            kept.setdefault(extent, Counter())[start, stop] += 1
        units = 0
        for extent, gone in change.items():
            after = (extent.holders + kept.get(extent, Counter())) - gone
            units += (extent.alive & ~self._mask(after)).bit_count()
        return units

    def units_of(self, slices: Iterable[Slice]) -> Iterator[int]:
        """Units that the slices touch, in order; a unit touched by two of them comes twice."""
        for extent, start, stop in slices:
            yield from extent.units[start // self.page_size : self.pages(stop)]

    def check(self, held: Iterable[Slice], cached: Iterable[Slice]) -> None:
        """Every extent's holders are exactly the given slices; live units and the class's used units are the same set."""
        holders: dict[Extent, Counter[tuple[int, int]]] = {}
        in_cache: dict[Extent, Counter[tuple[int, int]]] = {}
        for extent, start, stop in held:
            holders.setdefault(extent, Counter())[start, stop] += 1
        for extent, start, stop in cached:
            holders.setdefault(extent, Counter())[start, stop] += 1
            in_cache.setdefault(extent, Counter())[start, stop] += 1
        if set(holders) != self.extents:
            raise ArenaError(f"{len(self.extents)} extents are live, {len(holders)} are held")
        live: list[int] = []
        for extent in self.extents:
            if extent.holders != holders[extent] or extent.cached != in_cache.get(extent, Counter()):
                raise ArenaError(f"extent {extent.units}: counts {dict(extent.holders)}, holders {dict(holders[extent])}")
            if extent.alive != self._mask(extent.holders):
                raise ArenaError(f"extent {extent.units}: live units are not the held ones")
            live += [unit for i, unit in enumerate(extent.units) if extent.alive >> i & 1]
        if len(live) != len(set(live)) or set(live) != set(self.arena.used_units(self.cls)):
            raise ArenaError("referenced units and free units do not partition the arena")

    def _follow(self, moved: dict[int, int]) -> None:
        """Units have new places: {old: new}."""
        for extent in self.extents:
            if not moved.keys().isdisjoint(extent.units):
                alive = extent.alive
                extent.units = tuple(moved.get(unit, unit) if alive >> i & 1 else unit for i, unit in enumerate(extent.units))
        for table in self.tables:
            table.follow()

    def _free_unheld(self, extent: Extent) -> int:
        gone = extent.alive & ~self._mask(extent.holders)
        if not gone:
            return 0
        extent.alive ^= gone
        self.arena.free(self.cls, [unit for i, unit in enumerate(extent.units) if gone >> i & 1])
        if not extent.alive:
            self.extents.discard(extent)
        return gone.bit_count()

    def _mask(self, holders: Iterable[tuple[int, int]]) -> int:
        mask = 0
        for start, stop in holders:
            mask |= self._range_mask(start, stop)
        return mask

    def _range_mask(self, start: int, stop: int) -> int:
        first = start // self.page_size
        return ((1 << (self.pages(stop) - first)) - 1) << first


def _drop(counts: Counter[tuple[int, int]], key: tuple[int, int]) -> bool:
    """Count one down; True while others remain. Raises ArenaError if there was none."""
    left = counts[key] - 1
    if left < 0:
        raise ArenaError(f"slots {key} released more often than held")
    if left:
        counts[key] = left
    else:
        del counts[key]
    return bool(left)
