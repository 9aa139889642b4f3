"""Moves of units against a memory of granules that knows nothing of slabs: contents survive, free bytes are usable."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agentkv.engine.cache.arena import Arena, ArenaFull, UnitClass, UnitMoves
from agentkv.engine.cache.compaction import compact, make_room
from agentkv.engine.core import GRANULE

HEAD = UnitClass("head", GRANULE)
LAYER = UnitClass("layer", 3 * GRANULE)
STRIPE = UnitClass("stripe", 11 * GRANULE)
CLASSES = (HEAD, LAYER, STRIPE)


class Memory:
    """Every unit's granules hold who it is. Moves are carried out granule by granule, as they come."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.cells: list[object] = [None] * arena.num_granules
        self.held: dict[UnitClass, dict[int, int]] = {cls: {} for cls in CLASSES}  # unit -> who
        self.count = 0
        self.moved = 0
        self.calls = 0
        arena.mover = self.carry_out
        for cls in CLASSES:
            arena.followers[cls] = lambda moved, cls=cls: self.follow(cls, moved)  # type: ignore[misc]

    def follow(self, cls: UnitClass, moved: dict[int, int]) -> None:
        assert moved.keys() <= self.held[cls].keys()
        self.held[cls] = {moved.get(unit, unit): who for unit, who in self.held[cls].items()}

    def carry_out(self, moves: list[UnitMoves]) -> None:
        self.calls += 1
        for cls, source, target in moves:
            assert source == sorted(set(source))
            for i, new in enumerate(target):  # so a chunk may be read before it is written
                assert all(new + cls.granules <= old or old + cls.granules <= new for old in source[i + 1 :])
            for old, new in zip(source, target, strict=True):
                self.cells[new : new + cls.granules] = list(self.cells[old : old + cls.granules])
            self.moved += len(source) * cls.unit_bytes

    def allocate(self, cls: UnitClass, count: int) -> None:
        make_room(self.arena, [(cls, count)])
        self.take(cls, count)

    def take(self, cls: UnitClass, count: int) -> None:
        for unit in self.arena.allocate(cls, count):
            self.count += 1
            assert unit not in self.held[cls]
            self.held[cls][unit] = self.count
            self.cells[unit : unit + cls.granules] = [(cls.name, self.count, i) for i in range(cls.granules)]

    def free(self, cls: UnitClass, units: list[int]) -> None:
        self.arena.free(cls, units)
        for unit in units:
            del self.held[cls][unit]

    def check(self) -> None:
        taken: set[int] = set()
        for cls, held in self.held.items():
            assert set(self.arena.used_units(cls)) == held.keys()
            for unit, who in held.items():
                here = range(unit, unit + cls.granules)
                assert taken.isdisjoint(here)
                taken |= set(here)
                assert [self.cells[granule] for granule in here] == [(cls.name, who, i) for i in range(cls.granules)]
        assert self.arena.used_bytes == len(taken) * GRANULE
        assert self.arena.moved_bytes == self.moved
        for cls in CLASSES:
            lost = self.arena.fragmented_bytes(cls)
            free = self.arena.free_bytes - sum(
                self.arena.claimed(other) * other.unit_bytes for other in CLASSES if other != cls
            )
            assert 0 <= lost <= self.arena.free_bytes
            assert self.arena.available(cls) + lost // cls.unit_bytes == max(self.arena.available(cls), free // cls.unit_bytes)
        self.arena.check()


