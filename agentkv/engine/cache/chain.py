"""Chains: KV addressed by its owner. A chain is a session's resident state with the token ids it was computed from.

The state of a chain of N tokens holds at most N - 1 of them: the last one, usually just sampled, is forwarded by the next
request. Idle chains are memory that can be had back: their KV may go at any time, their token ids never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from agentkv.engine.cache.intervals import common_prefix, edits_to_apply, normal_edits, size
from agentkv.engine.cache.pools import KVPools, Pieces
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.reclaim import Goal
from agentkv.engine.cache.state import KVState
from agentkv.engine.cache.tiers import Warm, WarmTier
from agentkv.engine.core import Edit, Request, Sequence, content_key
from agentkv.engine.units import NOTHING, Units
from agentkv.engine.work import SealWork, Work
from agentkv.errors import BadRequest
from agentkv.types import Interval

LEAST_SHARE = 4
"""A copy to host memory frees at least a quarter of its size."""


@dataclass(slots=True)
class Checkpoint:
    """A turn boundary that can be gone back to: the state when the chain had `length` tokens."""

    length: int
    state: KVState


class Reusable(Protocol):
    """A state of a history, resident or not."""

    logical_length: int
    edits: tuple[Edit, ...]

    def usable(self, limit: int) -> int:
        """Longest length up to `limit` that it can be cut to; 0 if there is none."""
        ...


Holder = TypeVar("Holder", bound=Reusable)


@dataclass(slots=True, eq=False)
class Chain:
    """active: the sequence that is advancing it. boundary: tokens with KV at the last turn boundary. lost: why the state has
    fewer now. warm: a copy of the state in host memory, where there is no state; it may reach further than token_ids do now.
    cuts: lengths of the checkpoints at that time. form: index of the runner's form that it has."""

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
    warm: Warm | None = None
    cuts: tuple[int, ...] = ()
    form: int = 0

    @property
    def key(self) -> str:
        """See Request.key."""
        return content_key(self.salt, self.form)

    @property
    def at_boundary(self) -> bool:
        """Is everything resident that was at the last turn boundary? Only then a prune means the same now as in a replay."""
        return self.state is not None and self.state.logical_length == len(self.token_ids) - 1

    def holders(self) -> Iterator[KVState]:
        """The state, then the checkpoints from the newest on."""
        if self.state is not None:
            yield self.state
        for checkpoint in reversed(self.checkpoints):
            yield checkpoint.state

    def slices(self) -> Iterator[Pieces]:
        """Everything the chain holds."""
        return (holder.slices for holder in self.holders())

    def usable(self, limit: int) -> tuple[KVState, int] | None:
        """The longest state up to `limit` tokens that can be cut out of what is held: its holder and its length.

        Where there are windows, a checkpoint may have slots that the state has let go of.
        """
        found = [(holder, holder.usable(limit)) for holder in self.holders()]
        best = max(found, key=lambda each: each[1], default=None)
        return best if best is not None and best[1] else None

    def continuation(self, request: Request, wanted: tuple[Edit, ...], limit: int) -> tuple[KVState, int, list[Edit]] | None:
        """The holder that can give the most leading tokens of the request, how many, and the edits left to apply.

        A cut is usable if it has seen exactly the edits that the request's history had seen there.
        """
        return self._longest(self.holders(), request, wanted, limit) if self.state is not None else None

    def promise(self, request: Request, wanted: tuple[Edit, ...], limit: int) -> int:
        """How many leading tokens of the request the warm copy can give, once it is restored."""
        found = self._longest([self.warm], request, wanted, limit) if self.warm is not None else None
        return found[1] if found is not None else 0

    def _longest(
        self, holders: Iterable[Holder], request: Request, wanted: tuple[Edit, ...], limit: int
    ) -> tuple[Holder, int, list[Edit]] | None:
        if request.key != self.key:
            return None
        limit = min(limit, common_prefix(self.token_ids, request.token_ids))
        best: tuple[Holder, int, list[Edit]] | None = None
        for holder in holders:
            top = min(limit, holder.logical_length)
            edges = {top}
            for edit in (*holder.edits, *wanted):
                edges |= {edit.at - 1, *(start for start, _ in edit.removed)}
            for length in sorted(edges, reverse=True):
                if (best[1] if best else 0) < length <= top and holder.usable(length) == length:
                    todo = edits_to_apply(normal_edits(holder.edits, length + 1), wanted, length)
                    if todo is not None:
                        best = holder, length, todo
        return best

    def miss_reason(self, request: Request, expected: int) -> str:
        """Why fewer than `expected` tokens could be reused."""
        if request.salt != self.salt:
            return "salt"
        if request.form != self.form:
            return "fingerprint"
        if common_prefix(self.token_ids, request.token_ids) < expected:
            return "diverged"
        if self.state is None or self.state.logical_length < expected:
            return self.lost or "reclaimed"
        return "pruned_not_accepted"


