"""Where the arena's units are, and whether every account of them is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from agentkv.engine.cache.chain import ChainCache
from agentkv.engine.cache.intervals import size
from agentkv.engine.cache.pools import KVPools, Pieces
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.state import KVState
from agentkv.engine.cache.tiers import WarmTier
from agentkv.engine.core import Batch, Status, StepOutput
from agentkv.engine.preempt import Tally
from agentkv.engine.scheduler import Scheduler
from agentkv.engine.units import NOTHING, Units


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the arena's units are; free + active + parked + chains + checkpoints + radix = total.

    A unit held by several is counted for the first of: active (running and finished sequences), parked (preempted ones),
    chains, checkpoints, radix. Where groups have units of different sizes, all counts are in the largest size that divides
    them. waiting: sequences by priority; preempted: those of them that have run before. fragmented: bytes by unit class that
    are free but that the class cannot have without moves; moved_bytes: what moves have copied so far. warm_bytes: copies in
    host memory; demotions, restores: how many were made and used so far.
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
    fragmented: dict[str, int]
    moved_bytes: int
    warm_bytes: int
    demotions: int
    restores: int

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return sum(self.waiting_by_priority.values())

    @property
    def bytes(self) -> dict[str, int]:
        """The same in bytes."""
        names = ("total", "free", "active", "parked", "chains", "checkpoints", "radix", "reserved")
        return {name: getattr(self, name) * self.unit_bytes for name in names}


@dataclass(slots=True)
class Decoding:
    """What was made by the steps that read no part of a prompt. seconds: of their host and device work.

    drafted, accepted: guesses of prompt lookup that were forwarded in any step, and those that came true and were kept.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def add(self, batch: Batch, outputs: Sequence[StepOutput], seconds: float) -> None:
        """Count a step that took `seconds`."""
        made = sum(len(output.token_ids) for output in outputs)
        drafted = sum(work.drafted for work in batch.rows)
        if drafted:
            self.drafted += drafted
            self.accepted += sum(max(0, len(output.token_ids) - 1) for output in outputs)
        if batch.rows and all(work.decodes for work in batch.rows):
            self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + made, self.seconds + seconds


def measure(pools: KVPools, radix: RadixCache, chains: ChainCache, scheduler: Scheduler, tier: WarmTier) -> EngineStats:
    """Count every unit once."""
    seen: list[set[int]] = [set() for _ in pools.pools]
    unit = gcd(*(pool.cls.unit_bytes for pool in pools.pools))

    def fresh(held: Iterable[Pieces]) -> int:
        before = [len(each) for each in seen]
        for pieces in held:
            for pool, units, slices in zip(pools.pools, seen, pieces, strict=True):
                units.update(pool.units_of(slices))
        added = (len(units) - count for units, count in zip(seen, before, strict=True))
        return sum(count * pool.cls.unit_bytes for count, pool in zip(added, pools.pools, strict=True)) // unit

    every = list(chains.chains.values())
    active = [seq.state.slices for seq in (*scheduler.running, *scheduler.finished) if seq.state is not None]
    parked = [seq.state.slices for seq in scheduler.waiting if seq.state is not None]
    total = (pools.arena.used_bytes + pools.arena.free_bytes) // unit
    return EngineStats(
        unit_bytes=unit,
        total=total,
        free=total - pools.arena.used_bytes // unit,
        active=fresh(active),
        parked=fresh(parked),
        chains=fresh(chain.state.slices for chain in every if chain.state is not None),
        checkpoints=fresh(point.state.slices for chain in every for point in chain.checkpoints),
        radix=fresh(radix.slices()),
        reserved=pools.bytes(scheduler.reserved_units) // unit,
        rows=len(scheduler.running),
        finished=len(scheduler.finished),
        waiting_by_priority=Counter(seq.request.priority for seq in scheduler.waiting),
        preempted=sum(seq.preemptions > 0 for seq in scheduler.waiting),
        tally=replace(scheduler.tally),
        fragmented={cls.name: pools.arena.fragmented_bytes(cls) for cls in list(pools.arena.shelves)},
        moved_bytes=pools.arena.moved_bytes,
        warm_bytes=tier.used_bytes,
        demotions=tier.demotions,
        restores=tier.restores,
    )


def check(pools: KVPools, radix: RadixCache, chains: ChainCache, scheduler: Scheduler, tier: WarmTier) -> None:
    """Walk every holder and compare with the counts. Raises ArenaError or AssertionError.

    Free and referenced units partition the arena; each sequence is in the one queue of its status; rows are held once; what
    is reserved is free, and enough for whoever runs on a form that seals; the clock of the tenants has each that is here.
    """
    sequences = list(scheduler.sequences())
    states = [seq.state for seq in sequences if seq.state is not None]
    held = [pieces for chain in chains.chains.values() for pieces in chain.slices()]
    pools.check([*held, *(state.slices for state in states)], radix.slices())
    radix.check()
    tier.check()
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
        assert NOTHING.within(seq.reserved_units)
        assert seq.status is Status.RUNNING or not seq.reserved_units
        assert seq.warm is None or (seq.status is Status.WAITING and seq.state is None)
        assert seq.warm is None or seq.warm.parts is None or tier.holds(seq.warm)
        if seq.status is Status.RUNNING and seq.state is not None and seq.state.form.seals:
            assert scheduler.owes(seq).within(seq.reserved_units)
    needed = [seq.state for seq in (*scheduler.running, *scheduler.finished) if seq.state is not None]
    assert scheduler.oracle.has_room(needed, scheduler.reserved_units)
    assert scheduler.reserved_units.within(Units.of(pools.arena.claimed(pool.cls) for pool in pools.pools))
    assert sum(seq.guaranteed for seq in scheduler.running) <= 1
    for state in (*states, *(holder for chain in chains.chains.values() for holder in chain.holders())):
        _check_state(state)
    for name, chain in chains.chains.items():
        assert chain.chain_id == name
        assert chain.active is None or chain.active in sequences
        assert chain.warm is None or (chain.state is None and (chain.warm.parts is None or tier.holds(chain.warm)))
        assert chain.state is None or chain.state.logical_length < len(chain.token_ids)
        assert all(point.length <= len(chain.token_ids) for point in chain.checkpoints)


def _check_state(state: KVState) -> None:
    """Its slots are where its tokens say, and every window that may be needed is whole."""
    assert state.length == size(state.runs)
    assert state.usable(state.logical_length) == state.logical_length
    assert state.slots <= state.floor <= state.sealed_at <= state.logical_length
    assert state.form.seals or not state.sealed_at
    assert not state.owned or not any(state.holdings[group].shared_units() for group in state.form.mutable)
    for holding in state.holdings:
        pool = holding.pool
        assert pool.group in (*state.form.groups, *state.form.sealed) or not holding.units
        if pool.sealed:
            assert holding.length == len(holding.units) * pool.page_size
            assert holding.units == list(pool.units_of(holding.slices))
            assert bool(holding.units) is (state.slots > 0 and pool.group in state.form.sealed)
            assert len(holding.units) <= 1 or not pool.whole
            continue
        assert holding.length == holding.start + size(holding.runs)
        assert holding.start % pool.page_size == 0
        assert holding.units == list(pool.units_of(holding.slices))
        assert len(holding.units) == pool.pages(holding.length) - holding.first_page
        if pool.group not in state.form.groups:
            continue
        held = [(max(start, holding.floor), end) for start, end in state.runs if end > holding.floor]
        assert holding.runs == held
        assert pool.window is not None or state.form.seals or (holding.start, holding.floor) == (0, 0)
        assert pool.window is not None or holding.floor <= state.floor
