"""Which tokens run next: decodes first, then prompt chunks in the token budget, first come first served.

Admission reserves the peak of a sequence's whole life, so an admitted one always finishes and there is no preemption.
No torch; memory is known through the oracle alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from agentkv.engine.cache.state import Change
from agentkv.engine.core import Batch, EngineConfig, RowWork, Sequence, Status
from agentkv.engine.lookup import share
from agentkv.engine.oracle import MemoryOracle


class Scheduler:
    """Two queues: waiting (no memory, no row) and running (a row, a state, a reservation).

    resume(seq, fresh): give the sequence the state it continues from (fresh: none) and its pending edits.
    finished: sequences that ended and still hold their state until they are committed or aborted.
    """

    def __init__(self, config: EngineConfig, oracle: MemoryOracle, resume: Callable[[Sequence, bool], None]) -> None:
        self.config = config
        self.oracle = oracle
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self._resume = resume
        self._rows = list(range(config.max_rows))
        self._blocked = False
        heapify(self._rows)

    @property
    def reserved_units(self) -> int:
        """Units that running sequences may still take."""
        return sum(seq.reserved_units for seq in self.running)

    @property
    def free_rows(self) -> int:
        """Rows of the page table that no sequence has."""
        return len(self._rows)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that is not closed."""
        yield from (*self.waiting, *self.running, *self.finished)

    def spare_units(self, seq: Sequence | None = None) -> int:
        """Free units that nobody else has a claim on."""
        return self.oracle.free_units - self.reserved_units + (seq.reserved_units if seq else 0)

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
        while self.waiting and self._rows and not self._blocked:
            self._blocked = not self._admit(self.waiting[0])
        batch = Batch(rows=[])
        decoding = [seq for seq in self.running if not seq.prefilling]
        guesses = share(len(decoding), self.config.step_tokens) if self.config.lookup else 0
        for seq in decoding:
            self._add_row(batch, seq, 1, self._draft(seq, guesses))
        for seq in self.running:
            budget = self.config.step_tokens - batch.num_tokens
            if seq.prefilling and budget > 0:
                self._apply_edits(batch, seq)
                boundary = seq.pending_edits[0].at - 1 if seq.pending_edits else seq.num_prompt_tokens
                self._add_row(batch, seq, min(budget, boundary - seq.num_forwarded))
        return batch

    def _admit(self, seq: Sequence) -> bool:
        """Move the head of the queue to running if its peak fits beside what is promised already.

        It starts from its resident state if that fits. If it is too much even when everything else is reclaimed, it waits for
        the others to finish; when there are none, it starts from nothing, which fits (`LLM.add` saw to that).
        """
        for fresh in (False, True):
            self._resume(seq, fresh)
            length = seq.num_prompt_tokens + seq.max_tokens - 1
            peak = self.oracle.cost(seq.state, seq.pending_edits, length).peak
            claimed = self.reserved_units + peak
            if claimed > self.oracle.free_units and self._can_hold(seq, claimed):
                self.oracle.reclaim(claimed - self.oracle.free_units)
            if claimed <= self.oracle.free_units:
                self.waiting.popleft()
                seq.status, seq.row, seq.reserved_units, seq.table_from = Status.RUNNING, heappop(self._rows), peak, 0
                self.running.append(seq)
                return True
            if seq.state is not None:
                seq.state.release()
            seq.state = None
            if self.running or self.finished:
                return False
        return False

    def _can_hold(self, seq: Sequence, claimed: int) -> bool:
        states = [other.state for other in (*self.running, *self.finished, seq) if other.state is not None]
        return self.oracle.held_units(states) + claimed <= self.oracle.total_units

    def _apply_edits(self, batch: Batch, seq: Sequence) -> None:
        while seq.pending_edits and seq.pending_edits[0].at - 1 == seq.num_forwarded:
            assert seq.state is not None
            edit = seq.pending_edits.pop(0)
            self._changed(batch, seq, seq.state.remove(edit.removed, self.spare_units(seq)))
            length = seq.num_prompt_tokens + seq.max_tokens - 1
            seq.reserved_units = self.oracle.cost(seq.state, seq.pending_edits, length).peak

    def _draft(self, seq: Sequence, most: int) -> list[int]:
        """Guesses of what follows. What is promised to the sequence has room for them: they end before its last token."""
        limit = min(most, seq.max_tokens - seq.num_generated - 1)
        return seq.drafter.draft(limit) if seq.drafter is not None and limit > 0 else []

    def take_back(self, seq: Sequence) -> None:
        """Guesses that did not come true lose their KV, and its units are promised to the sequence again."""
        assert seq.state is not None
        free = self.oracle.free_units
        seq.state.cut(len(seq.token_ids) - 1)
        seq.reserved_units += self.oracle.free_units - free

    def _add_row(self, batch: Batch, seq: Sequence, count: int, drafted: Iterable[int] = ()) -> None:
        """`count` tokens of the sequence enter the batch, and guesses; the last token draws if it is the last there is."""
        assert seq.state is not None
        assert seq.row is not None
        position, slot = seq.num_forwarded, seq.state.length
        tokens = [*seq.token_ids[position : position + count], *drafted]
        change = seq.state.append(len(tokens))
        seq.reserved_units -= change.new_units
        self._changed(batch, seq, change)
        if seq.table_from < len(seq.state.units):
            batch.table_updates.append((seq.row, seq.table_from, seq.state.units[seq.table_from :]))
            seq.table_from = len(seq.state.units)
        batch.rows.append(
            RowWork(
                row=seq.row,
                tokens=tokens,
                position=position,
                slot=slot,
                sample=position + count == len(seq.token_ids),
                sampling=seq.request.sampling,
                seed=seq.seed,
                step=seq.num_generated,
                seq_id=seq.seq_id,
                history=seq.history,
                allowed=seq.allowed,
                drafted=len(tokens) - count,
            )
        )

    def _changed(self, batch: Batch, seq: Sequence, change: Change) -> None:
        batch.moves += change.moves
        seq.table_from = min(seq.table_from, change.first_page)

    def _leave_row(self, seq: Sequence) -> None:
        assert seq.row is not None
        self.running.remove(seq)
        heappush(self._rows, seq.row)
        seq.row, seq.reserved_units = None, 0
        self._blocked = False
