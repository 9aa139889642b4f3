"""How the scheduler asks what a sequence will need and what can be had back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from agentkv.engine.cache.chain import LEAST_SHARE, ChainCache
from agentkv.engine.cache.extents import ExtentPool
from agentkv.engine.cache.holding import Holding
from agentkv.engine.cache.intervals import clip, size, subtract
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.reclaim import Goal, Room, reclaim
from agentkv.engine.cache.state import KVState
from agentkv.engine.cache.tiers import Warm
from agentkv.engine.core import Edit
from agentkv.engine.form import Bound, Form
from agentkv.engine.units import Units
from agentkv.types import Interval

SLACK = 20
"""Where somebody with a better claim waits for memory, others start only beside a free twentieth of it."""


class Cost(NamedTuple):
    """Units beyond those a state has now. peak: most at any moment; resident: at the end. bound: most that it can be owed
    later on, when it has let go of pages that it had at the start and needs others in their place."""

    peak: Units
    resident: Units
    bound: Units


class MemoryOracle(Protocol):
    """What the scheduler knows of memory. Amounts are by group: units of one are of no use to another while they are held."""

    def cost(
        self,
        state: KVState | None,
        edits: Sequence[Edit],
        length: int,
        *,
        shared_until: int = 0,
        form: int = 0,
        prompt: int = 0,
    ) -> Cost:
        """What growing to `length` logical tokens takes, from nothing (then of this form) or from a state, with the edits on
        the way; where it is shared_until tokens long, others begin to hold what it holds. prompt: length at which it is
        sealed, where the form seals."""
        ...

    def fits(self, units: Units) -> bool:
        """Could they be had if nobody held anything?"""
        ...

    def claim(self, units: Units) -> bool:
        """Set these free units aside, in place of the last claim; False, and nothing changes, if they cannot be had now.
        Others' units may move."""
        ...

    @property
    def compactions(self) -> int:
        """How often units were moved: tables on the device are out of date when it changes."""
        ...

    def unclaimed(self, claimed: Units) -> Units:
        """Free units by group beside these claims."""
        ...

    def hold(self, on: bool) -> None:
        """Does what is freed from here on stay where the next claim finds it?"""
        ...

    def has_room(self, states: Iterable[KVState], claimed: Units) -> bool:
        """Is there room for what these states hold and for the claims, if everything else is reclaimed?"""
        ...

    def reclaim(self, claimed: Units, *, keep: str | None = None) -> Units:
        """Give cached memory back until these units can be claimed; what has returned. keep: a chain that is not touched."""
        ...

    def plenty(self, claimed: Units) -> bool:
        """Do these claims leave a twentieth of the memory free?"""
        ...

    def shrink(self, state: KVState, claimed: Units, least: int) -> bool:
        """Cut a state from its end until these units can be claimed. False: fewer than `least` logical tokens, or none, would
        have been left of it, and it was released."""
        ...

    def demote(self, state: KVState, claimed: Units, token_ids: Sequence[int], salt: str) -> Warm | None:
        """Copy a state to host memory and release it. None, and nothing happens, where there is no room for the copy, or where
        it costs more than to compute again what a cut would lose for these claims."""
        ...

    def restore(self, warm: Warm) -> KVState | None:
        """The state of a copy, in units that were claimed for it; None where it cannot be had. The copy is gone either way.
        Raises EngineFault; then it is not."""
        ...

    def forget(self, warm: Warm) -> None:
        """Nobody needs the copy any more."""
        ...


