"""Which tokens run next: decodes first, then prompt chunks in the token budget, first come first served.

Admission reserves the peak of a sequence's whole life, so an admitted one always finishes and there is no preemption.
No torch; memory is known through the oracle alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from agentkv.engine.cache.state import Change, KVState
from agentkv.engine.core import Batch, EngineConfig, Reach, RowWork, Sequence, Status, TableUpdate
from agentkv.engine.oracle import MemoryOracle
from agentkv.engine.units import NOTHING, Units


class Scheduler:
    """Two queues: waiting (no memory, no row) and running (a row, a state, a reservation).

    resume(seq, fresh): give the sequence the state it continues from (fresh: none) and its pending edits.
    finished: sequences that ended and still hold their state until they are committed or aborted. batch: the step that is
    being put together; its moves are carried out before anything else touches the device's memory.
    """

    def __init__(self, config: EngineConfig, oracle: MemoryOracle, resume: Callable[[Sequence, bool], None]) -> None:
        self.config = config
        self.oracle = oracle
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.batch = Batch(rows=[])
        self._compactions = 0
        self._resume = resume
        self._rows = list(range(config.max_rows))
        self._blocked = False
        self._unsettled = False  # what is reserved is not what is claimed
        heapify(self._rows)

    @property
    def reserved_units(self) -> Units:
        """Units that running sequences may still take; they are claimed, so nobody else can."""
        return sum((seq.reserved_units for seq in self.running), NOTHING)

    @property
    def free_rows(self) -> int:
        """Rows of the page table that no sequence has."""
        return len(self._rows)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that is not closed."""
        yield from (*self.waiting, *self.running, *self.finished)

    def spare_units(self, seq: Sequence | None = None) -> Units:
        """Free units that nobody else has a claim on."""
        return self.oracle.unclaimed(self.reserved_units - (seq.reserved_units if seq else NOTHING))

    def settle(self) -> None:
        """Claim what is reserved, no more."""
        found = self.oracle.claim(self.reserved_units)
        assert found, "what was reserved is gone"
        self._unsettled = False

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)
        self._blocked = False

    def finish(self, seq: Sequence) -> None:
        """It makes no more tokens: row and reservation are given back, the state stays."""
        self._leave_row(seq)
        seq.status = Status.FINISHED
        self.finished.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take the sequence out of whatever queue it is in and let its state go. Idempotent."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.RUNNING:
            self._leave_row(seq)
        elif seq.status is Status.FINISHED:
            self.finished.remove(seq)
        seq.status = Status.CLOSED
        if seq.state is not None:
            seq.state.release()
        seq.state = None
        self._blocked = False

    def memory_changed(self) -> None:
        """Something else gave memory back: the head of the queue is worth another try."""
        self._blocked = False

    def schedule(self) -> Batch:
        """The next step; empty when nothing can run."""
        self.batch = batch = Batch(rows=[])
        while self._rows and not self._blocked and (head := self._head()) is not None:
            self._blocked = not self._admit(head)
        self._follow_moves(batch)
        self.oracle.hold(True)
        for seq in self.running:
            if not seq.prefilling:
                self._add_row(batch, seq, 1)
        for seq in self.running:
            budget = self.config.step_tokens - batch.num_tokens if seq.prefilling else 0
            if budget > 0:
                self._apply_edits(batch, seq)
                boundary = seq.pending_edits[0].at - 1 if seq.pending_edits else seq.num_prompt_tokens
                if seq.num_forwarded < seq.shared_until:
                    boundary = min(boundary, seq.shared_until)
                self._add_row(batch, seq, min(budget, boundary - seq.num_forwarded))
        self.oracle.hold(False)
        if self._unsettled:
            self.settle()
        self._follow_moves(batch)
        return batch

    def _head(self) -> Sequence | None:
        """The first that does not wait for another sequence's prompt."""
        return next((seq for seq in self.waiting if not seq.held), None)

    def _admit(self, seq: Sequence) -> bool:
        """Move the head of the queue to running if its peak fits beside what is promised already.

        It starts from its resident state if that fits. If it is too much even when everything else is reclaimed, it waits for
        the others to finish; when there are none, it starts from nothing, which fits (`LLM.add` saw to that).
        """
        for fresh in (False, True):
            self._resume(seq, fresh)
            length = seq.num_prompt_tokens + seq.max_tokens - 1
            cost = self.oracle.cost(seq.state, seq.pending_edits, length, shared_until=seq.shared_until)
            claimed = self.reserved_units + cost.peak
            admitted = self.oracle.claim(claimed)
            if not admitted and self._can_hold(seq, claimed):
                self.oracle.reclaim(claimed)
                admitted = self.oracle.claim(claimed)
            if admitted:
                self.waiting.remove(seq)
                seq.status, seq.row, seq.table_from = Status.RUNNING, heappop(self._rows), [0] * len(cost.peak.counts)
                seq.reserved_units, seq.peak_units = cost.peak, cost.bound
                self.running.append(seq)
                return True
            if seq.state is not None:
                seq.state.release()
            seq.state = None
            if self.running or self.finished:
                return False
        return False

    def _can_hold(self, seq: Sequence, claimed: Units) -> bool:
        states = (other.state for other in (*self.running, *self.finished, seq) if other.state is not None)
        return self.oracle.has_room(states, claimed)

    def _apply_edits(self, batch: Batch, seq: Sequence) -> None:
        while seq.pending_edits and seq.pending_edits[0].at - 1 == seq.num_forwarded:
            assert seq.state is not None
            edit = seq.pending_edits.pop(0)
            self._changed(batch, seq, seq.state.remove(edit.removed, self.spare_units(seq)))
            length = seq.num_prompt_tokens + seq.max_tokens - 1
            cost = self.oracle.cost(seq.state, seq.pending_edits, length, shared_until=seq.shared_until)
            seq.reserved_units, seq.peak_units = cost.peak, cost.bound
            self._unsettled = True

    def _add_row(self, batch: Batch, seq: Sequence, count: int) -> None:
        """`count` tokens of the sequence enter the batch; the last one draws if it is the last there is."""
        assert seq.state is not None
        assert seq.row is not None
        position = seq.num_forwarded
        change = seq.state.append(count)
        if change.new_units:
            seq.reserved_units = (seq.reserved_units - change.new_units).least(seq.peak_units)
            self._unsettled = True
        self._changed(batch, seq, change)
        for group, holding in enumerate(seq.state.holdings):
            if seq.table_from[group] < holding.next_page:
                first = max(seq.table_from[group], holding.first_page)
                batch.table_updates.append(TableUpdate(seq.row, first, holding.units[first - holding.first_page :], group))
                seq.table_from[group] = holding.next_page
        batch.rows.append(
            RowWork(
                row=seq.row,
                tokens=seq.token_ids[position : position + count],
                position=position,
                slot=seq.state.length - count,
                sample=position + count == len(seq.token_ids),
                sampling=seq.request.sampling,
                seed=seq.seed,
                step=seq.num_generated,
                seq_id=seq.seq_id,
                history=seq.history,
                allowed=seq.allowed,
                reaches=_reaches(seq.state, position, count),
            )
        )

    def _follow_moves(self, batch: Batch) -> None:
        """Units were moved to make room: the device's tables of all running rows are out of date."""
        if self._compactions == self.oracle.compactions:
            return
        self._compactions = self.oracle.compactions
        for seq in self.running:
            assert seq.state is not None
            assert seq.row is not None
            for group, holding in enumerate(seq.state.holdings):
                batch.table_updates.append(TableUpdate(seq.row, holding.first_page, list(holding.units), group))
                seq.table_from[group] = holding.next_page

    def _changed(self, batch: Batch, seq: Sequence, change: Change) -> None:
        batch.moves += change.moves
        for group, first in enumerate(change.first_pages):
            seq.table_from[group] = min(seq.table_from[group], first)

    def _leave_row(self, seq: Sequence) -> None:
        assert seq.row is not None
        self.running.remove(seq)
        heappush(self._rows, seq.row)
        seq.row, seq.reserved_units = None, NOTHING
        self.settle()
        self._blocked = False


def _reaches(state: KVState, position: int, count: int) -> tuple[Reach | None, ...]:
    """What window groups tell of the `count` tokens that were just appended at logical `position`."""
    if not state.pools.windowed:
        return ()
    return tuple(
        None if holding.pool.window is None else Reach(holding.length - count, holding.first_visible(position, count))
        for holding in state.holdings
    )
