"""The engine beside another unit class that grows and shrinks at random: units move, tokens and bytes stay."""

from __future__ import annotations

import os
import random

import hypothesis.strategies as st
import pytest
from fake_engine import Oracle, engine, request, run, turn
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from test_properties import EXAMPLES, WINDOWS, EngineLife, act

from agentkv.engine.cache.arena import UnitClass
from agentkv.engine.core import GRANULE, Edit
from agentkv.engine.llm import LLM
from agentkv.engine.units import Units
from agentkv.errors import EngineFault


class Ballast:
    """Units of another class in an engine's arena; their bytes are checked."""

    def __init__(self, llm: LLM, granules: int = 3) -> None:
        self.llm, self.cls = llm, UnitClass("ballast", granules * GRANULE)
        self.held: dict[int, int] = {}
        self.count = 0
        llm.arena.followers[self.cls] = self.follow

    def follow(self, moved: dict[int, int]) -> None:
        self.held = {moved.get(unit, unit): who for unit, who in self.held.items()}

    def take(self, most: int) -> None:
        arena = self.llm.arena
        claimed = sum(arena.claimed(pool.cls) * pool.cls.granules for pool in self.llm.pools.pools)
        count = min(most, (arena.num_granules - arena.used_granules - claimed) // self.cls.granules)
        assert arena.claim([(self.cls, count)])
        for unit in arena.allocate(self.cls, count):
            self.count += 1
            self.held[unit] = self.count
            self.llm.runner.put_unit(self.cls.unit_bytes, unit, self.cells(self.count))
        arena.claim([(self.cls, 0)])

    def give_back(self, units: list[int]) -> None:
        self.llm.arena.free(self.cls, units)
        for unit in units:
            del self.held[unit]

    def cells(self, who: int) -> list[tuple[int, int]]:
        return [(who, i) for i in range(self.cls.granules)]

    def check(self) -> None:
        for unit, who in self.held.items():
            assert self.llm.runner.get_unit(self.cls.unit_bytes, unit) == self.cells(who)


class MixedLife(EngineLife):
    """An engine's life with ballast in its arena."""

    @property
    def ballast(self) -> Ballast:
        if not hasattr(self, "_ballast"):
            self._ballast = Ballast(self.llm, self.units % 4 + 1)
        return self._ballast

    def one_step(self) -> bool:
        if self.llm.has_work and not self.llm.scheduler.running and not self.llm.scheduler.finished:
            self.ballast.give_back(list(self.ballast.held))
            self.llm.scheduler.memory_changed()
        return super().one_step()

    def shift(self, rng: random.Random) -> None:
        held = list(self.ballast.held)
        self.ballast.give_back(rng.sample(held, len(held) // 2))
        self.ballast.take(rng.randrange(30))

    @rule(seed=st.integers(0, 1000))
    def shift_by(self, seed: int) -> None:
        self.shift(random.Random(seed))

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.llm.check()
        self.ballast.check()
        stats = self.llm.stats()
        mine = (stats.active + stats.parked + stats.chains + stats.checkpoints + stats.radix) * stats.unit_bytes
        assert mine + len(self.ballast.held) * self.ballast.cls.unit_bytes == self.llm.arena.used_bytes
        assert stats.free == stats.total - self.llm.arena.used_bytes // stats.unit_bytes

    @rule(units=st.integers(1, 6))
    def pressure(self, units: int) -> None:
        self.llm.oracle.reclaim(Units.of(free + units for free in self.llm.pools.free.counts))

    def fault_in_prune(self, pick: int) -> None:
        """Not here: what a failed move of units does is tested below."""

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.ballast.give_back(list(self.ballast.held))
        super().teardown()


SETTINGS = settings(
    max_examples=EXAMPLES // 2,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("warm_pages", [0, 4, 30])
def test_any_lives(warm_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in whatever order, with and without host memory to go to."""
    monkeypatch.setattr(MixedLife, "warm_pages", warm_pages)
    run_state_machine_as_test(MixedLife, settings=SETTINGS)


def test_long_lives() -> None:
    moved = compactions = 0
    for seed in range(int(os.environ.get("AGENTKV_LIVES", "20"))):
        rng, life = random.Random(seed), MixedLife()
        try:
            sizes = rng.randrange(9, 40), rng.choice([2, 3, 4]), rng.randrange(1, 5), 8, rng.randrange(3)
            life.start(*sizes, "radix", WINDOWS[seed % len(WINDOWS)], 2)
            for _ in range(120):
                if rng.random() < 0.3:
                    life.shift(rng)
                act(life, rng)
            life.teardown()
        except Exception as error:
            raise AssertionError(f"life {seed}") from error
        moved += life.llm.arena.moved_bytes
        compactions += life.llm.arena.compactions
    assert compactions > 50, compactions
    assert moved


def scattered(units: int = 16) -> tuple[LLM, Ballast]:
    """An engine whose free bytes lie in holes smaller than a page."""
    llm = engine(units=units, page_size=4)
    ballast = Ballast(llm)
    scatter(ballast)
    return llm, ballast


def test_a_request_that_fits_the_free_bytes_is_served_at_once() -> None:
    llm, ballast = scattered(64)
    cls = llm.pools.pools[0].cls
    assert llm.arena.available(cls) < 3
    most = llm.arena.attainable(cls)
    assert most > 25
    assert llm.stats().fragmented[cls.name] > 20 * cls.unit_bytes
    seq = llm.add(request([1, 2] * 40, max_tokens=4 * most - 80 + 1))
    llm.step()
    llm.check()
    assert seq.num_generated == 1 or seq.prefilling
    run(llm)
    ballast.check()
    assert seq.token_ids[80:] == Oracle().generate([1, 2] * 40, [], 0, seq.max_tokens)
    assert llm.stats().moved_bytes == llm.arena.moved_bytes > 0


def scatter(ballast: Ballast) -> None:
    ballast.take(10**6)
    ballast.give_back(list(ballast.held)[::2])


def test_a_failed_move_of_units_forgets_all_kv_and_no_text() -> None:
    llm = engine(units=24, page_size=4)
    ids = [1, 2, 0]
    ids += turn(llm, ids, "a", max_tokens=2)
    running = llm.add(request([1] * 5, max_tokens=8))
    llm.step()
    scatter(Ballast(llm))
    llm.add(request([2] * 20, max_tokens=3))
    llm.runner.fail_move = True
    while not (outputs := [output for output in llm.step() if output.finished]):
        llm.check()
    assert running in [output.seq for output in outputs]
    assert all(isinstance(output.seq.fault, EngineFault) for output in outputs)
    llm.check()
    info = llm.chain_info("a")
    assert info is not None
    assert (info.logical_length, info.resident_tokens) == (5, 0)
    llm.runner.fail_move = False
    assert turn(llm, [*ids, 1], "a") == Oracle().generate([*ids, 1], [], 0, 4)


def test_a_failed_move_between_steps_is_told_by_the_next_one() -> None:
    llm = engine(units=24, page_size=4)
    ids = list(range(5)) * 3
    ids += turn(llm, ids, "a", max_tokens=2)
    llm.fork("a", "b", len(ids))
    seq = llm.add(request([2] * 5, max_tokens=8))
    llm.step()
    scatter(Ballast(llm))
    llm.runner.fail_move = True
    with pytest.raises(EngineFault, match="moving units"):
        llm.prune("a", [(1, 3)])
    llm.runner.fail_move = False
    llm.check()
    assert llm.has_work
    assert [(output.seq, output.finished) for output in llm.step()] == [(seq, True)]
    assert not llm.has_work
    llm.check()
    edits = [Edit(len(ids), ((1, 3),))]
    assert turn(llm, [*ids, 1], "a", edits=edits) == Oracle().generate([*ids, 1], edits, 0, 4)
