"""Random lives of an engine: whatever happens in whatever order, tokens are the oracle's and every account is right."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from fake_engine import ALL, Oracle, Windows, engine, request
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentkv.engine.core import GRANULE, Edit, Sequence, Status, StepOutput
from agentkv.engine.units import Units
from agentkv.errors import Busy, Capacity, ContextOverflow, EngineFault

VOCAB = 3  # small, so that prefixes are often shared
WINDOW = 60
WINDOWS: list[Windows] = [ALL, ALL, (None, 6), (5,), (None, 4, 9)]
EXAMPLES = int(os.environ.get("AGENTKV_EXAMPLES", "50"))

picks = st.integers(0, 20)
lengths = st.integers(0, 40)
seeds = st.integers(0, 2)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=9)
spans = st.lists(st.tuples(lengths, st.integers(1, 9)), min_size=1, max_size=3)


@dataclass
class Session:
    """What a caller remembers: committed ids and the prunes they have seen."""

    name: str
    ids: list[int] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    salt: str = ""

    def cut(self, length: int, *, keep_prunes: bool) -> None:
        self.ids = self.ids[:length]
        kept = [edit for edit in self.edits if edit.at <= length]
        if keep_prunes:
            late = (edit.removed for edit in self.edits if edit.at > length)
            kept += [Edit(length, tuple((a, min(b, length)) for a, b in removed if a < length)) for removed in late]
        self.edits = kept


@dataclass
class Running:
    seq: Sequence
    session: Session | None
    expected: list[int]
    made: list[int] = field(default_factory=list)


class EngineLife(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    warm_pages = 0
    lookup = 0
    ahead = False

    @initialize(
        units=st.integers(3, 30),
        page=st.sampled_from([2, 3, 4]),
        rows=st.integers(1, 4),
        step_tokens=st.integers(4, 11),
        checkpoints=st.integers(0, 2),
        reuse=st.sampled_from(["radix", "radix", "chain"]),
        windows=st.sampled_from(WINDOWS),
        slack=st.integers(0, 5),
    )
    def start(
        self,
        units: int,
        page: int,
        rows: int,
        step_tokens: int,
        checkpoints: int,
        reuse: str,
        windows: Windows = ALL,
        slack: int = 0,
    ) -> None:
        self.llm = engine(
            units,
            page,
            window=WINDOW,
            max_rows=rows,
            step_tokens=step_tokens,
            checkpoints=checkpoints,
            reuse=reuse,
            windows=windows,
            slack=slack,
            warm_pages=self.warm_pages,
            lookup=self.lookup,
        )
        self.windows, self.reach = windows, step_tokens + slack
        self.llm.runner.vocab, self.llm.runner.ahead = VOCAB, self.ahead
        self.oracle = Oracle(VOCAB, windows)
        self.running: list[Running] = []
        self.page, self.units, self.counter = page, units, 1
        self.sessions = {"s1": Session("s1")}
        self.reclaims = 0
        reclaim = self.llm.oracle.reclaim

        def counted(claimed: Units, *, keep: str | None = None) -> Units:
            self.reclaims += 1
            return reclaim(claimed, keep=keep)

        self.llm.oracle.reclaim = counted
        self.talk(0, [i % VOCAB for i in range(units * page // 3)], 0)

    def pick(self, number: int) -> Session:
        return list(self.sessions.values())[number % len(self.sessions)]

    def busy(self, session: Session) -> bool:
        return any(item.session is session for item in self.running)

    @rule(salt=st.sampled_from(["", "", "other"]))
    def new_session(self, salt: str) -> None:
        self.counter += 1
        self.sessions[f"s{self.counter}"] = Session(f"s{self.counter}", salt=salt)

    @rule(pick=picks, suffix=ids, max_tokens=st.one_of(st.none(), st.integers(1, 12)), seed=seeds)
    def submit(self, pick: int, suffix: list[int], max_tokens: int | None, seed: int) -> None:
        session = self.pick(pick)
        prompt = session.ids + suffix or [0]
        if self.busy(session):
            with pytest.raises(Busy):
                self.llm.add(request(prompt, session.name, edits=session.edits, salt=session.salt))
        else:
            self.add(prompt, session, session.edits, max_tokens, seed, session.salt)

    @rule(pick=picks, length=lengths, suffix=ids, seed=seeds, edited=st.booleans())
    def submit_alone(self, pick: int, length: int, suffix: list[int], seed: int, edited: bool) -> None:
        """A request without a chain whose text begins like a session's."""
        session = self.pick(pick)
        self.add(session.ids[:length] + suffix or [1], None, session.edits if edited else [], 3, seed, session.salt)

    @rule(pick=picks, seed=seeds, priority=st.sampled_from([0, 0, 1]))
    def submit_beside(self, pick: int, seed: int, priority: int) -> None:
        """Another answer to the prompt of one that is anywhere by now; a higher priority makes others way."""
        if self.running:
            first = self.running[pick % len(self.running)].seq
            asked = first.request
            self.seen["beside another"] += 1
            self.add(asked.token_ids, None, list(asked.edits), 3, seed, asked.salt, priority=priority, beside=first)

    @rule(pick=picks, length=lengths, suffix=ids, seed=seeds)
    def rewrite(self, pick: int, length: int, suffix: list[int], seed: int) -> None:
        """A turn that changes history, as a rebuild does: other ids, no later prunes."""
        session = self.pick(pick)
        if not self.busy(session):
            session.edits = [edit for edit in session.edits if edit.at <= length]
            self.add(session.ids[:length] + suffix or [2], session, session.edits, 3, seed, session.salt)

    @rule(pick=picks, suffix=ids, seed=seeds)
    def talk(self, pick: int, suffix: list[int], seed: int) -> None:
        """A whole turn while the others go on."""
        session = self.pick(pick)
        if self.busy(session):
            return
        self.add(session.ids + suffix or [0], session, session.edits, 3, seed, session.salt)
        while self.busy(session):
            item = next(item for item in self.running if item.session is session)
            if item.seq.status is Status.FINISHED:
                self.end(item, item.made)
            elif not self.one_step():
                return

    def add(
        self,
        prompt: list[int],
        session: Session | None,
        edits: list[Edit],
        max_tokens: int | None,
        seed: int,
        salt: str,
        **options: object,
    ) -> None:
        chain = session.name if session else None
        asked = request(prompt, chain, max_tokens=max_tokens, seed=seed, edits=edits, salt=salt, **options)
        most = len(prompt) + min(max_tokens or 1, max(1, WINDOW - len(prompt))) - 1
        if len(prompt) + 1 > WINDOW:
            with pytest.raises(ContextOverflow):
                self.llm.add(asked)
            return
        try:
            seq = self.llm.add(asked)
        except Capacity:
            assert self.bytes_of(most, bool(edits)) > self.llm.arena.num_granules * GRANULE
            self.seen["refused"] += 1
            return
        assert edits or self.bytes_of(most, False) <= self.llm.arena.num_granules * GRANULE
        assert 1 <= seq.max_tokens <= min(max_tokens or 4096, WINDOW - len(prompt))
        history = Session("", prompt, edits)
        history.cut(len(prompt), keep_prunes=True)
        self.running.append(Running(seq, session, self.oracle.generate(prompt, history.edits, seed, seq.max_tokens)))

    def bytes_of(self, tokens: int, edits: bool) -> int:
        """What a request takes: a page more where it is pruned, and of a window no more than it and a step reach over."""
        total = 0
        for group in self.llm.runner.groups:
            pages = -(-tokens // self.page)
            if group.window is not None:
                pages = min(pages, -(-(group.window - 1 + self.reach + self.page - 1) // self.page))
            total += (pages + edits) * group.stripe_bytes
        return total

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> bool:
        """Step and compare; False when nothing ran."""
        before = self.llm.runner.steps
        for output in self.llm.step():
            self.take(output, {self.llm.runner.steps})
        self.llm.check()
        if self.llm.has_work and self.llm.runner.steps == before:
            assert self.llm.scheduler.finished, "work is queued and nothing runs"
        return self.llm.runner.steps > before

    def take(self, output: StepOutput, failing: set[int]) -> None:
        """Compare what a step made for one sequence. failing: numbers of the steps that may have failed it."""
        item = next(item for item in self.running if item.seq is output.seq)
        item.made += output.token_ids
        assert item.made == item.expected[: len(item.made)]
        if output.seq.fault is not None:
            assert self.llm.runner.fail_execute & failing, output.seq.fault
            assert output.finished
            assert output.seq.status is Status.CLOSED
            self.running.remove(item)
            self.seen["faults"] += 1
        elif output.finished:
            assert item.made == item.expected
            self.finished(output.seq)

    def finished(self, seq: Sequence) -> None:
        assert seq.preemptions or seq.num_cached_tokens + seq.num_prefilled_tokens == seq.num_prompt_tokens
        self.seen["preempted"] += seq.preemptions > 0
        self.seen[f"miss: {seq.miss.reason if seq.miss else None}"] += 1
        if seq.num_cached_tokens:
            self.seen["continued from KV" + (" that was pruned" if seq.request.edits else "")] += 1

    @rule(pick=picks, keep=st.integers(0, 12), remainder=st.lists(st.integers(0, VOCAB - 1), max_size=3))
    def commit(self, pick: int, keep: int, remainder: list[int]) -> None:
        """Also before the end, with fewer ids than were made, or with others in place of the last."""
        ready = [item for item in self.running if item.seq.state is not None]
        if ready:
            item = ready[pick % len(ready)]
            self.end(item, item.made[:keep] + (remainder if keep < len(item.made) else []))

    def end(self, item: Running, generated: list[int]) -> None:
        self.llm.commit(item.seq, generated)
        self.running.remove(item)
        if item.session is not None:
            item.session.ids = item.seq.token_ids[: item.seq.num_prompt_tokens] + generated
        self.llm.abort(item.seq)

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        if self.running:
            item = self.running.pop(pick % len(self.running))
            self.llm.abort(item.seq)
            self.llm.abort(item.seq)

    @rule(pick=picks, intervals=spans)
    def prune(self, pick: int, intervals: list[tuple[int, int]]) -> None:
        session = self.pick(pick)
        if self.busy(session):
            with pytest.raises(Busy):
                self.llm.prune(session.name, [(0, 1)])
            return
        name, end = session.name, len(session.ids)
        removed = tuple((a % end, min(a % end + n, end)) for a, n in intervals if end)
        before, reclaims = self.llm.arena.free_bytes, self.reclaims
        price = self.llm.price(name, removed)
        assert self.llm.arena.free_bytes == before
        freed = self.llm.prune(name, removed)
        assert freed == price
        if reclaims == self.reclaims:
            assert freed[1] == max(0, self.llm.arena.free_bytes - before)
            self.seen[f"pruned tokens: {freed[0] > 0}, bytes: {freed[1] > 0}"] += 1
        if removed:
            session.edits = [*session.edits, Edit(end, removed)]

    @rule(pick=picks, length=lengths, keep_prunes=st.booleans())
    def fork(self, pick: int, length: int, keep_prunes: bool) -> None:
        session = self.pick(pick)
        self.counter += 1
        child = Session(f"s{self.counter}", session.ids, session.edits, session.salt)
        child.cut(min(length, len(session.ids)), keep_prunes=keep_prunes)
        self.llm.fork(session.name, child.name, len(child.ids))
        self.sessions[child.name] = child

    @rule(pick=picks, length=lengths, keep_prunes=st.booleans())
    def rollback(self, pick: int, length: int, keep_prunes: bool) -> None:
        session = self.pick(pick)
        if not self.busy(session):
            length = min(length, len(session.ids))
            self.llm.rollback(session.name, length)
            session.cut(length, keep_prunes=keep_prunes)

    @rule(pick=picks)
    def suspend(self, pick: int) -> None:
        self.llm.suspend(self.pick(pick).name)

    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        session = self.pick(pick)
        if self.busy(session) or len(self.sessions) == 1:
            return
        info, before = self.llm.chain_info(session.name), self.llm.arena.free_bytes
        self.llm.drop(session.name)
        assert self.llm.arena.free_bytes - before == (info.bytes_unique if info else 0)
        del self.sessions[session.name]

    @rule(units=st.integers(1, 6))
    def pressure(self, units: int) -> None:
        """Reclaim returns what it says, and all that is not in use can be had."""
        states = [item.seq.state for item in self.running if item.seq.state is not None]
        pools = self.llm.pools
        held = pools.distinct(state.slices for state in states)
        before = pools.used
        wanted = Units.of(free + units for free in pools.free.counts)
        freed = self.llm.oracle.reclaim(wanted)
        assert freed == before - pools.used
        assert pools.fits(wanted) or pools.used == held

    @rule()
    def fault(self) -> None:
        """The next step fails on the device."""
        self.llm.runner.fail_execute.add(self.llm.runner.steps + 1)
        self.one_step()

    @rule(pick=picks)
    def fault_in_prune(self, pick: int) -> None:
        session, end = self.pick(pick), len(self.pick(pick).ids)
        if self.busy(session):
            return
        self.llm.runner.fail_move = True
        try:
            self.llm.prune(session.name, [(1, min(3, end))])
            session.edits = [*session.edits, Edit(end, ((1, min(3, end)),))]
        except EngineFault:
            self.seen["prune failed"] += 1
        finally:
            self.llm.runner.fail_move = False

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "llm"):
            self.llm.check()
            stats = self.llm.stats()
            assert stats.free + stats.active + stats.parked + stats.chains + stats.checkpoints + stats.radix == stats.total

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        for _ in range(2000):
            if not self.llm.has_work:
                break
            self.one_step()
            for item in [item for item in self.running if item.seq.status is Status.FINISHED]:
                self.end(item, item.made)
        assert not self.llm.has_work, "not everything finished"
        for item in self.running:
            self.llm.abort(item.seq)
        for name in self.sessions:
            self.llm.drop(name)
        self.llm.check()
        self.llm.oracle.reclaim(Units.of(pool.total_units for pool in self.llm.pools.pools))
        self.llm.check()
        assert self.llm.arena.used_bytes == 0


EngineLife.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestEngineLife = EngineLife.TestCase


def any_ids(rng: random.Random, most: int = 9) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(most + 1))]