class PagedOracle:
    """`MemoryOracle` over the pools: whatever no running sequence holds can be had back.

    Order of reclaim: what only checkpoints hold, suspended chains, the prefix cache, idle chains, all least recently used
    first (chains go to the warm tier where it takes them); then chains whose sequence waits or runs (it goes on from its own
    state; only going back would prefill).
    step_tokens: most tokens of a sequence in one step.
    """

    def __init__(self, pools: KVPools, radix: RadixCache, chains: ChainCache, step_tokens: int) -> None:
        self.pools = pools
        self.radix = radix
        self.chains = chains
        self.step_tokens = step_tokens

    def cost(
        self,
        state: KVState | None,
        edits: Sequence[Edit],
        length: int,
        *,
        shared_until: int = 0,
        form: int = 0,
        prompt: int = 0,
    ) -> Cost:
        """See MemoryOracle. Exact for full groups, up to the copy of a shared last page, which is always counted."""
        fresh = self.pools.forms[form]
        return cost(self.pools, self.step_tokens, state, edits, length, shared_until=shared_until, form=fresh, prompt=prompt)

    def fits(self, units: Units) -> bool:
        """See MemoryOracle."""
        return self.pools.fits(units, empty=True)

    def claim(self, units: Units) -> bool:
        """See MemoryOracle."""
        return self.pools.claim(units)

    @property
    def compactions(self) -> int:
        """See MemoryOracle."""
        return self.pools.arena.compactions

    def unclaimed(self, claimed: Units) -> Units:
        """See MemoryOracle."""
        return self.pools.unclaimed(claimed)

    def hold(self, on: bool) -> None:
        """See MemoryOracle."""
        self.pools.arena.sticky = on

    def has_room(self, states: Iterable[KVState], claimed: Units) -> bool:
        """See MemoryOracle."""
        held = self.pools.distinct(state.slices for state in states)
        return self.pools.granules(held + claimed) <= self.pools.arena.num_granules

    def reclaim(self, claimed: Units, *, keep: str | None = None) -> Units:
        """See MemoryOracle."""
        before = self.pools.used
        goal, chains = Room(self.pools, claimed), self.chains
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
        return before - self.pools.used

    def plenty(self, claimed: Units) -> bool:
        """See MemoryOracle."""
        arena = self.pools.arena
        left = arena.free_bytes - self.pools.bytes(claimed)
        return left * SLACK >= arena.free_bytes + arena.used_bytes

    def shrink(self, state: KVState, claimed: Units, least: int) -> bool:
        """See MemoryOracle."""
        goal = Room(self.pools, claimed)
        step = goal.pages()
        while not goal.met():
            longest = max(state.filled, key=lambda holding: len(holding.units))
            slots = longest.start + (len(longest.units) - step) * longest.pool.page_size
            kept = longest.position(slots) if slots > longest.start else 0
            if not max(1, least) <= kept < state.logical_length or not state.usable(kept):
                state.release()
                return False
            state.cut(kept)
            step *= 2
        return True

    def demote(self, state: KVState, claimed: Units, token_ids: Sequence[int], salt: str) -> Warm | None:
        """See MemoryOracle. To lose less than a quarter of a state costs less than to copy all of it; and what others hold of
        it is not freed by a copy."""
        lacking = self.pools.bytes(claimed) - self.pools.arena.free_bytes
        freed = self.pools.bytes(self.pools.returned([state.slices]))
        if min(lacking, freed) * LEAST_SHARE < self.pools.bytes(state.units):
            return None
        warm = self.chains.tier.demote(state, token_ids, salt)
        if warm is not None:
            state.release()
        return warm

    def restore(self, warm: Warm) -> KVState | None:
        """See MemoryOracle."""
        state = self.chains.tier.restore(warm)
        if state is None:
            self.forget(warm)
        return state

    def forget(self, warm: Warm) -> None:
        """See MemoryOracle."""
        self.chains.tier.discard(warm)

    def _reclaim_radix(self, goal: Goal) -> None:
        if not goal.met():
            reclaim(self.radix, goal)


