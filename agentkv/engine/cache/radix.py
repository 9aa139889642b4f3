"""The prefix cache: KV addressed by its content, shared by everyone of one tenant.

One tree a salt. An edge is a run of token ids and may be split at any token; a node holds slices of exactly the slots of
its own tokens, so the page in which an edge was split is held by both halves. Only KV that is a function of the token
ids alone may enter: never what was computed after a prune. Positions are absolute, because a path starts at token 0.

Full groups have slots in every node. A window group has all of a node's slots or none: the state that was inserted has
let go of what lies behind its window. A prefix can be continued where its window is there, so a match may be shorter
than the path. Who has to compute such a path again leaves the window at its end for the next one (`Reuse.revive`): where
two requests part, others will too (Marconi, MLSys 2025, caches recurrent states by the same rule).

A node remembers which chains wrote it. When the last of them lets go and no other node hangs below, it is removed; what
requests without a chain have written is removed by reclaim alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.cache.intervals import common_prefix
from agentkv.engine.cache.pools import KVPools, Pieces
from agentkv.engine.cache.state import KVState

ANYONE = ""
"""Owner of what requests without a chain have written."""


class Node:
    """An edge and its end. tokens: ids of the edge; start: position of the first; pieces: by group, slices of their slots, None
    where a window group has let go of them."""

    __slots__ = ("children", "last_used", "owners", "parent", "pieces", "salt", "start", "tokens")

    def __init__(self, salt: str, tokens: list[int], start: int, parent: Node | None) -> None:
        self.salt = salt
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.pieces: list[list[Slice] | None] = []
        self.children: dict[int, Node] = {}
        self.owners: set[str] = set()
        self.last_used = 0

    @property
    def end(self) -> int:
        """Position behind the edge."""
        return self.start + len(self.tokens)

    @property
    def slices(self) -> Pieces:
        """Everything it holds."""
        return tuple(each or [] for each in self.pieces)


class Match(NamedTuple):
    """A cached prefix: how long, and by group the pieces that end there. `KVState.of` makes a state of it. path: tokens that
    somebody has computed, more than `length` where their windows are gone."""

    length: int
    pieces: Pieces
    path: int = 0


class RadixCache:
    """Token-granular longest-prefix cache. tick: a counter shared with the chains, for recency.

    enabled False: it stays empty (methods whose KV is no function of the token prefix).
    """

    def __init__(self, pools: KVPools, tick: Callable[[], int], *, enabled: bool = True) -> None:
        self.pools = pools
        self.enabled = enabled
        self.tick = tick
        self._roots: dict[str, Node] = {}

    def match(self, salt: str, ids: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of `ids` that can be continued, at most `limit` tokens; nothing is retained.

        It may end inside an edge and inside a page.
        """
        now = self.tick()
        path = list(self._walk(salt, ids[:limit]))
        for node, _ in path:
            node.last_used = now
        known = _end(path)
        while path and not all(self._whole(path, pool) for pool in self.pools.pools):
            path.pop()
        return Match(_end(path), tuple(self._pieces(path, pool) for pool in self.pools.pools), known)

    def insert(self, salt: str, ids: Sequence[int], state: KVState, owner: str | None, *, limit: int | None = None) -> None:
        """Cache the state's KV up to its first hole; `ids` are at least its tokens. What is cached already stays.

        owner: the chain that the state belongs to, None for a request without one. limit: tokens that are cached at most.
        """
        length = state.pure_length if limit is None else min(limit, state.pure_length)
        if not length or not self.enabled or state.form.reuse != "radix" or state.sealed_at:
            return  # where tokens were sealed, the tail alone is no prefix
        name, now, done = owner or ANYONE, self.tick(), 0
        parent = self._roots.setdefault(salt, Node(salt, [], 0, None))
        for node, count in self._walk(salt, ids[:length]):
            parent = node if count == len(node.tokens) else self.split(node, count)
            parent.last_used = now
            parent.owners.add(name)
            done += count
        if done < length:
            leaf = Node(salt, list(ids[done:length]), done, parent)
            leaf.last_used = now
            leaf.owners.add(name)
            leaf.pieces = [None] * len(self.pools.pools)
            parent.children[leaf.tokens[0]] = leaf
        self._fill(salt, ids[:length], state)

    def revive(self, salt: str, ids: Sequence[int], state: KVState) -> None:
        """Give a cached path the windows that end with it, from the state of these `ids`; nothing is done past its end."""
        for node, count in list(self._walk(salt, ids)):
            if count < len(node.tokens):
                self.split(node, count)
        self._fill(salt, ids, state)

    def tail(self, salt: str, ids: Sequence[int], owner: str, keep: int) -> list[Node]:
        """Nodes of `ids` from token `keep` on that only this chain has written, deepest first; they go by `disown`.

        May split an edge at `keep`, which changes nothing that can be seen.
        """
        path = self._path(salt, ids, owner, keep)
        out: list[Node] = []
        for node in reversed(path):
            if node.owners != {owner} or any(child not in out for child in node.children.values()):
                break
            out.append(node)
        return out

    def disown(self, salt: str, ids: Sequence[int], owner: str, keep: int) -> None:
        """The chain no longer stands behind tokens from `keep` on: its unique tail is removed, shared parts stay."""
        for node in self.tail(salt, ids, owner, keep):
            self.remove(node)
        for node in self._path(salt, ids, owner, keep):
            node.owners.discard(owner)
            if not node.owners:
                node.owners.add(ANYONE)  # others continue below it

    def clear(self) -> None:
        """Forget everything."""
        for node in self.nodes():
            for pool, held in zip(self.pools.pools, node.pieces, strict=True):
                pool.release(held or [], cached=True)
        self._roots.clear()

    def nodes(self) -> Iterator[Node]:
        """Every node that holds KV."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def slices(self) -> Iterator[Pieces]:
        """Everything the cache holds."""
        for node in self.nodes():
            yield node.slices

    def split(self, node: Node, count: int) -> Node:
        """Cut the edge after `count` tokens, 0 < count < its length; `node` becomes the lower half, the upper is returned."""
        assert node.parent is not None
        assert 0 < count < len(node.tokens)
        upper = Node(node.salt, node.tokens[:count], node.start, node.parent)
        upper.last_used, upper.owners = node.last_used, set(node.owners)
        for pool, held in zip(self.pools.pools, node.pieces, strict=True):
            upper.pieces.append(None if held is None else between(held, 0, count))
            if held is not None:
                lower = between(held, count, len(node.tokens))
                pool.retain([*(upper.pieces[-1] or []), *lower], cached=True)
                pool.release(held, cached=True)
                node.pieces[pool.group] = lower
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.start, node.parent = node.tokens[count:], node.start + count, upper
        upper.children[node.tokens[0]] = node
        return upper

    def remove(self, leaf: Node) -> None:
        """Forget a node that no other hangs below."""
        assert leaf.parent is not None
        assert not leaf.children
        for pool, held in zip(self.pools.pools, leaf.pieces, strict=True):
            pool.release(held or [], cached=True)
        del leaf.parent.children[leaf.tokens[0]]
        if leaf.parent.parent is None and not leaf.parent.children:
            del self._roots[leaf.salt]

    def drop_windows(self, node: Node) -> None:
        """Let go of the window groups' slots: the path stays, but can no longer be continued from here."""
        for pool in self.pools.pools:
            if pool.window is not None:
                pool.release(node.pieces[pool.group] or [], cached=True)
                node.pieces[pool.group] = None

    def check(self) -> None:
        """Edges, positions and piece lengths are consistent. Raises AssertionError."""
        for node in self.nodes():
            assert node.parent is not None
            assert node.tokens, "empty edge"
            assert node.parent.children[node.tokens[0]] is node
            assert node.start == node.parent.end
            assert node.owners
            for pool, held in zip(self.pools.pools, node.pieces, strict=True):
                alone = len(self.pools.forms) == 1 and pool.group in self.pools.forms[0].groups
                assert held is not None or pool.window is not None or not alone
                assert held is None or sum(piece.stop - piece.start for piece in held) == len(node.tokens)

    def _whole(self, path: list[tuple[Node, int]], pool: ExtentPool) -> bool:
        """Does the pool have the window that ends where the path does?"""
        if pool.window is None:
            return True
        low = max(0, _end(path) - (pool.window - 1))
        for node, _ in reversed(path):
            if node.end <= low:
                break
            if node.pieces[pool.group] is None:
                return False
        return True

    def _pieces(self, path: list[tuple[Node, int]], pool: ExtentPool) -> list[Slice]:
        """The path's pieces: all of them, or those that reach back without a gap, as far as a window with its slack."""
        out: list[list[Slice]] = []
        low = 0 if pool.window is None else max(0, _end(path) - (pool.window - 1) - pool.slack)
        for node, count in reversed(path):
            held = node.pieces[pool.group]
            if held is None or node.end <= low:
                break
            out.append(between(held, max(0, low - node.start), count))
        return [piece for each in reversed(out) for piece in each]

    def _fill(self, salt: str, ids: Sequence[int], state: KVState) -> None:
        """Give the nodes of `ids` what they lack and the state holds."""
        for holding in state.filled:
            pool = holding.pool
            low = holding.start  # as a position: nothing was pruned up to the end of `ids`
            for node, _ in list(self._walk(salt, ids)):
                if node.pieces[pool.group] is None and node.end > low:
                    if node.start < low:
                        self.split(node, low - node.start)
                    held = holding.between(node.start, node.end)
                    pool.retain(held, cached=True)
                    node.pieces[pool.group] = held

    def _walk(self, salt: str, ids: Sequence[int]) -> Iterator[tuple[Node, int]]:
        """(node, matching tokens of its edge) along the longest match of `ids`."""
        node = self._roots.get(salt)
        done = 0
        while node is not None and done < len(ids):
            node = node.children.get(ids[done])
            if node is None:
                return
            count = common_prefix(node.tokens, ids[done : done + len(node.tokens)])
            whole = count == len(node.tokens)
            yield node, count
            done += count
            if not whole:
                return

    def _path(self, salt: str, ids: Sequence[int], owner: str, keep: int) -> list[Node]:
        """Nodes that the chain has written on the way of `ids`, from token `keep` on, shallowest first."""
        out = []
        for node, count in list(self._walk(salt, ids)):
            if count < len(node.tokens) or owner not in node.owners:
                break
            if node.start < keep < node.end:
                self.split(node, keep - node.start)
            if node.start >= keep:
                out.append(node)
        return out


def _end(path: list[tuple[Node, int]]) -> int:
    """Position behind a path of (node, tokens of its edge)."""
    return path[-1][0].start + path[-1][1] if path else 0


def between(pieces: list[Slice], low: int, high: int) -> list[Slice]:
    """Slots [low, high) of pieces that follow one another."""
    out: list[Slice] = []
    position = 0
    for extent, start, stop in pieces:
        a, b = max(low, position), min(high, position + stop - start)
        if a < b:
            out.append(Slice(extent, start + a - position, start + b - position))
        position += stop - start
    return out
