"""The prefix cache: KV addressed by its content, shared by everyone of one tenant.

One tree a salt. An edge is a run of token ids and may be split at any token; a node holds slices of exactly the slots of
its own tokens, so the page in which an edge was split is held by both halves. Only KV that is a function of the token
ids alone may enter: never what was computed after a prune. Positions are absolute, because a path starts at token 0.

A node remembers which chains wrote it. When the last of them lets go and no other node hangs below, it is removed; what
requests without a chain have written is removed by reclaim alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from agentkv.engine.cache.extents import ExtentPool, Slice
from agentkv.engine.cache.intervals import common_prefix
from agentkv.engine.cache.state import KVState

ANYONE = ""
"""Owner of what requests without a chain have written."""


class Node:
    """An edge and its end. tokens: ids of the edge; start: position of the first; pieces: slices of their slots."""

    __slots__ = ("children", "last_used", "owners", "parent", "pieces", "salt", "start", "tokens")

    def __init__(self, salt: str, tokens: list[int], start: int, parent: Node | None) -> None:
        self.salt = salt
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.pieces: list[Slice] = []
        self.children: dict[int, Node] = {}
        self.owners: set[str] = set()
        self.last_used = 0

    @property
    def end(self) -> int:
        """Position behind the edge."""
        return self.start + len(self.tokens)


class RadixCache:
    """Token-granular longest-prefix cache. tick: a counter shared with the chains, for recency.

    enabled False: it stays empty (methods whose KV is no function of the token prefix).
    """

    def __init__(self, pool: ExtentPool, tick: Callable[[], int], *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self._tick = tick
        self._roots: dict[str, Node] = {}

    def match(self, salt: str, ids: Sequence[int], limit: int) -> list[Slice]:
        """Pieces of the longest cached prefix of `ids`, at most `limit` tokens; nothing is retained.

        `KVState.of` makes a state of them. A match may end inside an edge and inside a page.
        """
        now = self._tick()
        pieces: list[Slice] = []
        for node, count in self._walk(salt, ids[:limit]):
            node.last_used = now
            pieces += _between(node.pieces, 0, count)
        return pieces

    def insert(self, salt: str, ids: Sequence[int], state: KVState, owner: str | None, *, limit: int | None = None) -> None:
        """Cache the state's KV up to its first hole; `ids` are at least its tokens. What is cached already stays.

        owner: the chain that the state belongs to, None for a request without one. limit: tokens that are cached at most.
        """
        length = state.pure_length if limit is None else min(limit, state.pure_length)
        if not length or not self.enabled:
            return
        name, now, done = owner or ANYONE, self._tick(), 0
        parent = self._roots.setdefault(salt, Node(salt, [], 0, None))
        for node, count in self._walk(salt, ids[:length]):
            parent = node if count == len(node.tokens) else self._split(node, count)
            parent.last_used = now
            parent.owners.add(name)
            done += count
        if done < length:
            leaf = Node(salt, list(ids[done:length]), done, parent)
            leaf.last_used = now
            leaf.owners.add(name)
            leaf.pieces = state.between(done, length)
            self.pool.retain(leaf.pieces, cached=True)
            parent.children[leaf.tokens[0]] = leaf

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
            self._remove(node)
        for node in self._path(salt, ids, owner, keep):
            node.owners.discard(owner)
            if not node.owners:
                node.owners.add(ANYONE)  # others continue below it

    def reclaim(self, units: int) -> int:
        """Remove least recently used leaves until `units` units have really returned; how many did.

        A leaf stays if nothing on its path lives by the cache alone: removing it would free nothing, now or later.
        """
        before = self.pool.free_units
        goal = before + units
        number = itertools.count()
        leaves = [(node.last_used, next(number), node) for node in self.nodes() if not node.children]
        heapify(leaves)
        while leaves and self.pool.free_units < goal:
            _, _, leaf = heappop(leaves)
            if not any(self.pool.only_cached(node.pieces) for node in _upwards(leaf)):
                continue
            spare = len(leaf.tokens) - (goal - self.pool.free_units) * self.pool.page_size
            if spare > 0 and self.pool.only_cached(leaf.pieces):
                self._split(leaf, spare)  # its head may stay
            parent = leaf.parent
            self._remove(leaf)
            if parent is not None and not parent.children and parent.parent is not None:
                heappush(leaves, (parent.last_used, next(number), parent))
        return self.pool.free_units - before

    def nodes(self) -> Iterator[Node]:
        """Every node that holds KV."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def slices(self) -> Iterator[Slice]:
        """Every slice the cache holds."""
        for node in self.nodes():
            yield from node.pieces

    def check(self) -> None:
        """Edges, positions and piece lengths are consistent. Raises AssertionError."""
        for node in self.nodes():
            assert node.parent is not None
            assert node.tokens, "empty edge"
            assert node.parent.children[node.tokens[0]] is node
            assert node.start == node.parent.end
            assert node.owners
            assert sum(piece.stop - piece.start for piece in node.pieces) == len(node.tokens)

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
                self._split(node, keep - node.start)
            if node.start >= keep:
                out.append(node)
        return out

    def _split(self, node: Node, count: int) -> Node:
        """Cut the edge after `count` tokens; `node` becomes the lower half, the upper is returned."""
        assert node.parent is not None
        assert 0 < count < len(node.tokens)
        upper = Node(node.salt, node.tokens[:count], node.start, node.parent)
        upper.last_used, upper.owners = node.last_used, set(node.owners)
        upper.pieces = _between(node.pieces, 0, count)
        lower = _between(node.pieces, count, len(node.tokens))
        self.pool.retain([*upper.pieces, *lower], cached=True)
        self.pool.release(node.pieces, cached=True)
        node.parent.children[upper.tokens[0]] = upper
        node.pieces, node.tokens, node.start, node.parent = lower, node.tokens[count:], node.start + count, upper
        upper.children[node.tokens[0]] = node
        return upper

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        self.pool.release(leaf.pieces, cached=True)
        del leaf.parent.children[leaf.tokens[0]]
        if leaf.parent.parent is None and not leaf.parent.children:
            del self._roots[leaf.salt]


def _upwards(node: Node) -> Iterator[Node]:
    """The node and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _between(pieces: list[Slice], low: int, high: int) -> list[Slice]:
    """Slots [low, high) of pieces that follow one another."""
    out: list[Slice] = []
    position = 0
    for extent, start, stop in pieces:
        a, b = max(low, position), min(high, position + stop - start)
        if a < b:
            out.append(Slice(extent, start + a - position, start + b - position))
        position += stop - start
    return out
