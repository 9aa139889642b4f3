"""Where the arena's units are, and whether every account of them is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentkv.engine.cache.chain import ChainCache
from agentkv.engine.cache.extents import ExtentPool
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.core import Batch, Status, StepOutput
from agentkv.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the arena's units are; free + active + chains + checkpoints + radix = total.

    A unit held by several is counted for the first of: active (sequences), chains, checkpoints, radix.
    """

    unit_bytes: int
    total: int
    free: int
    active: int
    chains: int
    checkpoints: int
    radix: int
    reserved: int
    rows: int
    waiting: int
    finished: int

    @property
    def bytes(self) -> dict[str, int]:
        """The same in bytes."""
        names = ("total", "free", "active", "chains", "checkpoints", "radix", "reserved")
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


def measure(pool: ExtentPool, radix: RadixCache, chains: ChainCache, scheduler: Scheduler) -> EngineStats:
    """Count every unit once."""
    seen: set[int] = set()

    def fresh(units: Iterable[int]) -> int:
        before = len(seen)
        seen.update(units)
        return len(seen) - before

    every = list(chains.chains.values())
    states = [seq.state for seq in scheduler.sequences() if seq.state is not None]
    return EngineStats(
        unit_bytes=pool.cls.unit_bytes,
        total=pool.total_units,
        free=pool.free_units,
        active=fresh(unit for state in states for unit in state.units),
        chains=fresh(unit for chain in every if chain.state is not None for unit in chain.state.units),
        checkpoints=fresh(unit for chain in every for point in chain.checkpoints for unit in point.state.units),
        radix=fresh(pool.units_of(radix.slices())),
        reserved=scheduler.reserved_units,
        rows=len(scheduler.running),
        waiting=len(scheduler.waiting),
        finished=len(scheduler.finished),
    )


def check(pool: ExtentPool, radix: RadixCache, chains: ChainCache, scheduler: Scheduler) -> None:
    """Walk every holder and compare with the counts. Raises ArenaError or AssertionError.

    Free and referenced units partition the arena; each sequence is in the one queue of its status; rows are held once; what
    is reserved can be had.
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
        assert (seq.state is None) is (seq.status is Status.WAITING)
        assert (seq.row is None) is (seq.status is not Status.RUNNING)
        assert seq.reserved_units >= 0
        assert seq.status is Status.RUNNING or seq.reserved_units == 0
    assert scheduler.oracle.held_units(states) + scheduler.reserved_units <= pool.total_units
    for state in (*states, *(chain.state for chain in chains.chains.values() if chain.state is not None)):
        assert len(state.units) == pool.pages(state.length)
        assert state.units == list(pool.units_of(state.slices))
    for name, chain in chains.chains.items():
        assert chain.chain_id == name
        assert chain.active is None or chain.active in sequences
        assert chain.state is None or chain.state.logical_length < len(chain.token_ids)
        assert all(point.length <= len(chain.token_ids) for point in chain.checkpoints)
