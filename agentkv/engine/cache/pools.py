"""The units of all KV groups: one extent pool a group over one arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from agentkv.engine.cache.arena import Arena, UnitClass
from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.core import GRANULE, WHOLE, Group, StateGroup
from agentkv.engine.form import Form
from agentkv.engine.units import Units

SLAB_UNITS = 64
SLAB_SHARE = 40
"""Where classes share an arena, a slab is at most a fortieth of it, so that units seldom move for another class."""

Pieces = tuple[list[Slice], ...]
"""Slices by group."""


class KVPools:
    """What a sequence of pools can do together. Amounts are `Units`, one count a group."""

    def __init__(self, arena: Arena, pools: Iterable[ExtentPool], forms: Sequence[Form] = ()) -> None:
        self.arena = arena
        self.pools = tuple(pools)
        self.forms = tuple(forms) or (Form(tuple(range(len(self.pools)))),)
        self.page_lcm = lcm(*(pool.page_size for pool in self.pools if pool.page_size < WHOLE and not pool.sealed))
        """Slots after which a page begins in every group."""
        self.windowed = any(pool.window is not None for pool in self.pools)
        """Does a group let go of pages behind a window?"""

    @classmethod
    def over(cls, num_granules: int, groups: Sequence[Group], forms: Sequence[Form] = ()) -> KVPools:
        """A fresh arena with a pool for each of the groups. forms: what sequences hold of them; () is one form of all."""
        classes = [UnitClass(f"group {index}", group.stripe_bytes) for index, group in enumerate(groups)]
        least = num_granules // (SLAB_SHARE * max(unit.granules for unit in classes))
        arena = Arena(num_granules, slab_units=SLAB_UNITS if len(groups) == 1 else max(1, min(SLAB_UNITS, least)))
        return cls(
            arena,
            (_pool(arena, unit, index, group) for index, (unit, group) in enumerate(zip(classes, groups, strict=True))),
            forms,
        )

    @property
    def free(self) -> Units:
        """Units that nobody holds: of each group as many as if the others took none."""
        return Units.of(pool.free_units for pool in self.pools)

    @property
    def used(self) -> Units:
        """Units that somebody holds."""
        return Units.of(self.arena.used(pool.cls) for pool in self.pools)

    def fits(self, units: Units, *, empty: bool = False) -> bool:
        """Are there free bytes for these together, wherever they lie? empty: if nobody held anything."""
        return self.arena.can_hold(self._by_class(units), empty=empty)

    def at_hand(self, units: Units) -> bool:
        """Could these be handed out together as things lie? What was claimed always can."""
        return self.arena.fits(self._by_class(units))

    def claim(self, units: Units) -> bool:
        """Set these aside, in place of what was set aside before, moving others' units if need be; False if `fits` says no.
        Raises EngineFault where the device fails to move units."""
        return self.arena.claim(self._by_class(units))

    def unclaimed(self, claimed: Units) -> Units:
        """What may be taken in each group beside these claims, if the others take no more than their claims."""
        return self.free - claimed

    def bytes(self, units: Units) -> int:
        """Bytes of so many units."""
        return sum(pool.cls.unit_bytes * count for pool, count in zip(self.pools, units.counts, strict=False))

    def shortfall(self, units: Units) -> str:
        """For people: what so much takes, and what there is."""
        if len(self.pools) == 1:
            pool = self.pools[0]
            return f"{units.total} pages of {pool.page_size} tokens; the whole KV memory has {pool.total_units}"
        return f"{self.bytes(units)} bytes of KV; the whole KV memory has {self.arena.num_granules * GRANULE}"

    def granules(self, units: Units) -> int:
        """The same in granules."""
        return self.bytes(units) // GRANULE

    def returned(self, released: Iterable[Pieces], retained: Iterable[Pieces] = ()) -> Units:
        """Units that would really return if `retained` were held and then `released` let go."""
        released, retained = list(released), list(retained)
        return Units.of(
            pool.returned(
                (part for pieces in released for part in pieces[index]), (part for pieces in retained for part in pieces[index])
            )
            for index, pool in enumerate(self.pools)
        )

    def distinct(self, pieces: Iterable[Pieces]) -> Units:
        """Different units that these slices touch."""
        pieces = list(pieces)
        return Units.of(
            len({unit for each in pieces for unit in pool.units_of(each[index])}) for index, pool in enumerate(self.pools)
        )

    def only_cached(self, pieces: Pieces) -> bool:
        """Does a unit of these slices live by the prefix cache alone?"""
        return any(pool.only_cached(each) for pool, each in zip(self.pools, pieces, strict=True))

    def check(self, held: Iterable[Pieces], cached: Iterable[Pieces]) -> None:
        """Every group's accounts (see `ExtentPool.check`) and the arena's."""
        held, cached = list(held), list(cached)
        for index, pool in enumerate(self.pools):
            pool.check((part for pieces in held for part in pieces[index]), (part for each in cached for part in each[index]))
        self.arena.check()

    def _by_class(self, units: Units) -> list[tuple[UnitClass, int]]:
        counts = (*units.counts, *[0] * (len(self.pools) - len(units.counts)))
        return [(pool.cls, count) for pool, count in zip(self.pools, counts, strict=True)]


def _pool(arena: Arena, unit: UnitClass, index: int, group: Group) -> ExtentPool:
    said = {}
    if isinstance(group, StateGroup):
        said = {"by_slot": group.by_slot, "sealed": group.sealed, "mutable": group.mutable}
    return ExtentPool(arena, unit, group.page_size, group=index, window=group.window, slack=group.slack, **said)
