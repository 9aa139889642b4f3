"""Room for a class that starves: live units move until free bytes lie where the class can have them.

A **window** is a run of neighbouring slabs and free ranges. Emptying it moves its live units to free units of their classes
outside; those that find none slide to the window's start. What is left behind them is one free range. The window of the
whole arena leaves no free byte between units, so every free byte can be had by every class; usually the emptiest slab is
enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from agentkv.engine.cache.arena import Arena, ArenaFull, Slab, UnitClass, UnitMoves

NEARLY, AT_ONCE = 1.5, 64
"""From one search, at most so many windows are emptied, and none that costs more than this much of the cheapest."""


class Item(NamedTuple):
    """Granules [start, end): a slab, or a free range (None)."""

    start: int
    end: int
    slab: Slab | None


Counts = Sequence[tuple[UnitClass, int]]
"""How many units of which class."""


def make_room(arena: Arena, counts: Counts) -> None:
    """Let so many units of each of these classes be handed out together: where free bytes lie badly, units move, their
    followers with them, and the mover copies them. Raises ArenaFull, and moves nothing, if too few bytes are free; and what the
    mover raises."""
    moves = compact(arena, counts)
    for move in moves:
        arena.followers[move.cls](dict(zip(move.source, move.target, strict=True)))
    if moves and arena.mover is not None:
        arena.mover(moves)


def compact(arena: Arena, counts: Counts) -> list[UnitMoves]:
    """Change the arena's accounts so that `arena.fits(counts, exact=True)`; the moves to carry out, in order.

    Nothing moves when enough is free. Otherwise windows are emptied, fewest moved bytes for each unit gained first. Raises
    ArenaFull, and changes nothing, if there are too few free bytes.
    """
    if arena.fits(counts, exact=True):
        return []
    if not arena.can_hold(counts):
        wanted = ", ".join(f"{count} units of {cls.name!r}" for cls, count in counts)
        raise ArenaFull(f"{wanted} wanted, {arena.free_bytes} bytes are free")
    for shelf in arena.shelves.values():
        for slab in list(shelf.empty.values()):
            arena.lift(slab)  # claims are among `counts`
    moves: list[UnitMoves] = []
    for cls, count in sorted(counts, key=lambda each: -each[0].granules):
        while (short := count - arena.available(cls)) > 0:
            moves += _empty_cheapest(arena, cls, short)
    if not arena.fits(counts, exact=True):  # each alone, but not together
        moves += _empty(arena, _items(arena))
    arena.compactions += bool(moves)
    arena.moved_bytes += sum(len(move.source) * move.cls.unit_bytes for move in moves)
    return moves


class _Window:
    """A window that grows item by item, and what emptying it would give to `cls`."""

    def __init__(self, arena: Arena, cls: UnitClass) -> None:
        self.arena, self.cls = arena, cls
        self.items: list[Item] = []
        self.live: Counter[UnitClass] = Counter()
        self.free: Counter[UnitClass] = Counter()
        self.cost = 0
        """Granules of live units."""
        self.given = 0
        """Units of the class that its free ranges give as they are."""

    def add(self, item: Item) -> None:
        self.items.append(item)
        if item.slab is None:
            self.given += (item.end - item.start) // self.cls.granules
        else:
            self.live[item.slab.cls] += item.slab.live
            self.free[item.slab.cls] += item.slab.free_count
            self.cost += item.slab.live * item.slab.cls.granules

    def outside(self, cls: UnitClass) -> int:
        """Live units of a class that find a place in slabs outside."""
        return min(self.live[cls], self.arena.shelf(cls).free_units - self.free[cls])

    @property
    def gain(self) -> int:
        """Units of the class that can be had afterwards and could not before, at least."""
        stay = sum((live - self.outside(cls)) * cls.granules for cls, live in self.live.items())
        room = self.items[-1].end - self.items[0].start - stay
        return room // self.cls.granules - self.given - self.free[self.cls] - self.outside(self.cls)


def _items(arena: Arena) -> list[Item]:
    slabs = (Item(slab.base, slab.end, slab) for shelf in arena.shelves.values() for slab in shelf.slabs.values())
    return sorted((*slabs, *(Item(start, end, None) for start, end in arena.ranges)), key=lambda item: item.start)


def _empty_cheapest(arena: Arena, cls: UnitClass, short: int) -> list[UnitMoves]:
    """Empty the windows that move fewest bytes for each unit gained, and those that cost little more, up to `short` units.

    At least one unit is gained: the window of the whole arena gains whatever is attainable.
    """
    found = _windows(arena, cls, short)
    limit = found[0][0] * NEARLY
    moves: list[UnitMoves] = []
    edges: list[tuple[int, int]] = []
    for index, (price, items) in enumerate(found[:AT_ONCE]):
        start, end = items[0].start, items[-1].end
        if price > limit or any(low < end and start < high for low, high in edges):
            continue
        window = _Window(arena, cls)
        for item in items:
            window.add(item)
        gain = window.gain
        if index and (gain <= 0 or window.cost > limit * gain):
            continue  # what was moved before went into its slabs
        edges.append((start, end))
        moves += _empty(arena, items)
        short -= gain
        if short <= 0:
            break
    return moves


def _windows(arena: Arena, cls: UnitClass, short: int) -> list[tuple[float, list[Item]]]:
    """(granules moved for each unit gained, window), cheapest first; windows that gain nothing without their last item."""
    items = _items(arena)
    found: list[tuple[float, list[Item]]] = []
    least = float("inf")
    for first in range(len(items)):
        window = _Window(arena, cls)
        for item in items[first:]:
            window.add(item)
            if window.cost > least * short * NEARLY:
                break
            if (gain := min(window.gain, short)) > 0:
                price = window.cost / gain
                least = min(least, price)
                found.append((price, window.items))
                break
    return sorted(found, key=lambda each: each[0])


def _empty(arena: Arena, window: list[Item]) -> list[UnitMoves]:
    """Move every live unit of the window outside or to its start."""
    slabs = [item.slab for item in window if item.slab is not None]
    for slab in slabs:
        arena.lift(slab)
    moves: list[UnitMoves] = []
    position = window[0].start
    for slab in slabs:
        units, cls = slab.units(), slab.cls
        outside = arena.take(cls, len(units))
        inside = len(units) - len(outside)
        target: list[int] = []
        if inside:
            laid = arena.lay(cls, position, inside)
            target, position = arena.take(cls, inside), laid.end
        pairs = [(old, new) for old, new in zip(units, target + outside, strict=True) if old != new]
        if pairs:
            moves.append(UnitMoves(cls, [old for old, _ in pairs], [new for _, new in pairs]))
    return moves
