"""Chains: KV addressed by its owner. A chain is a session's resident state with the token ids it was computed from.

The state of a chain of N tokens holds at most N - 1 of them: the last one, usually just sampled, is forwarded by the next
request. Idle chains are memory that can be had back: their KV may go at any time, their token ids never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.cache.intervals import common_prefix, edits_to_apply, merged, normal_edits, size
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.state import KVState, Moves
from agentkv.engine.core import Edit, Request, Sequence
from agentkv.errors import BadRequest
from agentkv.types import Interval


@dataclass(slots=True)
class Checkpoint:
    """A turn boundary that can be gone back to: the state when the chain had `length` tokens."""

    length: int
    state: KVState


@dataclass(slots=True, eq=False)
class Chain:
    """active: the sequence that is advancing it. boundary: tokens with KV at the last turn boundary. lost: why the state has
    fewer now."""

    chain_id: str
    salt: str
    token_ids: list[int] = field(default_factory=list)
    state: KVState | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    active: Sequence | None = None
    last_used: int = 0
    suspended: bool = False
    boundary: int = 0
    lost: str = ""

    @property
    def at_boundary(self) -> bool:
        """Is everything resident that was at the last turn boundary? Only then a prune means the same now as in a replay."""
        return self.state is not None and self.state.logical_length == len(self.token_ids) - 1

    def slices(self) -> Iterator[Slice]:
        """Everything the chain holds."""
        if self.state is not None:
            yield from self.state.slices
        for checkpoint in self.checkpoints:
            yield from checkpoint.state.slices

    def continuation(self, request: Request, wanted: tuple[Edit, ...], limit: int) -> tuple[int, list[Edit]]:
        """How many leading tokens of the request the state can give, and the edits left to apply; (0, wanted) if none.

        A cut of the state is usable if it has seen exactly the edits that the request's history had seen there.
        """
        if self.state is None or request.salt != self.salt:
            return 0, list(wanted)
        top = min(limit, self.state.logical_length, common_prefix(self.token_ids, request.token_ids))
        edges = {top}
        for edit in (*self.state.edits, *wanted):
            edges |= {edit.at - 1, *(start for start, _ in edit.removed)}
        for length in sorted(edges, reverse=True):
            if 0 < length <= top:
                todo = edits_to_apply(normal_edits(self.state.edits, length + 1), wanted, length)
                if todo is not None:
                    return length, todo
        return 0, list(wanted)

    def miss_reason(self, request: Request, expected: int) -> str:
        """Why fewer than `expected` tokens could be reused."""
        if request.salt != self.salt:
            return "salt"
        if common_prefix(self.token_ids, request.token_ids) < expected:
            return "diverged"
        if self.state is None or self.state.logical_length < expected:
            return self.lost or "reclaimed"
        return "pruned_not_accepted"


class ChainCache:
    """All chains. tick: a counter shared with the radix cache; keep: turn boundaries kept as checkpoints."""

    def __init__(self, pool: ExtentPool, radix: RadixCache, tick: Callable[[], int], keep: int) -> None:
        self.pool = pool
        self.radix = radix
        self.keep = keep
        self.chains: dict[str, Chain] = {}
        self._tick = tick

    def open(self, request: Request, seq: Sequence) -> Chain | None:
        """The chain that the request advances, made where there was none; it is busy from now on."""
        if request.chain_id is None:
            return None
        chain = self.chains.setdefault(request.chain_id, Chain(request.chain_id, request.salt))
        chain.active, chain.suspended, chain.last_used = seq, False, self._tick()
        return chain

    def leave(self, seq: Sequence) -> None:
        """The sequence no longer advances its chain, which stands at its last boundary."""
        chain = self.chains.get(seq.request.chain_id or "")
        if chain is not None and chain.active is seq:
            chain.active = None
            if not chain.token_ids:
                del self.chains[chain.chain_id]

    def advance(self, chain: Chain, token_ids: list[int], state: KVState, salt: str) -> None:
        """A turn is committed: the chain takes over `state`, and a boundary is at the end of `token_ids`."""
        same = common_prefix(chain.token_ids, token_ids) if salt == chain.salt else 0
        kept = min(same, state.pure_length)
        if kept < min(chain.boundary, len(chain.token_ids) - 1):
            self._disown(chain, kept)
        lengths = [checkpoint.length for checkpoint in chain.checkpoints if checkpoint.length <= same]
        if chain.state is not None:
            chain.state.release()
        chain.state, chain.token_ids, chain.salt = state, token_ids, salt
        chain.boundary, chain.lost, chain.last_used = state.logical_length, "", self._tick()
        self._recut(chain, [*(length for length in lengths if length < len(token_ids)), len(token_ids)])
        self.radix.insert(salt, token_ids, state, chain.chain_id)

    def fork(self, chain: Chain, chain_id: str, length: int) -> Chain:
        """A new chain over the first `length` committed tokens (or all); a busy chain gives its last boundary."""
        if chain_id in self.chains:
            raise BadRequest(f"chain {chain_id!r} exists already", param="chain_id")
        length = _within(chain, length)
        child = Chain(chain_id, chain.salt, chain.token_ids[:length], last_used=self._tick(), lost=chain.lost)
        child.boundary = min(chain.boundary, max(0, length - 1))
        if chain.state is not None and length > 1:
            child.state = chain.state.fork()
            child.state.cut(length - 1)
            self._recut(child, [checkpoint.length for checkpoint in chain.checkpoints if checkpoint.length <= length])
        self.chains[chain_id] = child
        return child

    def rollback(self, chain: Chain, length: int) -> None:
        """Cut the chain back to its first `length` tokens."""
        length = _within(chain, length)
        kept = max(0, length - 1)
        self._disown(chain, kept)
        found = next((checkpoint for checkpoint in chain.checkpoints if checkpoint.length == length), None)
        if found is not None and chain.state is not None:
            chain.state.release()
            chain.state = found.state.fork()
        chain.token_ids = chain.token_ids[:length]
        chain.boundary = min(chain.boundary, kept)
        if chain.state is not None:
            chain.state.cut(kept)
            self._recut(chain, [checkpoint.length for checkpoint in chain.checkpoints if checkpoint.length <= length])
            self.radix.insert(chain.salt, chain.token_ids, chain.state, chain.chain_id)
        if not kept:
            self.lose(chain, chain.lost)

    def drop(self, chain: Chain) -> None:
        """Forget the chain; what others share stays."""
        self.lose(chain, "")
        del self.chains[chain.chain_id]

    def lose(self, chain: Chain, reason: str) -> None:
        """Let the chain's KV go; its token ids stay."""
        self._disown(chain, 0)
        self._recut(chain, [])
        if chain.state is not None:
            chain.state.release()
        chain.state, chain.lost = None, reason

    def price(self, chain: Chain, intervals: Iterable[Interval]) -> tuple[int, int]:
        """(tokens, units) that `prune` would free. Negative units: copies of pages that others share cost more than goes."""
        state, slots = self._prunable(chain, intervals)
        if state is None or not slots:
            return 0, 0
        first, tail = slots[0][0], len(slots) == 1 and slots[0][1] == state.length
        floor = first - first % self.pool.page_size
        fresh = 0 if tail else self.pool.pages(state.length - size(slots)) - self.pool.pages(floor)
        released = [*self._radix_tail(chain, state.position(floor)), *chain.slices()]
        retained = state.between(0, first if tail else floor)
        return size(slots), self.pool.returned(released, retained) - fresh

    def prune(self, chain: Chain, intervals: Iterable[Interval], acquire: Callable[[int], int]) -> list[Moves]:
        """Remove the slots of these logical intervals from the state and every checkpoint; the moves to make, in order.

        acquire(n): make n units available if possible; the units that may be used. Where even that is too few, the chain
        loses its KV (reason reclaimed). Nothing happens to a chain that is not wholly resident: its next request replays.
        """
        state, slots = self._prunable(chain, intervals)
        if state is None or not slots:
            return []
        lengths = [checkpoint.length for checkpoint in chain.checkpoints]
        self._recut(chain, [])
        self._disown(chain, state.position(slots[0][0] - slots[0][0] % self.pool.page_size))
        wanted = state.copy_units(intervals)
        spare = acquire(wanted)
        if spare < wanted:
            self.lose(chain, "reclaimed")
            return []
        change = state.remove(intervals, spare)
        self._recut(chain, lengths)
        self.radix.insert(chain.salt, chain.token_ids, state, chain.chain_id)
        return change.moves

    def unique_units(self, chain: Chain) -> int:
        """Units that return when the chain is dropped."""
        return self.pool.returned([*self._radix_tail(chain, 0), *chain.slices()])

    def reclaim_checkpoints(self, goal: int) -> None:
        """Let go of checkpoints that alone hold units, least recently used chains first, until `goal` units are free."""
        for chain in self._by_age(self.chains.values()):
            if self.pool.free_units >= goal:
                return
            if self.pool.returned([part for checkpoint in chain.checkpoints for part in checkpoint.state.slices]):
                self._recut(chain, [])

    def reclaim(self, chains: Iterable[Chain], goal: int, *, whole: bool = False) -> None:
        """Shorten these chains from their ends, in the order given, until `goal` units are free.

        whole False: chains that alone would free nothing are left as they are.
        """
        for chain in chains:
            if self.pool.free_units >= goal:
                return
            if chain.state is not None and (whole or self.unique_units(chain)):
                self._shrink(chain, goal)

    def idle(self, *, suspended: bool) -> list[Chain]:
        """Idle chains, least recently used first."""
        return self._by_age(chain for chain in self.chains.values() if chain.active is None and chain.suspended is suspended)

    def busy(self) -> list[Chain]:
        """Chains with a sequence, the last to come first."""
        return self._by_age(chain for chain in self.chains.values() if chain.active is not None)[::-1]

    def _shrink(self, chain: Chain, goal: int) -> None:
        self._recut(chain, [])
        step = goal - self.pool.free_units
        while self.pool.free_units < goal and chain.state is not None:
            slots = max(0, len(chain.state.units) - step) * self.pool.page_size
            kept = chain.state.position(slots)
            if slots:
                self._disown(chain, kept)
                chain.state.cut(kept)
                chain.lost = "reclaimed"
            else:
                self.lose(chain, "reclaimed")
            step *= 2

    def _prunable(self, chain: Chain, intervals: Iterable[Interval]) -> tuple[KVState | None, list[Interval]]:
        if chain.state is None or not chain.at_boundary:
            return None, []
        return chain.state, chain.state.slots_of(merged(intervals))

    def _disown(self, chain: Chain, keep: int) -> None:
        """Take the chain's own entries from token `keep` on out of the prefix cache, with the page that `keep` lies in."""
        keep -= keep % self.pool.page_size
        self.radix.disown(chain.salt, chain.token_ids, chain.chain_id, keep)

    def _radix_tail(self, chain: Chain, keep: int) -> list[Slice]:
        nodes = self.radix.tail(chain.salt, chain.token_ids, chain.chain_id, keep)
        return [piece for node in nodes for piece in node.pieces]

    def _recut(self, chain: Chain, lengths: list[int]) -> None:
        """Make the checkpoints anew as cuts of the state, so that they have seen the same prunes and share its pages.

        Right because KV is append-only: a cut of the state is the state as it was at that boundary.
        """
        old, chain.checkpoints = chain.checkpoints, []
        for length in lengths[-self.keep :] if self.keep else []:
            assert chain.state is not None
            state = chain.state.fork()
            state.cut(max(0, length - 1))
            chain.checkpoints.append(Checkpoint(length, state))
        for checkpoint in old:
            checkpoint.state.release()

    def _by_age(self, chains: Iterable[Chain]) -> list[Chain]:
        return sorted(chains, key=lambda chain: chain.last_used)


def _within(chain: Chain, length: int) -> int:
    if length < 0:
        raise BadRequest(f"length={length} is negative", param="length")
    return min(length, len(chain.token_ids))
