"""Which tokens run next: decodes first, then prompt chunks in the token budget. Who waits and who makes way.

Admission reserves the peak of a sequence's whole life, so what runs never lacks memory. Who is tried next is settled in
`queue`, who makes way and what becomes of its KV in `preempt`. No torch; memory is known through the oracle alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from agentkv.engine.cache.intervals import edits_to_apply, normal_edits
from agentkv.engine.cache.state import Change
from agentkv.engine.cache.tiers import Warm
from agentkv.engine.core import Batch, EngineConfig, RowWork, Sequence, Status
from agentkv.engine.flights import followers
from agentkv.engine.lookup import drafted, share
from agentkv.engine.oracle import Cost, MemoryOracle
from agentkv.engine.preempt import Tally, rivals, shed, tell_preempted, tell_resumed, victims
from agentkv.engine.queue import WaitingQueue, shares
from agentkv.engine.reading import in_chunks, look_again, next_run, wanted
from agentkv.engine.seals import room_beside, seal, seal_ahead, seal_due, seal_works, sealed_copy, stand, undo
from agentkv.engine.units import NOTHING, Units
from agentkv.engine.work import SealWork, TableUpdate, Work
from agentkv.types import Miss


class Scheduler:
    """waiting: no row; what was preempted among them may have a parked state. running: a row, a state, a reservation.

    resume(seq, fresh): give the sequence the state it continues from (fresh: none) and its pending edits. unshare(seq): take
    what it shares out of the prefix cache.
    finished: sequences that ended and still hold their state until they are committed or aborted. batch: the step that is
    being put together; its moves are carried out before anything else touches the device's memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        oracle: MemoryOracle,
        resume: Callable[[Sequence, bool], None],
        unshare: Callable[[Sequence], None],
    ) -> None:
        self.config = config
        self.oracle = oracle
        self.waiting = WaitingQueue(config.patience)
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.tally = Tally()
        self._resume = resume
        self._unshare = unshare
        self._rows = list(range(config.max_rows))
        self._retry = False
        self._first: Sequence | None = None
        self.batch = Batch(rows=[])
        self._compactions = 0
        self._unsettled = False  # what is reserved is not what is claimed
        self._pruned: list[tuple[Sequence, SealWork]] = []  # by the step that is being put together
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

    def owes(self, seq: Sequence) -> Units:
        """What it may still take of memory, found anew."""
        return self._cost(seq).peak

    def settle(self) -> None:
        """Claim what is reserved, no more."""
        found = self.oracle.claim(self.reserved_units)
        assert found, "what was reserved is gone"
        self._unsettled = False

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(seq)
        self.waiting.clock.enter(seq)
        self._retry = True

    def finish(self, seq: Sequence) -> None:
        """It makes no more tokens: row and reservation are given back, the state stays, without a seal for the next token."""
        undo(seq)
        self._leave_row(seq)
        self.waiting.clock.leave(seq)
        seq.status = Status.FINISHED
        self.finished.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take the sequence out of whatever queue it is in and let its state go. Idempotent."""
        if seq.status in (Status.WAITING, Status.RUNNING):
            self.waiting.clock.leave(seq)
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.RUNNING:
            self._leave_row(seq)
        elif seq.status is Status.FINISHED:
            self.finished.remove(seq)
        seq.status = Status.CLOSED
        self._drop_state(seq)
        self._forget_copy(seq)
        self._retry = True

    def memory_changed(self) -> None:
        """Something else gave memory back: who waits is worth another try."""
        self._retry = True

    def schedule(self) -> Batch:
        """The next step; empty when nothing can run."""
        self.batch = batch = Batch(rows=[])
        if self.waiting and (self._retry or self.waiting.first() is not self._first):
            self._admit_waiting()
        self._follow_moves(batch)
        self.oracle.hold(True)
        decoding = [seq for seq in self.running if not in_chunks(seq)]
        for seq in decoding:
            batch.moves += self._seal(seq, prompt_end=False)
        decoding = [seq for seq in decoding if seq.fault is None]
        room = self.config.step_tokens - (len(self.running) - len(decoding))
        guesses = share(len(decoding), room) if self.config.lookup else 0
        for seq in decoding:
            self._add_row(batch, seq, 1, drafted(seq, guesses))
        self._add_chunks(batch)
        self.oracle.hold(False)
        if self._unsettled:
            self.settle()
        self._follow_moves(batch)
        self._retry |= self.waiting.pass_over(self.running)
        return batch

    def follow(self, before: Batch) -> Batch:
        """The step behind one that is under way: the next token of each row, not known yet. Empty where that is not certain."""
        guessing = self.config.lookup and share(len(self.running), self.config.step_tokens)
        guessing = guessing and any(seq.drafter is not None for seq in self.running)
        if self.waiting or guessing or self._compactions != self.oracle.compactions:
            return Batch(rows=[])
        going = followers(self.running, before)
        due = [seq for seq in going if seal_due(seq)]
        batch = Batch(rows=[])
        if going and all(room_beside(seq) for seq in due) and all(seq.fault is None for seq in going):
            self.batch, self._unsettled = batch, self._unsettled or bool(due)
            self.oracle.hold(True)
            for seq in due:
                batch.moves += seal_ahead(seq)
            for seq in going:
                work = self._append(batch, seq, [0], seq.num_forwarded)
                work.sample = work.follows = True
                work.step += 1
            self.oracle.hold(False)
            if self._unsettled:
                self.settle()
        return batch

    def confirm(self) -> None:
        """The tokens are known that a step was launched ahead of: seals between the two stand."""
        for seq in self.running:
            if stand(seq):
                self._promise(seq)
        if self._unsettled:
            self.settle()

    # -- who runs

    def _admit_waiting(self) -> None:
        """The elder first, then in order; once one is held up, those behind it start only where there is plenty of room."""
        self._retry = False
        elder = self.waiting.elder(self.running)
        if elder is not None and self._admit(elder, elder=True):
            elder.guaranteed = True
        held_up = False
        for seq in self.waiting.ordered():
            held_up = not (self._fill_in(seq) if held_up else self._admit(seq)) or held_up
        self._first = self.waiting.first()

    def _admit(self, seq: Sequence, *, elder: bool = False) -> bool:
        """Run it if its peak fits beside what is promised, after reclaim and with as few preempted as that takes.

        It starts from its resident state if that fits. If it is too much even when everything else is reclaimed, it waits for
        the others to finish; when there are none, it starts from nothing, which fits (`LLM.add` saw to that).
        """
        makes_way = rivals(seq, self.running, elder=elder)
        if not self._rows and not makes_way:
            return False
        others = [*(each for each in self.running if each not in makes_way), *self.finished]
        rows = self.config.max_rows - len(self.running) + len(makes_way)
        for fresh in (False, True):
            cost, wanted = self._offer(seq, fresh)
            at_once = bool(self._rows) and self.oracle.claim(self.reserved_units + wanted)
            lose = [] if at_once else victims(seq, wanted, makes_way, others, rows, self.oracle)
            if lose is not None:
                for victim in reversed(lose):
                    self._preempt(victim, seq)
                if self._make_room(seq, self.reserved_units + wanted):
                    self._start(seq, cost)
                    return True
            if others:
                break
            makes_way = [each for each in makes_way if each.row is not None]  # who was preempted in vain is so already
            self._drop_state(seq)
        self._withdraw(seq, cost.peak)
        return False

    def _fill_in(self, seq: Sequence) -> bool:
        """Run it if there is room that nobody has a claim on, and some to spare."""
        reserved = self.reserved_units
        if not self._rows or not self.oracle.plenty(reserved + seq.wanted_units):
            return False
        cost, wanted = self._offer(seq, fresh=False)
        if self.oracle.plenty(reserved + wanted) and self.oracle.claim(reserved + wanted):
            self._start(seq, cost)
            return True
        self._withdraw(seq, cost.peak)
        return False

    def _offer(self, seq: Sequence, fresh: bool) -> tuple[Cost, Units]:
        """Give it the state that it would start from; what it would take beyond it, and what must be there for it to start."""
        if seq.warm is not None and (fresh or seq.warm.lost):
            self._forget_copy(seq)
        if seq.warm is not None:  # it will be put into units of its own: they cost what a start from nothing costs, and more
            seq.pending_edits = list(normal_edits(seq.request.edits, seq.num_prompt_tokens))
        elif seq.state is None:
            self._resume(seq, fresh)
        cost = self._cost(seq)
        return cost, cost.peak + sealed_copy(seq) + self._owed_to_leader(seq)

    def _owed_to_leader(self, seq: Sequence) -> Units:
        """What its running leader must have reserved in addition: it counts on pages behind its windows, or before its floor,
        and the two hold those together now."""
        leader = seq.leader
        if leader is None or leader.status is not Status.RUNNING or leader.state is None:
            return NOTHING
        if not (leader.state.pools.windowed or leader.state.form.seals):
            return NOTHING
        return (self._cost(leader).peak - leader.reserved_units).most(NOTHING)

    def _withdraw(self, seq: Sequence, peak: Units) -> None:
        """It does not start; a parked state stays parked."""
        seq.wanted_units = peak
        if not seq.parked:
            self._drop_state(seq)

    def _start(self, seq: Sequence, cost: Cost) -> None:
        if seq.warm is not None:
            self._wake(seq, seq.warm)
            cost, self._unsettled = self._cost(seq), True
        self.waiting.remove(seq)
        seq.status, seq.row, seq.table_from = Status.RUNNING, heappop(self._rows), [0] * len(cost.peak.counts)
        seq.reserved_units, seq.peak_units = cost.peak, cost.bound
        assert seq.state is not None
        if seq.state.form.seals and seq.state.logical_length < seq.num_prompt_tokens:
            seq.seal_at, seq.replays, seq.replayed = seq.num_prompt_tokens, None, 0
        owed = self._owed_to_leader(seq)
        if owed and seq.leader is not None:
            seq.leader.reserved_units += owed
            seq.leader.peak_units = seq.leader.peak_units.most(self._cost(seq.leader).bound)
        self.running.append(seq)
        self.waiting.clock.pay(seq, seq.num_known - seq.num_forwarded)
        lost = seq.computed - seq.num_forwarded
        if seq.preemptions:
            tell_resumed(seq, max(0, lost))
        if lost > 0:
            self.tally.recomputed += lost
            seq.miss = seq.miss or Miss(reason="reclaimed", tokens=lost, detail="preempted: others needed its memory")
        seq.computed, seq.wanted_units = 0, NOTHING
        self._retry = True  # who is owed service may have more rivals now

    def _wake(self, seq: Sequence, warm: Warm) -> None:
        """Bring its copy back into the units that were claimed for it; without it, it starts from nothing."""
        state, seq.warm = self.oracle.restore(warm), None
        if state is None:
            self._resume(seq, True)
            return
        left = edits_to_apply(state.edits, tuple(seq.pending_edits), state.logical_length)
        assert left is not None, "it is a copy of this sequence's own state"
        seq.state, seq.pending_edits = state, left

    def _preempt(self, seq: Sequence, by: Sequence) -> None:
        """Its row and reservation go to others; its state is parked."""
        self._stop_replay(seq)
        seq.computed = seq.num_forwarded
        look_again(seq)
        self._leave_row(seq)
        self._unshare(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        self.waiting.add(seq)
        self.tally.preemptions += 1
        tell_preempted(seq, by, seq.num_forwarded)

    def _make_room(self, seq: Sequence, claimed: Units) -> bool:
        """Claim so many units, from caches, then from parked states, the last in the queue first. False: others have memory
        that this engine's sequences do not account for."""
        if self.oracle.claim(claimed):
            return True
        self.oracle.reclaim(claimed)
        parked = [each for each in reversed(list(self.waiting.ordered())) if each.state is not None and each is not seq]
        return shed(parked, claimed, self.oracle)

    def _cost(self, seq: Sequence) -> Cost:
        length = seq.num_prompt_tokens + seq.max_tokens - 1
        form, prompt = seq.request.form, seq.num_prompt_tokens
        return self.oracle.cost(seq.state, seq.pending_edits, length, shared_until=seq.shared_until, form=form, prompt=prompt)

    # -- what runs

    def _add_chunks(self, batch: Batch) -> None:
        """Prompts, and what preempted sequences lost, in what the decodes left of the budget; see `queue.shares`."""
        prompts = [seq for seq in self.running if in_chunks(seq)]
        prompts.sort(key=lambda seq: (not seq.guaranteed, self.waiting.order(seq)))
        for seq in prompts:
            self._apply_edits(batch, seq)
        wants = [wanted(seq) for seq in prompts]
        ranks = [seq.request.priority for seq in prompts]
        given = shares(self.config.step_tokens - batch.num_tokens, wants, ranks)
        for seq, count in zip(prompts, given, strict=True):
            if seq.replays:
                self._replay(batch, seq, count)
            else:
                self._add_row(batch, seq, count)

    def _apply_edits(self, batch: Batch, seq: Sequence) -> None:
        while seq.pending_edits and seq.pending_edits[0].at - 1 == seq.num_forwarded:
            assert seq.state is not None
            edit = seq.pending_edits.pop(0)
            change = seq.state.remove(edit.removed, self.spare_units(seq))
            self._changed(batch, seq, change)
            self._pruned += [(seq, work) for work in seal_works(seq, change)]
            self._promise(seq)

    # -- seals

    def seal_prompts(self) -> None:
        """After a step: go on with the replays of prompts that are complete, and seal those that need no more of them. The
        batch's moves must be carried out at once."""
        self._shrink_pruned()
        for seq in self.running:
            if seq.seal_at and seq.num_forwarded == seq.seal_at and self._replays_done(seq):
                seq.seal_at = 0
                self.batch.moves += self._seal(seq, prompt_end=True)
        if self._unsettled:
            self.settle()

    def _shrink_pruned(self) -> None:
        """The device has pruned sealed parts in the step: how many slots are left of them is known now."""
        pruned, self._pruned = self._pruned, []
        for seq, work in pruned:
            if seq.row is not None and seq.state is not None and work.slots_left >= 0:
                seq.state.shrink_sealed(work.slots_left)
                self._promise(seq)

    def _seal(self, seq: Sequence, *, prompt_end: bool) -> list[Work]:
        """The work of the seal that is due, if there is one. What it is promised follows from what it holds then."""
        change = seal(seq, prompt_end=prompt_end)
        if change is None:
            return []
        self._promise(seq)
        return change.moves

    def _promise(self, seq: Sequence) -> None:
        """It holds more or less than it was expected to at the start: what it is promised follows from that."""
        cost = self._cost(seq)
        seq.reserved_units, seq.peak_units = cost.peak, cost.bound
        self._unsettled = self._retry = True

    def _replays_done(self, seq: Sequence) -> bool:
        if seq.replays and seq.replayed == len(seq.replays[0]):
            self._stop_replay(seq)
            seq.replays.pop(0)
            seq.run += 1
        return next_run(seq) is None

    def _stop_replay(self, seq: Sequence) -> None:
        """The KV of a run that is over, or has to begin again, is taken back."""
        if seq.replayed and seq.state is not None:
            length, held = seq.num_forwarded, seq.state.units
            seq.state.take_back(length)
            seq.replayed = 0
            seq.reserved_units = (seq.reserved_units + (held - seq.state.units)).least(seq.peak_units)
            self._unsettled = True

    def _replay(self, batch: Batch, seq: Sequence, count: int) -> None:
        assert seq.state is not None
        assert seq.replays
        tokens = list(seq.replays[0][seq.replayed : seq.replayed + count])
        if tokens:
            work = self._append(batch, seq, tokens, seq.state.logical_length, replay=True)
            work.run, work.run_from = seq.run, seq.replayed
            seq.replayed += count
            seq.num_prefilled_tokens += count

    def take_back(self, seq: Sequence) -> None:
        """Guesses that did not come true lose their KV, and its units are promised to the sequence again."""
        assert seq.state is not None
        held = seq.state.units
        seq.state.cut(len(seq.token_ids) - 1)
        seq.reserved_units = (seq.reserved_units + (held - seq.state.units)).least(seq.peak_units)
        self.settle()

    def _add_row(self, batch: Batch, seq: Sequence, count: int, drafted: Iterable[int] = ()) -> None:
        """`count` tokens of the sequence enter the batch, and guesses; the last token draws if it is the last there is."""
        assert seq.state is not None
        assert seq.row is not None
        position = seq.num_forwarded
        tokens = [*seq.token_ids[position : position + count], *drafted]
        work = self._append(batch, seq, tokens, position)
        work.sample = position + count == len(seq.token_ids)
        work.prompt = position < seq.num_prompt_tokens
        work.to_come = max(0, seq.num_prompt_tokens - position - count)
        work.drafted = len(tokens) - count

    def _append(self, batch: Batch, seq: Sequence, tokens: list[int], position: int, *, replay: bool = False) -> RowWork:
        """The row's new tokens get their slots, and the device's tables what they lack."""
        assert seq.state is not None
        assert seq.row is not None
        change = seq.state.append(len(tokens))
        if change.new_units:
            seq.reserved_units = (seq.reserved_units - change.new_units).least(seq.peak_units)
            self._unsettled = True
        self._changed(batch, seq, change)
        for group, holding in enumerate(seq.state.holdings):
            if seq.table_from[group] < holding.next_page:
                first = max(seq.table_from[group], holding.first_page)
                batch.table_updates.append(TableUpdate(seq.row, first, holding.units[first - holding.first_page :], group))
                seq.table_from[group] = holding.next_page
        self.waiting.clock.serve(seq, len(tokens))
        work = RowWork(
            row=seq.row,
            tokens=tokens,
            position=position,
            slot=seq.state.length - len(tokens),
            sample=False,
            sampling=seq.request.sampling,
            seed=seq.seed,
            step=seq.num_generated,
            seq_id=seq.seq_id,
            history=seq.history,
            allowed=seq.allowed,
            reaches=seq.state.reaches(len(tokens)) if seq.state.pools.windowed or seq.state.form.seals else (),
            form=seq.request.form,
            sealed=seq.state.slots,
            replay=replay,
        )
        batch.rows.append(work)
        return work

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
        seq.row, seq.reserved_units, seq.guaranteed = None, NOTHING, False
        self.settle()
        self._retry = True

    def _drop_state(self, seq: Sequence) -> None:
        stand(seq)
        if seq.state is not None:
            seq.state.release()
        seq.state = None

    def _forget_copy(self, seq: Sequence) -> None:
        if seq.warm is not None:
            self.oracle.forget(seq.warm)
        seq.warm = None