class ChainCache:
    """All chains. tick: a counter shared with the radix cache; keep: turn boundaries kept as checkpoints; tier: where idle
    chains go instead of being dropped."""

    def __init__(self, pools: KVPools, radix: RadixCache, tick: Callable[[], int], keep: int, tier: WarmTier) -> None:
        self.pools = pools
        self.radix = radix
        self.tier = tier
        self.keep = keep
        self.chains: dict[str, Chain] = {}
        self._tick = tick

    def open(self, request: Request, seq: Sequence) -> Chain | None:
        """The chain that the request advances, made where there was none; it is busy from now on."""
        if request.chain_id is None:
            return None
        chain = self.chains.setdefault(request.chain_id, Chain(request.chain_id, request.salt, form=request.form))
        chain.active, chain.suspended, chain.last_used = seq, False, self._tick()
        return chain

    def leave(self, seq: Sequence) -> None:
        """The sequence no longer advances its chain, which stands at its last boundary."""
        chain = self.chains.get(seq.request.chain_id or "")
        if chain is not None and chain.active is seq:
            chain.active = None
            if not chain.token_ids:
                del self.chains[chain.chain_id]

    def advance(self, chain: Chain, token_ids: list[int], state: KVState, request: Request, boundary: int) -> None:
        """A turn is committed: the chain takes over `state`, and a boundary is at the end of `token_ids`.

        boundary: tokens that have been forwarded; `state` has fewer where a window did not reach back as far.
        """
        same = common_prefix(chain.token_ids, token_ids) if request.key == chain.key else 0
        kept = min(same, state.pure_length)
        if kept < min(chain.boundary, len(chain.token_ids) - 1):
            self._disown(chain, kept)
        lengths = [checkpoint.length for checkpoint in chain.checkpoints if checkpoint.length <= same]
        if chain.state is not None:
            chain.state.release()
        self._discard_copy(chain)
        state.trim()
        chain.state, chain.token_ids, chain.salt, chain.form = state, token_ids, request.salt, request.form
        chain.boundary, chain.last_used = boundary, self._tick()
        chain.lost = "reclaimed" if state.logical_length < boundary else ""
        self._recut(chain, [*(length for length in lengths if length < len(token_ids)), len(token_ids)])
        self.radix.insert(chain.key, token_ids, state, chain.chain_id)

    def fork(self, chain: Chain, chain_id: str, length: int) -> Chain:
        """A new chain over the first `length` committed tokens (or all); a busy chain gives its last boundary."""
        if chain_id in self.chains:
            raise BadRequest(f"chain {chain_id!r} exists already", param="chain_id")
        length = _within(chain, length)
        child = Chain(chain_id, chain.salt, chain.token_ids[:length], last_used=self._tick(), lost=chain.lost, form=chain.form)
        child.boundary = min(chain.boundary, max(0, length - 1))
        found = chain.usable(length - 1)
        if found is not None:
            child.state = found[0].fork()
            child.state.cut(found[1])
            points = [checkpoint for checkpoint in chain.checkpoints if checkpoint.length <= length]
            child.checkpoints = [Checkpoint(point.length, point.state.fork()) for point in points]
        elif chain.warm is not None and length > 1:
            child.warm, child.cuts = self.tier.share(chain.warm), chain.cuts
        self.chains[chain_id] = child
        return child

    def rollback(self, chain: Chain, length: int) -> None:
        """Cut the chain back to its first `length` tokens."""
        length = _within(chain, length)
        kept = max(0, length - 1)
        self._disown(chain, kept)
        chain.token_ids = chain.token_ids[:length]
        chain.boundary = min(chain.boundary, kept)
        if self._cut(chain, kept):
            assert chain.state is not None
            self.radix.insert(chain.key, chain.token_ids, chain.state, chain.chain_id)
        elif chain.warm is None or not kept:  # a copy is cut when it is back
            self.lose(chain, chain.lost)

    def drop(self, chain: Chain) -> None:
        """Forget the chain; what others share stays."""
        self.lose(chain, "")
        del self.chains[chain.chain_id]

    def lose(self, chain: Chain, reason: str) -> None:
        """Let the chain's KV go, its copy too; its token ids stay."""
        self._discard_copy(chain)
        self._disown(chain, 0)
        self._recut(chain, [])
        if chain.state is not None:
            chain.state.release()
        chain.state, chain.lost = None, reason

    def demote(self, chain: Chain) -> bool:
        """Move the KV of a chain that no sequence runs on to host memory. False, and nothing happens, where there is none, no
        room for it, or where others hold so much of it that the copy would hardly free anything."""
        if chain.state is None or (chain.active is not None and chain.active.state is not None):
            return False
        if self.pools.bytes(self.unique_units(chain)) * LEAST_SHARE < self.pools.bytes(chain.state.units):
            return False
        warm = self.tier.demote(chain.state, chain.token_ids, chain.salt)
        if warm is None:
            return False
        cuts = tuple(checkpoint.length for checkpoint in chain.checkpoints)
        self.lose(chain, "reclaimed")
        chain.warm, chain.cuts = warm, cuts
        return True

    def restore(self, chain: Chain, room: Callable[[Units], bool]) -> None:
        """Bring a chain's KV back from host memory, as far as the chain reaches now, with those checkpoints that are cuts of
        it; what it shared before is its own now. Where the copy cannot be trusted, `chain.lost` says why. room: see
        `WarmTier.restore`."""
        warm = chain.warm
        if warm is None:
            return None
        state = self.tier.restore(warm, room)
        if state is None:
            if warm.lost:
                chain.warm, chain.lost = None, warm.lost
            return None
        chain.warm, chain.state, chain.lost = None, state, ""
        if not self._cut(chain, len(chain.token_ids) - 1):
            return self.lose(chain, "reclaimed")  # rolled back past where its windows begin
        self._recut(chain, [length for length in chain.cuts if length <= len(chain.token_ids)])
        self.radix.insert(chain.key, chain.token_ids, state, chain.chain_id)
        return None

    def price(self, chain: Chain, intervals: Iterable[Interval]) -> tuple[int, Units]:
        """(tokens, units) that `prune` would free. Negative units: copies of pages that others share cost more than goes."""
        kept = self._prunable(chain, intervals)
        state = chain.state
        if state is None or not kept:
            return 0, NOTHING
        left = [state.left_by(kept)]
        for point in chain.checkpoints:  # what the state still holds of it is a cut of the state afterwards
            pairs = zip(point.state.left_by(kept), point.state.given(state), strict=True)
            left.append([([], 0) if given else own for own, given in pairs])
        retained = [tuple(slices for slices, _ in each) for each in left]
        fresh = NOTHING
        for each in left:
            fresh += Units.of(pages for _, pages in each)
        released = [*self._radix_tail(chain, state.page_floor(kept[0][0])), *chain.slices()]
        return size(kept), self.pools.returned(released, retained) - fresh

    def prune(self, chain: Chain, intervals: Iterable[Interval], acquire: Callable[[Units], Units]) -> list[Work]:
        """Remove the slots of these logical intervals from the state and every checkpoint; the moves to make, in order.

        acquire(n): make n units available if possible; the units that may be used. Where even that is too few, the chain
        loses its KV (reason reclaimed). Nothing happens to a chain that is not wholly resident: its next request replays.
        """
        kept = self._prunable(chain, intervals)
        state = chain.state
        if state is None or not kept:
            return []
        self._disown(chain, state.page_floor(kept[0][0]))
        for point in chain.checkpoints:
            point.state.hollow(state)
        windows = NOTHING
        for point in chain.checkpoints:
            windows += point.state.copy_units(kept)
        wanted = state.copy_units(kept) + windows
        spare = acquire(wanted)
        if not wanted.within(spare):
            self.lose(chain, "reclaimed")
            return []
        moves = state.remove(kept, spare - windows).moves
        for point in chain.checkpoints:
            moves += point.state.remove(kept, point.state.copy_units(kept)).moves
        self._recut(chain, [point.length for point in chain.checkpoints])
        self.radix.insert(chain.key, chain.token_ids, state, chain.chain_id)
        return moves

    def shrink_sealed(self, chain: Chain, works: Iterable[Work]) -> None:
        """The device has carried out a prune: whole units of sealed parts that are empty now are given back."""
        seals = [work for work in works if isinstance(work, SealWork)]
        for holder in chain.holders():
            units = tuple(holding.units for holding in holder.sealed)
            for work in seals:
                if work.new == units:
                    holder.shrink_sealed(work.slots_left)

    def unique_units(self, chain: Chain) -> Units:
        """Units that return when the chain is dropped."""
        return self.pools.returned([*self._radix_tail(chain, 0), *chain.slices()])

    def reclaim_checkpoints(self, goal: Goal) -> None:
        """Let go of checkpoints that alone hold units, least recently used chains first, until the goal is met."""
        for chain in self._by_age(self.chains.values()):
            if goal.met():
                return
            if self.pools.returned(point.state.slices for point in chain.checkpoints):
                self._recut(chain, [])

    def reclaim(self, chains: Iterable[Chain], goal: Goal, *, whole: bool = False) -> None:
        """Demote these chains, or shorten them from their ends, in the order given, until the goal is met.

        whole False: chains that alone would free nothing are left as they are.
        """
        for chain in chains:
            if goal.met():
                return
            if chain.state is not None and (whole or self.unique_units(chain)):
                self._shrink(chain, goal)

    def idle(self, *, suspended: bool) -> list[Chain]:
        """Idle chains, least recently used first."""
        return self._by_age(chain for chain in self.chains.values() if chain.active is None and chain.suspended is suspended)

    def busy(self) -> list[Chain]:
        """Chains with a sequence, the last to come first."""
        return self._by_age(chain for chain in self.chains.values() if chain.active is not None)[::-1]

    def _discard_copy(self, chain: Chain) -> None:
        if chain.warm is not None:
            self.tier.discard(chain.warm)
            chain.warm = None

    def _shrink(self, chain: Chain, goal: Goal) -> None:
        if self.demote(chain):
            return
        if chain.state is not None and not (chain.state.form.seals or any(each.pool.window for each in chain.state.filled)):
            self._recut(chain, [])  # where there are windows, a checkpoint may be all that can be gone back to
        step = goal.pages()
        while chain.state is not None and not goal.met():
            longest = max(chain.state.filled, key=lambda holding: len(holding.units))
            slots = longest.start + (len(longest.units) - step) * longest.pool.page_size
            kept = longest.position(slots) if slots > longest.start else 0
            self._disown(chain, kept)
            if kept and self._cut(chain, kept):
                chain.lost = "reclaimed"
            else:
                self.lose(chain, "reclaimed")
            step *= 2

    def _cut(self, chain: Chain, length: int) -> int:
        """Cut the state to the longest usable length up to `length`, and return that; checkpoints past it go."""
        found = chain.usable(length)
        if found is None or chain.state is None:
            return 0
        holder, kept = found
        if holder is not chain.state:
            state = holder.fork()
            chain.state.release()
            chain.state = state
        chain.state.cut(kept)
        self._recut(chain, [point.length for point in chain.checkpoints if point.length <= kept + 1])
        return kept

    def _prunable(self, chain: Chain, intervals: Iterable[Interval]) -> list[Interval]:
        """What a prune of these intervals would remove."""
        return chain.state.kept(intervals) if chain.state is not None and chain.at_boundary else []

    def _disown(self, chain: Chain, keep: int) -> None:
        """Take the chain's own entries from token `keep` on out of the prefix cache, with the page that `keep` lies in."""
        self.radix.disown(chain.key, chain.token_ids, chain.chain_id, keep - keep % self.pools.page_lcm)

    def _radix_tail(self, chain: Chain, keep: int) -> list[Pieces]:
        keep -= keep % self.pools.page_lcm
        return [node.slices for node in self.radix.tail(chain.key, chain.token_ids, chain.chain_id, keep)]

    def _recut(self, chain: Chain, lengths: list[int]) -> None:
        """Keep checkpoints at these lengths only, as cuts of the state, so that they have seen the same prunes and share its
        pages. Right because KV is append-only: a cut of the state is the state as it was at that boundary. What the state
        has let go of, a window behind it, is the checkpoint's own.
        """
        old = {checkpoint.length: checkpoint for checkpoint in chain.checkpoints}
        chain.checkpoints = []
        for length in lengths[-self.keep :] if self.keep else []:
            assert chain.state is not None
            kept = min(max(0, length - 1), chain.state.logical_length)
            if chain.state.usable(kept) == kept:
                state = chain.state.fork()
                state.cut(kept)
                chain.checkpoints.append(Checkpoint(length, state))
            elif length in old and old[length].state.recut(chain.state):
                chain.checkpoints.append(old.pop(length))
        for checkpoint in old.values():
            checkpoint.state.release()

    def _by_age(self, chains: Iterable[Chain]) -> list[Chain]:
        return sorted(chains, key=lambda chain: chain.last_used)


def _within(chain: Chain, length: int) -> int:
    if length < 0:
        raise BadRequest(f"length={length} is negative", param="length")
    return min(length, len(chain.token_ids))
