"""The arena against a set of bytes that knows nothing of slabs."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agentkv.engine.cache.arena import Arena, ArenaError, ArenaFull, UnitClass
from agentkv.engine.core import GRANULE

SMALL = UnitClass("small", GRANULE)
MIDDLE = UnitClass("middle", 3 * GRANULE)
LARGE = UnitClass("large", 7 * GRANULE)


def test_a_unit_is_a_whole_number_of_granules() -> None:
    for size in (0, 100, GRANULE + 1):
        with pytest.raises(ValueError, match="multiple"):
            UnitClass("odd", size)


def test_units_ascend_and_the_last_smaller_slab_is_used() -> None:
    arena = Arena(23, slab_units=4)
    assert arena.available(MIDDLE) == 7
    assert arena.allocate(MIDDLE, 7) == [0, 3, 6, 9, 12, 15, 18]
    assert not arena.can_allocate(MIDDLE, 1)
    assert arena.can_allocate(SMALL, 2)  # the two granules behind the last unit


def test_the_fullest_slab_is_filled_first() -> None:
    arena = Arena(12, slab_units=4)
    arena.allocate(SMALL, 12)
    arena.free(SMALL, [0, 1, 2, 5, 8, 9])  # slabs with 3, 1 and 2 free units
    assert arena.allocate(SMALL, 3) == [5, 8, 9]
    assert arena.allocate(SMALL, 3) == [0, 1, 2]


def test_an_empty_slab_goes_to_whoever_asks() -> None:
    arena = Arena(14, slab_units=7)
    small = arena.allocate(SMALL, 14)
    assert not arena.can_allocate(LARGE, 1)
    arena.free(SMALL, small[:6])
    assert not arena.can_allocate(LARGE, 1), "six units are free, but the slab is not empty"
    arena.free(SMALL, small[6:7])
    assert arena.allocate(LARGE, 1) == [0]
    arena.check()


def test_too_much_takes_nothing() -> None:
    arena = Arena(8)
    arena.allocate(SMALL, 5)
    with pytest.raises(ArenaFull):
        arena.allocate(SMALL, 4)
    assert arena.used_bytes == 5 * GRANULE
    arena.check()


@pytest.mark.parametrize("unit", [0, 1, 3, 100, -1])
def test_what_is_not_handed_out_cannot_be_freed(unit: int) -> None:
    arena = Arena(30, slab_units=4)
    arena.free(MIDDLE, arena.allocate(MIDDLE, 3)[:1])  # 3 and 6 are handed out
    if unit == 3:
        arena.free(MIDDLE, [3])
    with pytest.raises(ArenaError):
        arena.free(MIDDLE, [unit])


def test_a_unit_belongs_to_its_class() -> None:
    arena = Arena(30)
    units = arena.allocate(MIDDLE, 2)
    with pytest.raises(ArenaError):
        arena.free(SMALL, units)
    arena.check()


def test_the_peak_is_the_most_at_once() -> None:
    arena = Arena(100)
    first = arena.allocate(LARGE, 5)
    arena.free(LARGE, first)
    arena.allocate(SMALL, 3)
    assert arena.peak_bytes == LARGE.unit_bytes * 5
    arena.reset_peak()
    assert arena.peak_bytes == arena.used_bytes == 3 * GRANULE


@settings(max_examples=80, deadline=None)
@given(granules=st.integers(0, 90), slab_units=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_random_lives(granules: int, slab_units: int, seed: int) -> None:
    rng, arena = random.Random(seed), Arena(granules, slab_units=slab_units)
    held: dict[int, UnitClass] = {}
    for _ in range(60):
        cls = rng.choice([SMALL, MIDDLE, LARGE])
        mine = [unit for unit, owner in held.items() if owner is cls]
        if rng.random() < 0.5:
            count = rng.randrange(8)
            if arena.can_allocate(cls, count):
                units = arena.allocate(cls, count)
                assert len(units) == count
                assert not held.keys() & set(units)
                held.update(dict.fromkeys(units, cls))
            else:
                with pytest.raises(ArenaFull):
                    arena.allocate(cls, count)
        else:
            gone = rng.sample(mine, rng.randrange(len(mine) + 1))
            arena.free(cls, gone)
            for unit in gone:
                del held[unit]
        taken = [granule for unit, owner in held.items() for granule in range(unit, unit + owner.granules)]
        assert len(set(taken)) == len(taken)
        assert all(0 <= granule < granules for granule in taken)
        assert arena.used_bytes == len(taken) * GRANULE
        assert arena.used_bytes + arena.free_bytes == granules * GRANULE
        for each in (SMALL, MIDDLE, LARGE):
            assert set(arena.used_units(each)) == {unit for unit, owner in held.items() if owner is each}
        arena.check()


def test_a_large_arena_is_quick() -> None:
    """100 GB of 2 MiB stripes: what a step asks for does not walk the arena."""
    cls = UnitClass("stripe", 2 << 20)
    arena = Arena((100 << 30) // GRANULE)
    held = arena.allocate(cls, 40_000)
    for _ in range(20_000):
        arena.free(cls, [held.pop()])
        held += arena.allocate(cls, 1)
    arena.check()
