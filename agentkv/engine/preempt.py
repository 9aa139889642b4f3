"""Who has to make way, and what becomes of their KV.

A preempted sequence waits again and its state is **parked**: it holds its units as long as nobody else needs them, and goes on
from what is left of it. Parked states are active work, so they are given up after every cached one, the last in the queue
first: each goes to host memory whole, where the warm tier takes it, or is cut from its end, no further than needed, where that
is cheaper. What was lost is forwarded again as a prompt chunk; tokens that were drawn stay drawn.

There is no livelock. A higher priority preempts a lower one and never the other way round; the elder (see `queue`) preempts
those that passed it over, and is not preempted itself.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agentkv.engine.core import Sequence
from agentkv.engine.oracle import MemoryOracle
from agentkv.engine.units import Units

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """What happened since the start. recomputed: tokens that were forwarded again because their KV had gone."""

    preemptions: int = 0
    recomputed: int = 0
    deadline_misses: int = 0


def rivals(seq: Sequence, running: Iterable[Sequence], *, elder: bool) -> list[Sequence]:
    """Running sequences that must make way for a waiting one, those that make way last first.

    That is a lower priority; for the elder also whoever passed it over, by the rule of `queue.WaitingQueue`.
    """
    running = list(running)
    by_tenant = Counter(other.request.salt for other in running)
    alone = not by_tenant[seq.request.salt]

    def yields(other: Sequence) -> bool:
        if other.guaranteed:
            return False
        if other.request.priority < seq.request.priority:
            return True
        crowd = alone and by_tenant[other.request.salt] > 1 and other.request.priority == seq.request.priority
        return elder and (other.seq_id > seq.seq_id or crowd)

    return sorted(filter(yields, running), key=lambda other: (-other.request.priority, other.seq_id))


def victims(
    seq: Sequence,
    peak: Units,
    makes_way: list[Sequence],
    others: list[Sequence],
    rows: int,
    oracle: MemoryOracle,
) -> list[Sequence] | None:
    """The fewest from the end of `makes_way` without whom a sequence with this peak fits; None where all are too few.

    others: running and finished sequences that stay. rows: rows that the ones of `makes_way` and the sequence can have.
    """

    def fits(kept: int) -> bool:
        stay = [*others, *makes_way[:kept]]
        states = [each.state for each in (*stay, seq) if each.state is not None]
        claimed = sum((each.reserved_units for each in stay), peak)
        return kept < rows and oracle.has_room(states, claimed)

    if not fits(0):
        return None
    kept = bisect_left(range(1, len(makes_way) + 1), True, key=lambda kept: not fits(kept))
    return makes_way[kept:]


def shed(parked: Iterable[Sequence], claimed: Units, oracle: MemoryOracle) -> bool:
    """Claim these units, giving up parked states, in this order, for as long as that fails; did it not in the end?"""
    for seq in parked:
        if oracle.claim(claimed):
            return True
        assert seq.state is not None
        seq.warm = oracle.demote(seq.state, claimed, seq.token_ids, seq.request.salt)
        if seq.warm is not None:
            seq.state, seq.shared_until = None, 0
            continue
        least = max((edit.at - 1 for edit in seq.state.edits), default=0)  # below it a cut has seen prunes too early
        if not oracle.shrink(seq.state, claimed, least):
            seq.state = None
        if not oracle.claim(claimed):
            oracle.reclaim(claimed)  # what it shared with a cache
    return oracle.claim(claimed)


def tell_preempted(seq: Sequence, by: Sequence, held: int) -> None:
    """One structured line: who lost its row, to whom, and how much KV is parked."""
    log.info(
        "sequence %d (priority %d) was preempted by %d (priority %d): %d tokens parked",
        seq.seq_id,
        seq.request.priority,
        by.seq_id,
        by.request.priority,
        held,
        extra={"event": "preempted", "seq_id": seq.seq_id, "by": by.seq_id, "parked_tokens": held},
    )


def tell_resumed(seq: Sequence, lost: int) -> None:
    """One structured line: a preempted sequence runs again, and what its preemption cost."""
    log.info(
        "sequence %d runs again: %d tokens are forwarded again",
        seq.seq_id,
        lost,
        extra={"event": "resumed", "seq_id": seq.seq_id, "recomputed_tokens": lost},
    )
