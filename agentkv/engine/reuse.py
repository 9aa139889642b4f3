"""What a sequence takes of the KV that is there already, and what it leaves to others.

The longest usable state: that of the sequence whose prompt it shares, its chain's (from host memory, if that gives more), the
prefix cache's, else an empty one.
"""

from __future__ import annotations

from collections.abc import Callable

from agentkv.engine.cache.chain import Chain, ChainCache
from agentkv.engine.cache.intervals import common_prefix, edits_to_apply, normal_edits
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.radix import RadixCache
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import Edit, Sequence
from agentkv.types import Miss


class Reuse:
    """restore(chain): bring a chain's warm copy back into the arena, if there is room."""

    def __init__(self, pools: KVPools, radix: RadixCache, chains: ChainCache, restore: Callable[[Chain], None]) -> None:
        self.pools = pools
        self.radix = radix
        self.chains = chains
        self._restore = restore

    def resume(self, seq: Sequence, fresh: bool) -> None:
        """Give the sequence the longest usable state: its chain's, else the prefix cache's, else an empty one."""
        request, limit = seq.request, len(seq.token_ids) - 1
        wanted = normal_edits(request.edits, seq.num_prompt_tokens)
        chain = self.chains.chains.get(request.chain_id or "")
        plain = 0 if fresh else min([limit, *(edit.at - 1 for edit in wanted)])
        most = min(limit, len(request.token_ids) - 1)
        promised = chain.promise(request, wanted, most) if chain is not None and not fresh else 0
        if chain is not None and promised > self.radix.match(request.key, seq.token_ids, plain).length:
            self._restore(chain)
        held = self._held(seq, chain, wanted, most) if not fresh else None
        match = self.radix.match(request.key, seq.token_ids, plain)
        if held is not None and held[1] >= match.length:
            holder, length, todo = held
            state = holder.fork()
            state.cut(length)
        else:
            form = self.pools.forms[request.form]
            state, todo = KVState.of(self.pools, match.length, match.pieces, form), list(wanted)
        seq.shared_until = match.path if match.path > state.logical_length else 0
        seq.state, seq.pending_edits = state, todo
        if not seq.preemptions:
            seq.num_cached_tokens = state.logical_length
            seq.miss = self._miss(seq, chain, fresh)

    def _held(
        self, seq: Sequence, chain: Chain | None, wanted: tuple[Edit, ...], limit: int
    ) -> tuple[KVState, int, list[Edit]] | None:
        """A state to fork, how much of it, and the edits left to apply: the leader's, which has the whole prompt, else the
        chain's."""
        leader = seq.leader
        if leader is not None and leader.state is not None and not leader.prefilling:
            todo = edits_to_apply(normal_edits(leader.state.edits, limit + 1), wanted, limit)
            if todo is not None and leader.state.usable(limit) == limit:
                return leader.state, limit, todo
        return chain.continuation(seq.request, wanted, limit) if chain is not None else None

    def revive(self, seq: Sequence) -> None:
        """Leave the windows that end here to whoever begins with the same tokens."""
        assert seq.state is not None
        self.radix.revive(seq.request.key, seq.token_ids[: seq.shared_until], seq.state)
        seq.shared_until = 0

    def share(self, seq: Sequence) -> None:
        """The prompt is forwarded: whoever comes from now on shares its whole pages. (A page that is being filled is shared
        at the commit: nobody else may become its writer. So are windows: a reservation counts on their pages being let go.)
        They are the sequence's alone until then, and go with it."""
        assert seq.state is not None
        if any(holding.pool.window is not None for holding in seq.state.filled):
            return
        seq.shared_as = f"\0{seq.seq_id}"
        page_size = self.pools.page_lcm
        shared = seq.num_prompt_tokens // page_size * page_size
        self.radix.insert(seq.request.key, seq.token_ids, seq.state, seq.shared_as, limit=shared)

    def unshare(self, seq: Sequence) -> None:
        """It no longer stands behind what it shared: a parked state holds its pages alone, so that they can be had."""
        if seq.shared_as is not None:
            self.radix.disown(seq.request.key, seq.token_ids[: seq.num_prompt_tokens], seq.shared_as, 0)
        seq.shared_as = None

    def _miss(self, seq: Sequence, chain: Chain | None, fresh: bool) -> Miss | None:
        reused, limit = seq.num_cached_tokens, seq.num_prompt_tokens - 1
        if chain is None or not chain.token_ids:
            return Miss(reason="new", tokens=limit - reused) if reused < limit else None
        expected = min(chain.boundary, limit)
        if reused >= expected:
            return None
        if fresh:
            return Miss(reason="reclaimed", tokens=expected - reused, detail="no room beside the resident state")
        return Miss(reason=chain.miss_reason(seq.request, expected), tokens=expected - reused)

    def cut_out(self, seq: Sequence, chain: Chain | None, length: int) -> KVState:
        """What is held of the first `length` tokens: of the sequence, or of its chain where a window reaches back too far."""
        assert seq.state is not None
        holder, kept = seq.state, seq.state.usable(length)
        if chain is not None and length and not kept:
            found = chain.usable(min(length, common_prefix(chain.token_ids, seq.token_ids)))
            if found is not None and chain.key == seq.request.key and found[0].same_edits(seq.state, found[1]):
                holder, kept = found
        state = holder.fork()
        state.cut(kept)
        return state