def cost(
    pools: KVPools,
    step_tokens: int,
    state: KVState | None,
    edits: Sequence[Edit],
    length: int,
    *,
    shared_until: int = 0,
    form: Form | None = None,
    prompt: int = 0,
) -> Cost:
    """See `MemoryOracle.cost`. step_tokens: most tokens of a sequence in one step. form: where there is no state yet, None is
    the first."""
    form = state.form if state is not None else form or pools.forms[0]
    if form.bound is not None:
        return _sealing_cost(pools, form, state, edits, form.bound(prompt or length, length), prompt or length)
    costs = []
    for pool in pools.pools:
        if pool.group in form.groups:
            forecast = _Forecast(pool, state.holdings[pool.group] if state is not None else Holding(pool), state)
            forecast.play(edits, length)
            costs.append(_filled_cost(pool, forecast, step_tokens, shared_until, edited=bool(edits)))
        else:
            costs.append((0, 0, 0))
    return Cost(*(Units(counts) for counts in zip(*costs, strict=True)))


def _filled_cost(
    pool: ExtentPool, forecast: _Forecast, step_tokens: int, shared_until: int, *, edited: bool
) -> tuple[int, int, int]:
    peak = most = forecast.peak
    if pool.window is not None:  # a compaction has a page more than its window; what is shared later is not used again
        reach = pool.pages(pool.page_size - 1 + pool.window - 1 + pool.slack + step_tokens)
        peak += reach if shared_until else 0
        limit = reach * (2 if shared_until else 1) + edited
        most, peak = min(peak, limit), max(0, min(peak, limit - forecast.start))
    return peak, min(forecast.own, peak), most


def _sealing_cost(pools: KVPools, form: Form, state: KVState | None, edits: Sequence[Edit], bound: Bound, prompt: int) -> Cost:
    """The same where the form seals: the whole prompt lies in the tail until its seal, beside the sealed part that is there
    already, and then no more than the bound."""
    unsealed = state is None or (state.logical_length <= prompt and state.sealed_at < prompt)
    sealed = dict(zip(form.sealed, bound.units, strict=True))
    costs = []
    for pool in pools.pools:
        holding = state.holdings[pool.group] if state is not None else Holding(pool)
        if pool.group in sealed:
            alone = state is None or state.owned or not pool.mutable
            start = sum(pool.exclusive(held).bit_count() for held in holding.slices)
            most = sealed[pool.group] + (0 if alone else holding.shared_units())
            if unsealed:
                most += len(holding.units) if edits else start  # a prune writes it anew
                most = max(most, (start + len(holding.units)) * bool(edits))
        elif pool.group in form.groups:
            forecast = _Forecast(pool, holding, state)
            forecast.play(edits, prompt + form.replay_most(prompt) if unsealed else 0)
            start = forecast.start  # a tail begins and ends inside a page
            most = max(start + forecast.peak, pool.pages(bound.tail) + 2)
        else:
            start = most = 0
        peak = max(0, most - start)
        costs.append((peak, peak, max(most, start)))
    return Cost(*(Units(counts) for counts in zip(*costs, strict=True)))


class _Forecast:
    """Plays a sequence's future in one group in numbers, as if nothing were ever let go behind a window.

    shared: leading pages that others hold too; start: pages that it holds alone already; own: units taken so far.
    """

    def __init__(self, pool: ExtentPool, holding: Holding, state: KVState | None) -> None:
        self.pool = pool
        self.runs: list[Interval] = list(holding.runs)
        self.logical = state.logical_length if state else 0
        self.base = holding.start
        self.slots = holding.length
        self.shared = holding.shared_pages
        self.start = pool.pages(self.slots) - self.shared
        if pool.mutable and state is not None and not state.owned:
            self.shared = holding.first_page  # what others hold is copied
        self.own = self.peak = 0

    def play(self, edits: Iterable[Edit], length: int) -> None:
        """Grow to `length` logical tokens, with the edits on the way."""
        for edit in edits:
            self.grow(edit.at - 1)
            self.remove(edit.removed)
        self.grow(length)

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
        slots = self.base + size(kept)
        if slots == self.slots:
            return
        before = next(start for start, _ in subtract(self.runs, kept))
        first = self.base + size(clip(self.runs, 0, before))
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