@settings(max_examples=150, deadline=None)
@given(granules=st.integers(0, 300), slab_units=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_random_lives(granules: int, slab_units: int, seed: int) -> None:
    """Whatever is free can be had by any class, to the last whole unit, and nobody's bytes change."""
    rng, memory = random.Random(seed), Memory(Arena(granules, slab_units=slab_units))
    for _ in range(50):
        cls = rng.choice(CLASSES)
        if rng.random() < 0.55:
            most = memory.arena.free_bytes // cls.unit_bytes
            count = rng.choice([most, rng.randint(0, most), min(most, rng.randint(0, 9))])
            moved = memory.moved
            enough = memory.arena.can_allocate(cls, count)
            memory.allocate(cls, count)
            assert memory.moved == moved or not enough, "nothing moves when enough is free"
        else:
            mine = list(memory.held[cls])
            memory.free(cls, rng.sample(mine, rng.choice([len(mine) // 2, rng.randint(0, len(mine))])))
        memory.check()


@settings(max_examples=100, deadline=None)
@given(granules=st.integers(20, 300), slab_units=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_claims_are_kept(granules: int, slab_units: int, seed: int) -> None:
    """Whatever fits the free bytes can be claimed together, and what is claimed is handed out without a move, in any order."""
    rng, arena = random.Random(seed), Arena(granules, slab_units=slab_units)
    memory = Memory(arena)
    for _ in range(15):
        left, counts = arena.free_bytes, dict.fromkeys(CLASSES, 0)
        for cls in rng.sample(CLASSES, 3):
            counts[cls] = rng.choice([rng.randint(0, left // cls.unit_bytes), left // cls.unit_bytes, 0])
            left -= counts[cls] * cls.unit_bytes
        before = {cls: arena.claimed(cls) for cls in CLASSES}
        assert not arena.claim([*counts.items(), (STRIPE, arena.attainable(STRIPE) + 1)])
        assert {cls: arena.claimed(cls) for cls in CLASSES} == before
        assert arena.claim(list(counts.items()))
        memory.check()
        arena.sticky = rng.random() < 0.5
        moved, owed = arena.moved_bytes, dict(counts)
        while any(owed.values()) and rng.random() < 0.9:
            cls = rng.choice([cls for cls in CLASSES if owed[cls]])
            count = rng.randint(1, owed[cls])
            owed[cls] -= count
            memory.take(cls, count)
        assert arena.moved_bytes == moved
        arena.claim(list(owed.items()))
        for cls in CLASSES:
            memory.free(cls, rng.sample(list(memory.held[cls]), rng.randint(0, len(memory.held[cls]))))
        memory.check()


def test_too_few_bytes_move_nothing() -> None:
    memory = Memory(Arena(40, slab_units=4))
    memory.allocate(HEAD, 20)
    memory.free(HEAD, list(memory.held[HEAD])[::2])
    with pytest.raises(ArenaFull, match="wanted, 7680 bytes are free"):
        make_room(memory.arena, [(STRIPE, 3)])
    assert memory.moved == 0
    memory.check()


def test_the_emptiest_slab_moves_into_the_fullest() -> None:
    arena = Arena(36, slab_units=12)
    memory = Memory(arena)
    memory.allocate(HEAD, 36)
    memory.free(HEAD, [*range(6), *range(12, 23), *range(24, 29)])  # slabs with 6, 1 and 7 units
    assert compact(arena, [(STRIPE, 1)]) == [UnitMoves(HEAD, [23], [24])]
    assert arena.moved_bytes == GRANULE
    assert arena.allocate(STRIPE, 1) == [12]


def test_full_slabs_stay_where_they_are() -> None:
    """One sparse slab among full ones: its three units are all that moves."""
    arena = Arena(440, slab_units=44)
    memory = Memory(arena)
    memory.allocate(HEAD, 440)
    memory.free(HEAD, [*range(88, 129), 300, 301, 302])
    memory.allocate(STRIPE, 3)
    assert memory.moved == 3 * GRANULE
    memory.check()


def test_units_slide_where_no_slab_has_room() -> None:
    memory = Memory(Arena(33, slab_units=2))
    memory.allocate(LAYER, 11)
    memory.free(LAYER, [0, 6, 12, 18])  # 12 granules in holes of 3
    assert memory.arena.fragmented_bytes(STRIPE) == STRIPE.unit_bytes
    memory.allocate(STRIPE, 1)
    memory.check()
    assert memory.arena.fragmented_bytes(STRIPE) == 0


def test_a_class_without_its_own_room_takes_back_what_others_let_go() -> None:
    """Two classes in turn fill the arena to the last unit, for ever."""
    memory = Memory(Arena(11 * 30, slab_units=8))
    rng = random.Random(1)
    for cls, other in [(HEAD, STRIPE), (STRIPE, LAYER), (LAYER, HEAD)] * 6:
        memory.allocate(cls, memory.arena.attainable(cls))
        assert memory.arena.attainable(cls) == 0
        for each in (cls, other):
            held = list(memory.held[each])
            memory.free(each, rng.sample(held, len(held) * 2 // 3))
        memory.check()


def test_a_large_arena_is_searched_quickly() -> None:
    """16 GiB in two classes, sparse everywhere: the plan for a thousand stripes."""
    small, large = UnitClass("page", 64 << 10), UnitClass("stripe", 2 << 20)
    arena = Arena((16 << 30) // GRANULE)
    units = arena.allocate(small, arena.available(small))
    rng = random.Random(0)
    arena.free(small, [unit for unit in units if rng.random() < 0.6])
    compact(arena, [(large, 1000)])
    assert arena.can_allocate(large, 1000)
    assert arena.moved_bytes < 1000 * large.unit_bytes
    arena.check()
