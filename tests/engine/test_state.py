"""KV states against lists: every holder sees its own tokens whatever the others do, and units return exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from agentkv.engine.cache.arena import Arena, ArenaError, ArenaFull, UnitClass
from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.cache.holding import Holding
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.state import Change, KVState
from agentkv.engine.core import GRANULE, Edit
from agentkv.engine.units import Units
from agentkv.engine.work import Slot
from agentkv.types import Interval

UNIT = UnitClass("stripe", GRANULE)


@dataclass
class Device:
    """Slots that remember what was written to them."""

    pools: KVPools
    slots: dict[Slot, tuple[int, int]] = field(default_factory=dict)
    written: int = 0

    @property
    def pool(self) -> ExtentPool:
        return self.pools.pools[0]

    def state(self) -> KVState:
        return KVState(self.pools)

    def carry_out(self, change: Change) -> None:
        for source, target, group in change.moves:
            assert group == 0
            contents = [self.slots[slot] for slot in source]
            assert len(set(target)) == len(target)
            self.slots.update(zip(target, contents, strict=True))

    def write(self, state: KVState, first: int, last: int) -> list[tuple[int, int]]:
        made = []
        for index in range(first, last):
            self.written += 1
            made.append((held(state).position(index), self.written))
            self.slots[held(state).slot(index)] = made[-1]
        return made

    def read(self, state: KVState) -> list[tuple[int, int]]:
        return [self.slots[held(state).slot(index)] for index in range(state.length)]


def make(units: int = 16, page: int = 4) -> Device:
    arena = Arena(units)
    return Device(KVPools(arena, [ExtentPool(arena, UNIT, page)]))


def held(state: KVState) -> Holding:
    (holding,) = state.holdings
    return holding


def grown(device: Device, state: KVState, count: int) -> Change:
    first = state.length
    change = state.append(count)
    device.carry_out(change)
    device.write(state, first, state.length)
    return change


def test_append_fills_pages_and_takes_new_ones() -> None:
    device = make()
    state = device.state()
    assert grown(device, state, 6).new_units.total == 2
    assert (state.length, state.logical_length, held(state).units) == (6, 6, [0, 1])
    assert grown(device, state, 2).new_units.total == 0
    change = grown(device, state, 1)
    assert (change.first_pages[0], change.new_units.total) == (2, 1)
    assert held(state).slot(8) == (2, 0)


def test_the_first_writer_has_the_last_page_the_second_copies_it() -> None:
    device = make()
    state = device.state()
    grown(device, state, 6)
    first, second = state.fork(), state.fork()
    assert grown(device, first, 1).moves == []
    change = grown(device, second, 1)
    assert change.moves == [([(1, 0), (1, 1)], [(2, 0), (2, 1)], 0)]
    assert change.first_pages[0] == 1
    assert grown(device, state, 1).moves, "the lease is the first writer's"
    assert [len(set(held(s).units)) for s in (state, first, second)] == [2, 2, 2]
    assert len({*held(state).units, *held(first).units, *held(second).units}) == 4


def test_the_lease_is_free_again_when_its_holder_lets_go() -> None:
    device = make()
    state = device.state()
    grown(device, state, 6)
    other = state.fork()
    grown(device, other, 1)
    other.release()
    assert grown(device, state, 1).moves == []


def test_a_checkpoint_does_not_cost_a_copy() -> None:
    device = make()
    state = device.state()
    grown(device, state, 6)
    point = state.fork()
    for _ in range(5):
        assert grown(device, state, 1).moves == []
    point.release()
    assert device.pool.arena.used_bytes == 3 * GRANULE


def test_units_return_with_the_last_reference() -> None:
    device = make()
    state = device.state()
    grown(device, state, 16)
    other = state.fork()
    state.cut(3)
    assert device.pool.free_units == 12
    assert device.pool.returned(held(other).slices) == 3
    other.release()
    assert device.pool.free_units == 15
    state.release()
    state.release()
    assert device.pool.free_units == 16
    with pytest.raises(ValueError, match="released"):
        state.append(1)


def test_removal_keeps_the_pages_before_and_frees_the_rest() -> None:
    device = make()
    state = device.state()
    grown(device, state, 16)
    before = device.read(state)
    change = state.remove([(6, 10)], spare=Units((9,)))
    device.carry_out(change)
    assert device.read(state) == before[:6] + before[10:]
    assert (state.length, state.logical_length, state.runs) == (12, 16, [(0, 6), (10, 16)])
    assert state.edits == (Edit(17, ((6, 10),)),)
    assert (change.first_pages[0], change.new_units.total, held(state).units[0]) == (1, -1, 0)
    assert state.lossy
    assert state.pure_length == 6
    assert state.holes == [(6, 10)]


def test_removal_at_the_end_moves_nothing() -> None:
    device = make()
    state = device.state()
    grown(device, state, 14)
    change = state.remove([(9, 14)], spare=Units((0,)))
    assert change.moves == []
    assert (change.new_units.total, state.length, state.logical_length) == (-1, 9, 14)
    grown(device, state, 1)
    assert device.read(state)[-1][0] == 14


def test_removal_in_place_needs_one_page_whatever_its_size() -> None:
    device = make(units=9)
    state = device.state()
    grown(device, state, 32)
    before = device.read(state)
    assert state.copy_units([(1, 3)]) == Units((1,))
    device.carry_out(state.remove([(1, 3)], spare=Units((1,))))
    assert device.read(state) == before[:1] + before[3:]
    assert device.pool.arena.peak_bytes == 9 * GRANULE
    device.pools.check([state.slices], [])


def test_removal_beside_a_sharer_copies_everything_behind() -> None:
    device = make(units=16)
    state = device.state()
    grown(device, state, 32)
    other, before = state.fork(), device.read(state)
    assert state.copy_units([(1, 3)]) == Units((8,))
    device.carry_out(state.remove([(1, 3)], spare=Units((8,))))
    assert device.read(other) == before
    assert device.pool.free_units == 0


def test_too_few_spare_pages_are_refused_and_nothing_leaks() -> None:
    device = make(units=16)
    state = device.state()
    grown(device, state, 32)
    other = state.fork()
    with pytest.raises(ArenaFull):
        state.remove([(1, 3)], spare=Units((3,)))
    state.release()
    device.pools.check([other.slices], [])


def test_a_full_arena_refuses_and_changes_nothing() -> None:
    device = make(units=3)
    state = device.state()
    grown(device, state, 10)
    with pytest.raises(ArenaFull):
        state.append(3)
    assert (state.length, len(held(state).units)) == (10, 3)
    device.pools.check([state.slices], [])


def test_pieces_with_two_copies_of_a_page_make_one_state() -> None:
    device = make()
    first = device.state()
    grown(device, first, 6)
    second = first.fork()
    grown(device, first, 4)
    grown(device, second, 4)
    pieces = [*held(first).between(0, 5), *held(first).between(5, 6), *held(second).between(6, 10)]
    joined = KVState.of(device.pools, 10, (pieces,))
    assert device.read(joined) == device.read(second)
    assert held(joined).units == [held(first).units[0], *held(second).units[1:]]
    assert held(joined).shared_pages == 3


def test_digest_is_of_content() -> None:
    device = make()
    state, same = device.state(), device.state()
    grown(device, state, 5)
    for _ in range(5):
        grown(device, same, 1)
    ids = [5, 6, 7, 8, 9, 10]
    assert state.digest("s", ids) == same.digest("s", [5, 6, 7, 8, 9])
    assert state.digest("s", ids) != state.digest("t", ids)
    assert state.digest("s", ids) != state.digest("s", [5, 6, 7, 8, 0])
    state.remove([(1, 2)], spare=Units((1,)))
    assert state.digest("s", ids) != same.digest("s", ids)


def test_releasing_what_is_not_held_is_an_error() -> None:
    device = make()
    held = device.pool.make(2, 5)
    with pytest.raises(ArenaError):
        device.pool.release([Slice(held.extent, 0, 4)])


@dataclass
class Holder:
    state: KVState
    content: list[tuple[int, int]]


def removed_at_random(rng: random.Random, length: int) -> list[Interval]:
    return [(a, a + rng.randrange(1, 9)) for a in (rng.randrange(length + 1) for _ in range(rng.randrange(1, 4)))]


@pytest.mark.parametrize("page", [1, 2, 3, 4, 7])
def test_many_holders_never_notice_each_other(page: int) -> None:
    for seed in range(12):
        rng, device = random.Random(seed), make(units=60, page=page)
        holders = [Holder(device.state(), [])]
        for _ in range(80):
            holder = rng.choice(holders)
            state, action = holder.state, rng.randrange(7)
            before = device.pool.free_units
            if action <= 1:
                count = rng.randrange(1, 2 * page + 2)
                position, first = state.logical_length, state.length
                try:
                    change = state.append(count)
                except ArenaFull:
                    assert before <= count // page + 1
                    continue
                assert before - device.pool.free_units == change.new_units.total
                device.carry_out(change)
                made = device.write(state, first, state.length)
                assert [at for at, _ in made] == list(range(position, position + count))
                holder.content += made
            elif action == 2:
                holders.append(Holder(state.fork(), list(holder.content)))
            elif action == 3 and len(holders) > 1:
                expected = device.pool.returned(held(state).slices)
                state.release()
                assert device.pool.free_units - before == expected
                holders.remove(holder)
            elif action == 4:
                length = rng.randrange(state.logical_length + 1)
                state.cut(length)
                holder.content = [item for item in holder.content if item[0] < length]
                assert state.logical_length == length
            elif action >= 5:
                gone = removed_at_random(rng, state.logical_length)
                need = state.copy_units(gone)
                if need.total > before:
                    continue
                change = state.remove(gone, need if rng.random() < 0.5 else Units((before,)))
                assert before - device.pool.free_units == change.new_units.total
                device.carry_out(change)
                holder.content = [item for item in holder.content if not any(a <= item[0] < b for a, b in gone)]
            for each in holders:
                assert device.read(each.state) == each.content
                assert len(held(each.state).units) == device.pool.pages(len(each.content))
            device.pools.check([each.state.slices for each in holders], [])
        for each in holders:
            each.state.release()
        assert device.pool.arena.used_bytes == 0
