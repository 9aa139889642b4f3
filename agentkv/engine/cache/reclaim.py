"""Giving cached prefixes back: which of them, and how many are enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.radix import Node, RadixCache
from agentkv.engine.units import Units

KNEE = 16_384
"""Position at which attention over what lies before costs about as much as the rest of the model does for a token: it is six
times the hidden size, for models of two to three thousand."""


class Goal(Protocol):
    """What memory is given back for."""

    def met(self) -> bool:
        """Is there enough?"""
        ...

    def pages(self) -> int:
        """Pages that a group is short of, at least 1."""
        ...


class Room:
    """The goal that so many units can be claimed together."""

    def __init__(self, pools: KVPools, claimed: Units) -> None:
        self.pools = pools
        self.claimed = claimed

    def met(self) -> bool:
        """See Goal."""
        return self.pools.fits(self.claimed)

    def pages(self) -> int:
        """See Goal."""
        return max(1, *(self.claimed - self.pools.free).counts)


def reclaim(radix: RadixCache, goal: Goal) -> None:
    """Forget what is worth least until the goal is met.

    A node's **waste** is what it holds times how long nobody used it, over what it would cost to compute again; per token,
    where a token at position p costs 1 + p / KNEE (its linear and its quadratic part). The one with the most waste goes: a
    leaf, from its end on and no more of it than needed, or of a node further up what windows hold. A leaf stays if nothing
    on its path lives by the cache alone: removing it would free nothing, now or later.
    """
    pools, now, number, gone = radix.pools, radix.tick(), itertools.count(), set[Node]()
    sizes = [(pool, pool.cls.unit_bytes / pool.page_size) for pool in pools.pools]
    windows = [pool.group for pool in pools.pools if pool.window is not None]

    def rated(node: Node, *, leaf: bool) -> tuple[float, int, Node, bool]:
        size = sum(size for pool, size in sizes if node.pieces[pool.group] and (leaf or pool.window is not None))
        waste = (now - node.last_used) * size / (1 + (node.start + node.end) / 2 / KNEE)
        return -waste, next(number), node, leaf

    heap = [rated(node, leaf=not node.children) for node in radix.nodes() if not node.children or windows]
    heapify(heap)
    while heap and not goal.met():
        _, _, node, leaf = heappop(heap)
        if node in gone or (leaf and node.children):
            continue
        if not leaf:
            if any(pools.pools[group].only_cached(node.pieces[group] or []) for group in windows):
                radix.drop_windows(node)
        elif any(pools.only_cached(each.slices) for each in _upwards(node)):
            spare = len(node.tokens) - goal.pages() * pools.page_lcm
            if spare > 0 and pools.only_cached(node.slices):
                radix.split(node, spare)  # its head may stay
            parent = node.parent
            radix.remove(node)
            gone.add(node)
            if parent is not None and not parent.children and parent.parent is not None:
                heappush(heap, rated(parent, leaf=True))


def _upwards(node: Node) -> Iterator[Node]:
    """The node and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
