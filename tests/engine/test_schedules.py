"""Random schedules: whoever waits, makes way, is cancelled or late, tokens are the oracle's, accounts are right, all finish."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from fake_engine import ALL, Oracle, Windows, copying, draw, engine, request
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from agentkv.engine.core import Batch, Edit, Sequence, Status
from agentkv.engine.units import Units
from agentkv.errors import Cancelled, Capacity, EngineFault

VOCAB = 3
TENANTS = ["", "b", "c"]
WINDOWS: list[Windows] = [ALL, ALL, ALL, (None, 6), (5,), (None, 4, 9)]
picks = st.integers(0, 19)
priorities = st.sampled_from([0, 0, 0, 3, -3])
timeouts = st.sampled_from([None, None, 3.0, 9.0, 30.0])
"""Seconds; a step takes one."""


@dataclass
class Talk:
    """A session as its caller knows it."""

    name: str
    salt: str
    ids: list[int] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)


@dataclass
class Asked:
    """A request that is not closed, and what it must say."""

    seq: Sequence
    talk: Talk | None
    expected: list[int]
    made: list[int] = field(default_factory=list)


class Schedules(RuleBasedStateMachine):
    """One engine, several tenants, a clock that the rules move."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        units=st.integers(2, 24),
        page=st.integers(1, 4),
        rows=st.integers(1, 4),
        extra=st.integers(0, 8),
        patience=st.integers(1, 8),
        reuse=st.sampled_from(["radix", "radix", "chain"]),
        windows=st.sampled_from(WINDOWS),
        slack=st.integers(0, 5),
        warm=st.sampled_from([0, 4, 12, 40]),
        lookup=st.sampled_from([0, 8]),
    )
    def start(
        self,
        units: int,
        page: int,
        rows: int,
        extra: int,
        patience: int,
        reuse: str,
        windows: Windows,
        slack: int,
        warm: int,
        lookup: int,
    ) -> None:
        self.now = 0.0
        self.llm = engine(
            units,
            page,
            max_rows=rows,
            step_tokens=rows + extra,
            patience=patience,
            reuse=reuse,
            windows=windows,
            slack=slack,
            warm_pages=warm,
            lookup=lookup,
            clock=lambda: self.now,
        )
        self.llm.runner.vocab = VOCAB
        self.oracle = Oracle(VOCAB, windows)
        self.llm.runner.draw = self.oracle.draw = copying if lookup else draw
        self.windowed = windows != ALL
        self.units, self.page, self.slots = units, page, units * page
        self.open: list[Asked] = []
        self.talks = [Talk(f"s{i}", TENANTS[i % 3]) for i in range(4)]
        self.longest = 1
        self.spied = self.llm.runner.execute
        self.llm.runner.execute = self.execute

    def execute(self, batch: Batch) -> list[int | None]:
        """At the time of the forward pass: who could have started, has."""
        queue = self.llm.scheduler
        for seq in queue.waiting:
            peak = -(-(seq.num_prompt_tokens + seq.max_tokens - 1) // self.page)
            if queue.free_rows and seq.state is None and not (seq.request.edits or seq.request.beside or self.windowed):
                assert 20 * peak > 20 * queue.spare_units().total - self.units, "not admitted beside plenty of room"
        self.seen["waiting while others run"] += len(queue.waiting) > 0
        self.seen["held"] += any(seq.held for seq in queue.waiting)
        self.seen["parked in host memory"] += any(seq.warm is not None for seq in queue.waiting)
        return self.spied(batch)

    # -- requests

    @rule(
        pick=picks,
        more=st.integers(0, 12),
        most=st.integers(1, 8),
        priority=priorities,
        timeout=timeouts,
        alone=st.booleans(),
    )
    def submit(self, pick: int, more: int, most: int, priority: int, timeout: float | None, alone: bool) -> None:
        talk = self.talks[pick % len(self.talks)]
        fresh = [(pick + i) % VOCAB for i in range(more)]
        if alone:
            self.ask(None, fresh or [pick % VOCAB], most, priority, timeout, TENANTS[pick % 3])
        elif not self.busy(talk):
            self.ask(talk, talk.ids + fresh or [0], most, priority, timeout, talk.salt)

    @rule(priority=priorities, pick=picks)
    def two_large_ones(self, priority: int, pick: int) -> None:
        """Each of 60 % of the pool: they cannot run together."""
        for number, rank in enumerate((priority, 0)):
            length = max(1, self.slots * 6 // 10 - 2)
            self.ask(None, [(pick + number + i) % VOCAB for i in range(length)], 3, rank, None, TENANTS[number])

    @rule(pick=picks, short=st.integers(0, 1), priority=priorities)
    def all_but_a_slot(self, pick: int, short: int, priority: int) -> None:
        """The whole pool, or all but one token's slot of it."""
        length = self.slots - short
        if length > 1:
            self.ask(None, [(pick * i) % VOCAB for i in range(length - 1)], 2, priority, None, "b")

    @rule(pick=picks)
    def too_large(self, pick: int) -> None:
        """A slot more than the pool has: refused with the numbers, and nothing changes."""
        if self.windowed:
            return
        before = self.llm.stats()
        with pytest.raises(Capacity, match=f"has {self.units}"):
            self.llm.add(request([0] * self.slots, max_tokens=2))
        assert self.llm.stats() == before

    @rule(pick=picks, more=st.integers(1, 12), most=st.integers(1, 8), priority=priorities, count=st.integers(1, 3))
    def choices(self, pick: int, more: int, most: int, priority: int, count: int) -> None:
        """Answers to one prompt, as a session asks for them: each after the first on a fork, beside the first."""
        talk = self.talks[pick % len(self.talks)]
        if self.busy(talk):
            return
        prompt = talk.ids + [(pick * i) % VOCAB for i in range(more)]
        first = self.ask(talk, prompt, most, priority, None, talk.salt)
        for number in range(1, count + 1):
            child = Talk(f"s{len(self.talks)}", talk.salt, talk.ids, talk.edits)
            self.llm.fork(talk.name, child.name, len(talk.ids))
            self.talks.append(child)
            self.ask(child, prompt, most, priority, None, talk.salt, first, number)

    @rule(pick=picks, most=st.integers(1, 8), priority=priorities, timeout=timeouts)
    def one_more(self, pick: int, most: int, priority: int, timeout: float | None) -> None:
        """Beside one that is anywhere by now, with a rank of its own."""
        if self.open:
            first = self.open[pick % len(self.open)].seq
            prompt, edits = first.request.token_ids, first.request.edits
            self.ask(None, prompt, most, priority, timeout, first.request.salt, first, pick, list(edits))

    @rule(pick=picks)
    def suspend(self, pick: int) -> None:
        self.llm.suspend(self.talks[pick % len(self.talks)].name)

    def ask(
        self,
        talk: Talk | None,
        prompt: list[int],
        most: int,
        priority: int,
        timeout: float | None,
        salt: str,
        beside: Sequence | None = None,
        seed: int = 0,
        edits: list[Edit] | None = None,
    ) -> Sequence | None:
        edits = talk.edits if talk else edits or []
        options = {"salt": salt, "priority": priority, "timeout": timeout, "beside": beside}
        asked = request(prompt, talk.name if talk else None, max_tokens=most, seed=seed, edits=edits, **options)
        try:
            seq = self.llm.add(asked)
        except Capacity:
            assert edits or len(prompt) + most - 1 > self.slots or self.windowed
            self.seen["refused"] += 1
            return None
        self.longest = max(self.longest, len(prompt) + most)
        self.open.append(Asked(seq, talk, self.oracle.generate(prompt, edits, seed, most)))
        return seq

    def busy(self, talk: Talk) -> bool:
        return any(item.talk is talk for item in self.open)

    # -- time

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        self.now += 1
        before, had_work = self.llm.runner.steps, self.llm.has_work
        for output in self.llm.step():
            item = next(item for item in self.open if item.seq is output.seq)
            item.made += output.token_ids
            assert item.made == item.expected[: len(item.made)], "a token was lost, repeated or another"
            if output.seq.fault is not None:
                self.ended(item, self.llm.runner.steps > before)
            elif output.finished:
                assert item.made == item.expected
                self.counted(output.seq)
        self.llm.check()
        if had_work and self.llm.has_work and self.llm.runner.steps == before:
            assert self.llm.scheduler.finished, "work is queued and nothing runs"

    def ended(self, item: Asked, stepped: bool) -> None:
        seq = item.seq
        assert seq.status is Status.CLOSED
        assert seq.state is None
        if isinstance(seq.fault, Cancelled):
            assert seq.deadline <= self.now
            where = "waiting" if "waited" in str(seq.fault) else "running"
            self.seen[f"deadline while {'parked' if seq.preemptions and where == 'waiting' else where}"] += 1
        else:
            assert isinstance(seq.fault, EngineFault)
            assert stepped
            self.seen["faults"] += 1
        self.open.remove(item)

    def counted(self, seq: Sequence) -> None:
        """Prefilled = what was not cached, once more for what a preemption cost."""
        again = seq.num_prefilled_tokens - (seq.num_prompt_tokens - seq.num_cached_tokens)
        assert seq.preemptions or not again
        if seq.preemptions:  # less: by then another had left more in the cache than there was at first
            self.seen["preempted and recomputed" if again > 0 else "preempted and went on"] += 1
        self.seen["guaranteed"] += seq.passed_over >= self.llm.config.patience

    @rule()
    def fault(self) -> None:
        self.llm.runner.fail_execute.add(self.llm.runner.steps + 1)
        self.one_step()

    # -- ends and edits

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        """At any point; what its chain held it holds still."""
        if self.open:
            item = self.open.pop(pick % len(self.open))
            self.seen[f"cancelled {'parked' if item.seq.parked else item.seq.status.value}"] += 1
            chain = item.talk and self.llm.chain_info(item.talk.name)
            self.llm.abort(item.seq)
            after = item.talk and self.llm.chain_info(item.talk.name)
            assert item.seq.state is None
            assert (
                chain is None
                or after is None
                or (after.logical_length, after.resident_tokens, after.busy)
                == (
                    chain.logical_length,
                    chain.resident_tokens,
                    False,
                )
            )
            self.llm.abort(item.seq)

    @rule()
    def commit(self) -> None:
        for item in [item for item in self.open if item.seq.status is Status.FINISHED]:
            self.llm.commit(item.seq, item.made)
            self.open.remove(item)
            if item.talk is not None:
                item.talk.ids = item.seq.token_ids

    @rule(pick=picks, start=st.integers(0, 20), length=st.integers(1, 6))
    def prune(self, pick: int, start: int, length: int) -> None:
        talk = self.talks[pick % len(self.talks)]
        end = len(talk.ids)
        if end and not self.busy(talk):
            removed = ((start % end, min(start % end + length, end)),)
            self.llm.prune(talk.name, removed)
            talk.edits = [*talk.edits, Edit(end, removed)]

    @rule(pick=picks, length=st.integers(0, 30))
    def fork(self, pick: int, length: int) -> None:
        talk = self.talks[pick % len(self.talks)]
        length = min(length, len(talk.ids))
        child = Talk(f"s{len(self.talks)}", talk.salt, talk.ids[:length], [edit for edit in talk.edits if edit.at <= length])
        self.llm.fork(talk.name, child.name, length)
        self.talks.append(child)

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.llm.check()
        stats = self.llm.stats()
        assert stats.free + stats.active + stats.parked + stats.chains + stats.checkpoints + stats.radix == stats.total
        assert stats.waiting + stats.rows + stats.finished == len(self.open)
        self.seen["parked"] += stats.parked > 0

    def teardown(self) -> None:
        """Without new arrivals everything finishes, within the bound of docs/design.md section 11; then nothing is held."""
        if not hasattr(self, "llm"):
            return
        self.llm.runner.fail_execute.clear()
        patience, lives = self.llm.config.patience, [len(item.seq.token_ids) + item.seq.max_tokens for item in self.open]
        bound = len(lives) * (patience + self.longest) + (patience + 2) * sum(lives)
        for _ in range(bound):
            self.commit()
            if not self.llm.has_work:
                break
            self.one_step()
        self.commit()
        assert not self.open, "not everything finished"
        for talk in self.talks:
            self.llm.drop(talk.name)
        self.llm.oracle.reclaim(Units.of(pool.total_units for pool in self.llm.pools.pools))
        self.llm.check()
        assert self.llm.arena.used_bytes == 0
        assert self.llm.tier.used_bytes == 0
        assert self.llm.scheduler.free_rows == self.llm.config.max_rows


def run_schedules(count: int) -> None:
    options = settings(
        max_examples=count,
        stateful_step_count=40,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Schedules, settings=options)


def test_random_schedules() -> None:
    run_schedules(int(os.environ.get("AGENTKV_SCHEDULES", "120")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_random_schedules() -> None:
    Schedules.seen.clear()
    run_schedules(10_000)
    happened = (
        "parked",
        "preempted and went on",
        "preempted and recomputed",
        "guaranteed",
        "refused",
        "faults",
        "waiting while others run",
        "held",
        "parked in host memory",
        *(f"deadline while {where}" for where in ("waiting", "running", "parked")),
        *(f"cancelled {where}" for where in ("waiting", "running", "parked", "finished")),
    )
    assert all(Schedules.seen[what] for what in happened), Schedules.seen


def test_who_made_way_in_vain_is_not_asked_again() -> None:
    """Found by the schedules: the elder preempts, does not fit beside its resident state all the same, and starts afresh."""
    life = Schedules()
    life.start(units=3, rows=1, page=4, extra=0, reuse="radix", slack=0, warm=40, windows=(None,), lookup=0, patience=1)
    life.choices(count=1, more=3, most=3, pick=0, priority=0)
    life.fork(length=0, pick=0)
    life.cancel(pick=0)
    life.all_but_a_slot(pick=0, priority=0, short=0)
    life.cancel(pick=0)
    life.submit(alone=True, more=0, most=4, pick=0, priority=0, timeout=None)
    for _ in range(2):
        life.cancel(pick=0)
    life.all_but_a_slot(pick=0, priority=0, short=0)
    life.step(count=2)
    for count in (5, 0):
        life.one_more(most=8, pick=0, priority=0, timeout=None)
        life.step(count=count)
    life.two_large_ones(pick=0, priority=0)
    life.submit(alone=False, more=0, most=4, pick=13, priority=0, timeout=30.0)
    life.cancel(pick=7)
    life.one_more(most=8, pick=1, priority=0, timeout=9.0)
    life.step(count=8)
    life.submit(alone=False, more=7, most=6, pick=12, priority=3, timeout=9.0)
    life.choices(count=3, more=8, most=5, pick=7, priority=0)
    life.cancel(pick=7)
    life.all_but_a_slot(pick=14, priority=0, short=0)
    life.too_large(pick=2)
    life.one_more(most=3, pick=19, priority=0, timeout=30.0)
    life.fork(length=9, pick=0)
    life.fault()
    life.one_more(most=1, pick=4, priority=3, timeout=None)
    life.fault()
    life.all_but_a_slot(pick=0, priority=0, short=1)
    life.step(count=8)
    life.teardown()
