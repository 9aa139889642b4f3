"""The prefix cache against a plain list of what was inserted."""

from __future__ import annotations

import random
from itertools import count

import pytest

from agentkv.engine.cache.arena import Arena, UnitClass
from agentkv.engine.cache.extents import ExtentPool
from agentkv.engine.cache.intervals import common_prefix
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.reclaim import Room, reclaim
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import GRANULE
from agentkv.engine.units import Units
from agentkv.engine.work import Slot


class Cache:
    """A radix cache and a device that remembers the prefix each slot was written for."""

    def __init__(self, units: int = 64, page: int = 4) -> None:
        arena = Arena(units)
        self.pool = ExtentPool(arena, UnitClass("stripe", GRANULE), page)
        self.pools = KVPools(arena, [self.pool])
        self.radix = RadixCache(self.pools, count(1).__next__)
        self.slots: dict[Slot, tuple[int, ...]] = {}

    def state(self, ids: list[int], salt: str = "") -> KVState:
        """Continue from the cache, forward the rest, and check what was found."""
        match = self.radix.match(salt, ids, len(ids))
        state = KVState.of(self.pools, match.length, match.pieces)
        found = state.length
        for source, target, _ in state.append(len(ids) - found).moves:
            for a, b in zip(source, target, strict=True):
                self.slots[b] = self.slots[a]
        for position in range(found, len(ids)):
            self.slots[state.holdings[0].slot(position)] = (*ids[: position + 1],)
        assert [self.slots[state.holdings[0].slot(i)] for i in range(len(ids))] == [(*ids[: i + 1],) for i in range(len(ids))]
        return state

    def insert(self, ids: list[int], owner: str | None = None, salt: str = "") -> None:
        state = self.state(ids, salt)
        self.radix.insert(salt, ids, state, owner)
        state.release()

    def matched(self, ids: list[int], salt: str = "", limit: int = 999) -> int:
        return self.radix.match(salt, ids, limit).length

    def reclaim(self, units: int) -> int:
        before = self.pool.free_units
        reclaim(self.radix, Room(self.pools, Units((before + units,))))
        return self.pool.free_units - before

    def check(self) -> None:
        self.radix.check()
        self.pools.check([], self.radix.slices())


@pytest.mark.parametrize("shared", range(1, 14))
def test_a_match_ends_at_the_first_other_token(shared: int) -> None:
    cache = Cache()
    ids = list(range(13))
    cache.insert(ids)
    assert cache.matched([*ids[:shared], 99, 98]) == shared
    assert cache.matched(ids, limit=shared - 1) == shared - 1
    cache.insert([*ids[:shared], 99, 98])
    cache.check()
    assert cache.matched([*ids[:shared], 99, 98]) == shared + 2
    assert cache.matched(ids) == 13


def test_a_salt_sees_only_its_own() -> None:
    cache = Cache()
    cache.insert([1, 2, 3], salt="a")
    assert cache.matched([1, 2, 3], salt="b") == cache.matched([1, 2, 3]) == 0
    cache.insert([1, 2, 3, 4], salt="b")
    assert (cache.matched([1, 2, 3, 4], salt="a"), cache.matched([1, 2, 3, 4], salt="b")) == (3, 4)
    cache.check()


def test_only_what_precedes_the_first_hole_enters() -> None:
    cache = Cache()
    state = cache.state(list(range(12)))
    state.remove([(5, 7)], spare=Units((9,)))
    cache.radix.insert("", list(range(12)), state, None)
    assert cache.matched(list(range(12))) == 5


def test_closing_a_chain_frees_its_tail_and_no_more() -> None:
    cache = Cache()
    head = list(range(10))
    cache.insert([*head, 20, 21, 22, 23, 24], "a")
    cache.insert([*head, 30, 31], "b")
    before = cache.pool.free_units
    tail = cache.radix.tail("", [*head, 20, 21, 22, 23, 24], "a", 0)
    promised = cache.pool.returned([piece for node in tail for piece in node.slices[0]])
    cache.radix.disown("", [*head, 20, 21, 22, 23, 24], "a", 0)
    assert cache.pool.free_units - before == promised == 1  # slots 8 to 11 are the head's page, 12 to 14 a page of its own
    assert cache.matched([*head, 20, 21]) == 10
    cache.radix.disown("", [*head, 30, 31], "b", 0)
    assert cache.pool.arena.used_bytes == 0


