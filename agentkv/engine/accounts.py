"""Where the arena's units are, and whether every account of them is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agentkv.engine.cache.chain import ChainCache
from agentkv.engine.cache.extents import ExtentPool
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.core import Status
from agentkv.engine.preempt import Tally
from agentkv.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the arena's units are; free + active + parked + chains + checkpoints + radix = total.

    A unit held by several is counted for the first of: active (running and finished sequences), parked (preempted ones),
    chains, checkpoints, radix. waiting: sequences by priority; preempted: those of them that have run before.
    """

    unit_bytes: int
    total: int
    free: int
    active: int
    parked: int
    chains: int
    checkpoints: int
    radix: int
    reserved: int
    rows: int
    finished: int
    waiting_by_priority: Mapping[int, int]
    preempted: int
    tally: Tally

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return sum(self.waiting_by_priority.values())

    @property
    def bytes(self) -> dict[str, int]:
        """The same in bytes."""
        names = ("total", "free", "active", "parked", "chains", "checkpoints", "radix", "reserved")
        return {name: getattr(self, name) * self.unit_bytes for name in names}


def measure(pool: ExtentPool, radix: RadixCache, chains: ChainCache, scheduler: Scheduler) -> EngineStats:
    """Count every unit once."""
    seen: set[int] = set()

    def fresh(units: Iterable[int]) -> int:
        before = len(seen)
        seen.update(units)
        return len(seen) - before

    every = list(chains.chains.values())
    active = [seq.state for seq in (*scheduler.running, *scheduler.finished) if seq.state is not None]
    parked = [seq.state for seq in scheduler.waiting if seq.state is not None]
    return EngineStats(
        unit_bytes=pool.cls.unit_bytes,
        total=pool.total_units,
        free=pool.free_units,
        active=fresh(unit for state in active for unit in state.units),
        parked=fresh(unit for state in parked for unit in state.units),
        chains=fresh(unit for chain in every if chain.state is not None for unit in chain.state.units),
        checkpoints=fresh(unit for chain in every for point in chain.checkpoints for unit in point.state.units),
        radix=fresh(pool.units_of(radix.slices())),
        reserved=scheduler.reserved_units,
        rows=len(scheduler.running),
        finished=len(scheduler.finished),
        waiting_by_priority=Counter(seq.request.priority for seq in scheduler.waiting),
        preempted=sum(seq.preemptions > 0 for seq in scheduler.waiting),
        tally=replace(scheduler.tally),
    )


def check(pool: ExtentPool, radix: RadixCache, chains: ChainCache, scheduler: Scheduler) -> None:
    """Walk every holder and compare with the counts. Raises ArenaError or AssertionError.

    Free and referenced units partition the arena; each sequence is in the one queue of its status; rows are held once; what
    is reserved is free; the clock of the tenants has each that is here.
    """
    sequences = list(scheduler.sequences())
    states = [seq.state for seq in sequences if seq.state is not None]
    held = [part for chain in chains.chains.values() for part in chain.slices()]
    held += [part for state in states for part in state.slices]
    pool.check(held, radix.slices())
    radix.check()
    for status, queue in (
        (Status.WAITING, scheduler.waiting),
        (Status.RUNNING, scheduler.running),
        (Status.FINISHED, scheduler.finished),
    ):
        assert all(seq.status is status for seq in queue)
    assert len({seq.seq_id for seq in sequences}) == len(sequences)
    rows = {seq.row for seq in scheduler.running}
    assert None not in rows
    assert len(rows) == len(scheduler.running) == scheduler.config.max_rows - scheduler.free_rows
    for seq in sequences:
        assert (seq.state is not None) is (seq.status is not Status.WAITING or seq.parked)
        assert (seq.row is None) is (seq.status is not Status.RUNNING)
        assert seq.reserved_units >= 0
        assert seq.status is Status.RUNNING or seq.reserved_units == 0
    needed = [seq.state for seq in (*scheduler.running, *scheduler.finished) if seq.state is not None]
    assert scheduler.oracle.held_units(needed) + scheduler.reserved_units <= pool.total_units
    assert scheduler.reserved_units <= pool.free_units
    assert sum(seq.guaranteed for seq in scheduler.running) <= 1
    for state in (*states, *(chain.state for chain in chains.chains.values() if chain.state is not None)):
        assert len(state.units) == pool.pages(state.length)
        assert state.units == list(pool.units_of(state.slices))
    for name, chain in chains.chains.items():
        assert chain.chain_id == name
        assert chain.active is None or chain.active in sequences
        assert chain.state is None or chain.state.logical_length < len(chain.token_ids)
        assert all(point.length <= len(chain.token_ids) for point in chain.checkpoints)
