"""How the scheduler asks what a sequence will need and what can be had back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from agentkv.engine.cache.chain import ChainCache
from agentkv.engine.cache.extents import ExtentPool
from agentkv.engine.cache.intervals import clip, size, subtract
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import Edit
from agentkv.types import Interval


class Cost(NamedTuple):
    """Units beyond those a state has now. peak: most at any moment; resident: at the end."""

    peak: int
    resident: int


class MemoryOracle(Protocol):
    """What the scheduler knows of memory."""

    @property
    def total_units(self) -> int:
        """Units of the whole arena."""
        ...

    @property
    def free_units(self) -> int:
        """Units that nobody holds."""
        ...

    def cost(self, state: KVState | None, edits: Sequence[Edit], length: int) -> Cost:
        """What growing to `length` logical tokens takes, from nothing or from a state, with the edits on the way."""
        ...

    def held_units(self, states: Iterable[KVState]) -> int:
        """Different units that these states hold."""
        ...

    def reclaim(self, units: int, *, keep: str | None = None) -> int:
        """Give cached memory back until `units` units have returned; how many did. keep: a chain that is not touched."""
        ...

    def shrink(self, state: KVState, units: int, least: int) -> bool:
        """Cut a state from its end until `units` units have returned. False: fewer than `least` logical tokens, or none, would
        have been left of it, and it was released."""
        ...


class PagedOracle:
    """`MemoryOracle` over one pool: whatever no running sequence holds can be had back.

    Order of reclaim: what only checkpoints hold, suspended chains, the prefix cache, idle chains, all least recently used
    first; then chains whose sequence waits or runs (it goes on from its own state; only going back would prefill).
    """

    def __init__(self, pool: ExtentPool, radix: RadixCache, chains: ChainCache) -> None:
        self.pool = pool
        self.radix = radix
        self.chains = chains

    @property
    def total_units(self) -> int:
        """Units of the whole arena."""
        return self.pool.total_units

    @property
    def free_units(self) -> int:
        """Units that nobody holds."""
        return self.pool.free_units

    def cost(self, state: KVState | None, edits: Sequence[Edit], length: int) -> Cost:
        """See MemoryOracle. Exact up to the copy of a shared last page, which is always counted."""
        forecast = _Forecast(self.pool, state)
        for edit in edits:
            forecast.grow(edit.at - 1)
            forecast.remove(edit.removed)
        forecast.grow(length)
        return Cost(forecast.peak, forecast.own)

    def held_units(self, states: Iterable[KVState]) -> int:
        """Different units that these states hold."""
        return len({unit for state in states for unit in state.units})

    def reclaim(self, units: int, *, keep: str | None = None) -> int:
        """See MemoryOracle."""
        before = self.pool.free_units
        goal, chains = before + units, self.chains
        suspended, idle, busy = (
            [chain for chain in group if chain.chain_id != keep]
            for group in (chains.idle(suspended=True), chains.idle(suspended=False), chains.busy())
        )
        chains.reclaim_checkpoints(goal)
        chains.reclaim(suspended, goal)
        self._reclaim_radix(goal)
        chains.reclaim(idle, goal)
        self._reclaim_radix(goal)
        for chain in (*suspended, *idle, *busy):  # chains that hold the same units free them only together
            chains.reclaim([chain], goal, whole=True)
            self._reclaim_radix(goal)
        return self.pool.free_units - before

    def shrink(self, state: KVState, units: int, least: int) -> bool:
        """See MemoryOracle."""
        goal, step = self.pool.free_units + units, units
        while self.pool.free_units < goal:
            kept = state.position(max(0, len(state.units) - step) * self.pool.page_size)
            if not max(1, least) <= kept < state.logical_length:
                state.release()
                return False
            state.cut(kept)
            step *= 2
        return True

    def _reclaim_radix(self, goal: int) -> None:
        if self.pool.free_units < goal:
            self.radix.reclaim(goal - self.pool.free_units)


class _Forecast:
    """Plays a sequence's future in numbers. shared: leading pages that others hold too; own: units taken so far."""

    def __init__(self, pool: ExtentPool, state: KVState | None) -> None:
        self.pool = pool
        self.runs: list[Interval] = list(state.runs) if state else []
        self.logical = state.logical_length if state else 0
        self.slots = state.length if state else 0
        self.shared = state.shared_pages if state else 0
        self.start = pool.pages(self.slots) - self.shared  # pages it holds alone already
        self.own = self.peak = 0

    def grow(self, length: int) -> None:
        if length <= self.logical:
            return
        if self.slots % self.pool.page_size:
            self.shared = min(self.shared, self.slots // self.pool.page_size)  # writing copies a shared last page
        self.runs.append((self.logical, length))
        self.slots += length - self.logical
        self.logical = length
        self._settle()

    def remove(self, intervals: Iterable[Interval]) -> None:
        removed = clip(intervals, 0, self.logical)
        kept = subtract(self.runs, removed)
        slots = size(kept)
        if slots == self.slots:
            return
        before = next(start for start, _ in subtract(self.runs, kept))
        first = size(clip(self.runs, 0, before))
        page = first // self.pool.page_size
        if slots > first:
            fresh = self.pool.pages(slots) - page
            self.peak = max(self.peak, self.own + min(fresh, max(0, self.shared - page) + 1))
            self.shared = min(self.shared, page)
        self.runs, self.slots = kept, slots
        self.shared = min(self.shared, self.pool.pages(slots))
        self._settle()

    def _settle(self) -> None:
        self.own = self.pool.pages(self.slots) - self.shared - self.start
        self.peak = max(self.peak, self.own)