def test_what_was_written_without_a_chain_stays_until_reclaimed() -> None:
    cache = Cache()
    cache.insert(list(range(8)))
    cache.insert(list(range(12)), "a")
    cache.radix.disown("", list(range(12)), "a", 0)
    assert cache.matched(list(range(12))) == 8
    assert cache.reclaim(2) == 2
    assert cache.pool.arena.used_bytes == 0


def test_the_oldest_leaf_goes_first_and_only_as_much_as_needed() -> None:
    cache = Cache()
    cache.insert([1] * 20)
    cache.insert([2] * 20)
    cache.matched([1] * 20)
    assert cache.reclaim(2) == 2
    assert (cache.matched([2] * 20), cache.matched([1] * 20)) == (12, 20)
    assert cache.reclaim(4) == 4
    assert (cache.matched([1] * 20), cache.matched([2] * 20)) == (16, 0)
    cache.check()


def test_what_others_hold_is_not_evictable() -> None:
    cache = Cache(units=10)
    cache.insert([1] * 16)
    cache.insert([2] * 16)
    holder = cache.state([1] * 16)
    assert cache.reclaim(10) == 4
    assert cache.matched([1] * 16) == 16, "removing it would have freed nothing"
    holder.release()
    assert cache.reclaim(10) == 4
    assert cache.pool.arena.used_bytes == 0


def test_a_held_leaf_does_not_lock_its_parents() -> None:
    """The head was computed twice; the leaf hangs below the cached copy, its pages are those of the other."""
    cache = Cache()
    cache.insert([1] * 8)
    own = KVState(cache.pools)
    own.append(16)
    cache.radix.insert("", [1] * 16, own, None)
    assert cache.pool.arena.used_bytes == 6 * GRANULE
    assert cache.reclaim(2) == 2
    own.release()
    cache.check()


@pytest.mark.parametrize("page", [1, 2, 3, 5])
def test_longest_match_in_any_order(page: int) -> None:
    for seed in range(15):
        rng, cache = random.Random(seed), Cache(units=400, page=page)
        chains: dict[str, list[int]] = {}
        alone: list[list[int]] = []
        for turn in range(40):
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            action = rng.randrange(4)
            if action == 0:
                cache.insert(ids)
                alone.append(ids)
            elif action == 1:
                chains[f"c{turn}"] = ids
                cache.insert(ids, f"c{turn}")
            elif action == 2 and chains:
                name = rng.choice(list(chains))
                keep = rng.randrange(len(chains[name]) + 1)
                tail = cache.radix.tail("", chains[name], name, keep)
                promised = cache.pool.returned([piece for node in tail for piece in node.slices[0]])
                before = cache.pool.free_units
                cache.radix.disown("", chains[name], name, keep)
                assert cache.pool.free_units - before == promised
                chains[name] = chains[name][:keep]
            probe = [rng.randrange(2) for _ in range(14)]
            known = [*alone, *chains.values()]
            assert cache.matched(probe) >= max((common_prefix(probe, each) for each in known), default=0)
            cache.state(probe).release()
            cache.check()
        for name, ids in chains.items():
            cache.radix.disown("", ids, name, 0)
        cache.check()
        used = cache.pool.arena.used_bytes // GRANULE
        assert cache.reclaim(10**6) == used


def test_positions_are_absolute() -> None:
    """The same ids further back are something else."""
    cache = Cache()
    cache.insert([7, 8, 9, 7, 8, 9])
    assert cache.matched([9, 7, 8, 9]) == 0
    match = cache.radix.match("", [7, 8, 9, 7], 99)
    assert [(piece.start, piece.stop) for piece in match.pieces[0]] == [(0, 4)]