def act(life: EngineLife, rng: random.Random) -> None:
    """One rule, the ones that lead somewhere more often."""
    pick, length, seed, half = rng.randrange(20), rng.randrange(40), rng.randrange(3), rng.random() < 0.5
    rules = {
        "talk": lambda: life.talk(pick, any_ids(rng), seed),
        "submit": lambda: life.submit(pick, any_ids(rng), rng.choice([None, 1, 3, 12]), seed),
        "alone": lambda: life.submit_alone(pick, length, any_ids(rng), seed, half),
        "step": lambda: life.step(rng.randrange(1, 7)),
        "commit": lambda: life.commit(pick, rng.randrange(13), any_ids(rng, 3)),
        "abort": lambda: life.abort(pick),
        "prune": lambda: life.prune(pick, [(rng.randrange(40), rng.randrange(1, 9)) for _ in range(rng.randrange(1, 4))]),
        "fork": lambda: life.fork(pick, length, half),
        "rollback": lambda: life.rollback(pick, length, half),
        "rewrite": lambda: life.rewrite(pick, length, any_ids(rng), seed),
        "new": lambda: life.new_session(rng.choice(["", "", "other"])),
        "suspend": lambda: life.suspend(pick),
        "drop": lambda: life.drop(pick),
        "pressure": lambda: life.pressure(rng.randrange(1, 7)),
        "fault": life.fault,
        "fault in prune": lambda: life.fault_in_prune(pick),
        "beside": lambda: life.submit_beside(pick, seed, rng.choice([0, 0, 1])),
    }
    weights = [12, 8, 3, 14, 8, 2, 6, 2, 2, 2, 1, 1, 1, 2, 1, 1, 4]
    rules[rng.choices(list(rules), weights)[0]]()
    life.accounts()


def test_long_lives() -> None:
    """Lives with turns more often than random rules have them, and proof that the interesting things happened in them."""
    EngineLife.seen.clear()
    for seed in range(int(os.environ.get("AGENTKV_LIVES", "60"))):
        rng, life = random.Random(seed), EngineLife()
        try:
            reuse = rng.choice(["radix", "radix", "radix", "chain"])
            sizes = rng.randrange(3, 40), rng.choice([2, 3, 4]), rng.randrange(1, 5), rng.randrange(4, 12), rng.randrange(3)
            life.start(*sizes, reuse, WINDOWS[seed % len(WINDOWS)], rng.randrange(6))
            for _ in range(120):
                act(life, rng)
            life.teardown()
        except Exception as error:
            raise AssertionError(f"life {seed}") from error
    rare = (
        "beside another",
        "preempted",
        "continued from KV that was pruned",
        "prune failed",
        "pruned tokens: True, bytes: True",
        "faults",
        "refused",
    )
    misses = ("None", "new", "diverged", "reclaimed", "pruned_not_accepted")
    assert all(EngineLife.seen[what] > 3 for what in (*rare, *(f"miss: {reason}" for reason in misses))), EngineLife.seen
