"""Sealed parts on the host: turns of every form, what they leave, and what goes on from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import request, run
from fake_kinds import APPENDS, EVICTS, KINDS, MARKED, PLAIN, REPLAYS, TIMED, Kind
from fake_seals import sealing_engine
from seal_oracle import Follower, Line, Play, answer

from agentkv.engine.cache.intervals import normal_edits
from agentkv.engine.core import Edit, Sequence, Status
from agentkv.engine.llm import LLM
from agentkv.engine.units import Units
from agentkv.engine.work import Moves, SealWork
from agentkv.errors import EngineFault

FORMS = {kind.name: index for index, kind in enumerate(KINDS)}
EVICTS_PAYLOAD = 1
"""Its group: the first behind KV."""
SEALING = [kind for kind in KINDS if kind.floor is not None]


def named(kind: Kind) -> str:
    return kind.name


each_kind = pytest.mark.parametrize("kind", KINDS, ids=named)
each_sealing = pytest.mark.parametrize("kind", SEALING, ids=named)


class Talk:
    """A session of one form, and its history as a list. past: the list at each boundary."""

    def __init__(self, llm: LLM, kind: Kind, name: str = "s") -> None:
        self.llm, self.kind, self.name = llm, kind, name
        self.line, self.ids, self.edits = Line(kind), list[int](), list[Edit]()
        self.past: dict[int, Line] = {}

    def ask(self, new: list[int], *, count: int = 4, **options: object) -> Sequence:
        options = {"edits": self.edits, "form": FORMS[self.kind.name], "max_tokens": count} | options
        return self.llm.add(request(self.ids + new, self.name, **options))

    def say(self, new: list[int], *, count: int = 4, seed: int = 0) -> Sequence:
        """A whole turn; its sequence. What it makes is what the list makes."""
        seq = self.ask(new, count=count, seed=seed)
        run(self.llm)
        self.expect(seq, count=count, seed=seed)
        self.commit(seq)
        return seq

    def expect(self, seq: Sequence, *, count: int = 4, seed: int = 0) -> None:
        assert seq.fault is None
        made = seq.token_ids[seq.num_prompt_tokens :]
        assert made == answer(self.line, seq.request.token_ids, count=count, seed=seed, edits=self.edits)

    def commit(self, seq: Sequence) -> None:
        self.llm.commit(seq, seq.token_ids[seq.num_prompt_tokens :])
        self.llm.check()
        self.ids = list(seq.token_ids)
        self.past[len(self.ids)] = self.line.copy()

    def at(self, length: int, name: str = "s") -> Talk:
        """The session as it was at that boundary."""
        talk = Talk(self.llm, self.kind, name)
        talk.line, talk.ids, talk.edits = self.past[length].copy(), self.ids[:length], list(self.edits)
        talk.past = self.past
        return talk

    def prune(self, *intervals: tuple[int, int]) -> None:
        self.llm.prune(self.name, intervals)
        self.llm.check()
        self.edits = [*self.edits, Edit(len(self.ids), intervals)]


def tokens(count: int, step: int = 3) -> list[int]:
    return [(step * i + i // 4) % 5 for i in range(count)]


def empty(llm: LLM) -> None:
    """Nothing is held once nobody wants anything."""
    for name in list(llm.chains.chains):
        llm.drop(name)
    llm.oracle.reclaim(Units.of(pool.total_units for pool in llm.pools.pools))
    llm.check()
    assert llm.arena.used_bytes == 0


@each_kind
def test_turns_go_on_from_what_a_seal_left(kind: Kind) -> None:
    """Turn k + 1 prefills its own tokens only."""
    llm = sealing_engine(60)
    Follower(llm)
    talk = Talk(llm, kind)
    for number in range(5):
        held, count = max(0, len(talk.ids) - 1), (9, 1, 12, 4, 30)[number]
        seq = talk.say(tokens((13, 1, 7, 22, 2)[number]), count=count, seed=number)
        replays = sum(map(len, kind.replay(seq.request.token_ids))) if count > 1 else 0
        assert seq.num_cached_tokens == held
        assert seq.num_prefilled_tokens == len(talk.ids) - count - held + replays
    assert (llm.runner.seals > 0) is (kind.floor is not None)
    empty(llm)


def test_forms_take_turns_in_one_engine() -> None:
    """Sessions of all forms at once, two turns each, in memory for a few of them."""
    llm = sealing_engine(70, max_rows=4)
    Follower(llm)
    talks = [Talk(llm, kind, kind.name) for kind in KINDS]
    for _ in range(2):
        seqs = {talk.name: talk.ask(tokens(9 + i), count=7) for i, talk in enumerate(talks)}
        held = {talk.name: max(0, len(talk.ids) - 1) for talk in talks}
        while seqs:
            llm.step()
            llm.check()
            for talk in talks:
                if talk.name in seqs and seqs[talk.name].status is not Status.WAITING and seqs[talk.name].finish_reason:
                    seq = seqs.pop(talk.name)
                    if seq.num_cached_tokens != held[talk.name]:  # its chain was given up
                        talk.line = Line(talk.kind)
                    talk.expect(seq, count=7)
                    talk.commit(seq)
    empty(llm)


@each_kind
def test_a_form_shares_nothing_with_another(kind: Kind) -> None:
    """Neither by its chain, nor by the prefix cache, nor beside it."""
    llm = sealing_engine(80)
    Follower(llm)
    talk = Talk(llm, kind)
    talk.say(tokens(12))
    for other in KINDS:
        if other is kind:
            continue
        alone = llm.add(request(talk.ids + [1], form=FORMS[other.name]))
        beside = llm.add(request(talk.ids + [1], form=FORMS[kind.name], beside=alone))
        run(llm)
        for seq, found in ((alone, other), (beside, kind)):
            assert seq.fault is None
            made = seq.token_ids[seq.num_prompt_tokens :]
            assert made == answer(Line(found), talk.ids + [1])
            assert not seq.num_cached_tokens or found.reuse == "radix"
            llm.abort(seq)


@each_kind
def test_forks_and_rollbacks_go_on_from_a_boundary(kind: Kind) -> None:
    """As a session does that was never forked, and without the older tokens being read again."""
    llm = sealing_engine(120)
    Follower(llm)
    talk = Talk(llm, kind)
    for number in range(3):
        talk.say(tokens(9 + number), count=8, seed=number)
    first, second, third = talk.past
    llm.fork("s", "child", second)
    child = talk.at(second, "child")
    more = kind.reuse == "radix"  # somebody else has forwarded the last token of the turn
    assert child.say([2, 2, 1], count=9).num_cached_tokens == second - 1 + more
    talk.say([4], count=12)  # the parent does not notice
    llm.rollback("s", third)
    back = talk.at(third)
    assert back.say([3, 0], count=5).num_cached_tokens == third - 1
    llm.rollback("child", first)  # no checkpoint is kept of it where there are seals: it is read again
    again = child.at(first, "child")
    if not more:
        again.line = Line(kind)
    assert again.say([1]).num_cached_tokens == (first if more else 0)
    empty(llm)


@each_kind
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_an_abort_leaves_the_last_boundary(kind: Kind, steps: int) -> None:
    """Wherever it falls: in the prompt, in a replay, after the seal, after timed ones."""
    llm = sealing_engine(60, step_tokens=6)
    Follower(llm)
    talk = Talk(llm, kind)
    talk.say(tokens(11), count=6)
    before = llm.chain_info("s")
    seq = talk.ask(tokens(10, 2), count=12)
    for _ in range(2 * steps):
        llm.step()
        llm.check()
    llm.abort(seq)
    llm.check()
    assert llm.chain_info("s").resident_tokens == before.resident_tokens
    assert talk.say([1, 1, 1], count=8).num_cached_tokens == len(talk.ids) - 12


@each_kind
@pytest.mark.parametrize("spans", [[(0, 2)], [(3, 9)], [(0, 14)], [(16, 19)], [(1, 3), (13, 15), (18, 20)]])
def test_prunes_of_tail_and_sealed_part(kind: Kind, spans: list[tuple[int, int]]) -> None:
    """Of the chain and of its checkpoints, and then the turns go on."""
    llm = sealing_engine(90)
    Follower(llm)
    talk = Talk(llm, kind)
    talk.say(tokens(13), count=8)
    second = len(talk.ids)
    talk.prune(*spans)
    talk.line.prune(spans)
    talk.past[second] = talk.line.copy()
    assert talk.say([3, 1], count=9).num_cached_tokens == second - 1
    talk.prune((2, 5), (second, second + 3))
    line = talk.past[second]
    line.prune([(2, 5)])
    talk.line.prune([(2, 5), (second, second + 3)])
    llm.fork("s", "child", second)
    child = talk.at(second, "child")
    child.edits = list(normal_edits([Edit(min(edit.at, second), edit.removed) for edit in talk.edits], second))
    assert child.say([2], count=7).num_cached_tokens == second - 1
    talk.say([4, 4], count=11)
    empty(llm)


@each_kind
def test_a_prune_that_the_copy_in_host_memory_missed(kind: Kind) -> None:
    """It is made on the device when the next turn begins; what it leaves of the sealed part is known before the next seal."""
    llm = sealing_engine(60, warm_pages=60)
    Follower(llm)
    talk = Talk(llm, kind)
    talk.say(tokens(14), count=9)
    llm.suspend("s")
    assert llm.chain_info("s").warm_tokens
    talk.prune((1, 4), (17, 19))
    assert talk.say([1, 2, 3], count=20).num_cached_tokens == len(talk.ids) - 24
    assert llm.tier.restores == 1
    talk.say([2], count=6)


@each_kind
def test_round_trips_through_host_memory(kind: Kind) -> None:
    llm = sealing_engine(60, warm_pages=60)
    Follower(llm)
    talk = Talk(llm, kind)
    for number in range(4):
        held = max(0, len(talk.ids) - 1)
        assert talk.say(tokens(8), count=7, seed=number).num_cached_tokens == held
        llm.fork("s", f"fork {number}", len(talk.ids))
        llm.drop(f"fork {number}")
        llm.suspend("s")
        assert llm.arena.used_bytes == 0 or kind.reuse == "radix"
    assert llm.tier.restores == 3


@each_kind
def test_a_commit_below_the_seal_falls_back_to_the_older_boundary(kind: Kind) -> None:
    """What a stop string takes back may have been sealed, or have left its mark: the chain stands where it stood before."""
    llm = sealing_engine(60)
    Follower(llm)
    talk = Talk(llm, kind)
    talk.say(tokens(9), count=4)
    older, line = len(talk.ids) - 1, talk.line.copy()
    seq = talk.ask([1, 2], count=14)
    run(llm)
    sealed_at, length = seq.state.sealed_at, seq.num_prompt_tokens + 1
    llm.commit(seq, seq.token_ids[seq.num_prompt_tokens :][:2])
    llm.check()
    talk.ids = seq.token_ids[: length + 1]
    lost = length < sealed_at or kind.marks
    assert lost or kind not in (TIMED, APPENDS, MARKED)
    talk.line = line
    if not lost:
        answer(talk.line, talk.ids[:-2], count=2)
    assert talk.line.length == (older if lost else length)
    assert talk.say([0, 3], count=6).num_cached_tokens == (older if lost else length)


@each_kind
@pytest.mark.parametrize("where", ["kept", "host memory", "nowhere"])
@pytest.mark.parametrize("steps", [2, 5, 14])
def test_a_preempted_sequence_goes_on(kind: Kind, where: str, steps: int) -> None:
    """From the state that was kept or brought back, or from nothing: then its seals fall at the same lengths again."""
    llm = sealing_engine(24, max_rows=1, step_tokens=6, warm_pages=60 if where == "host memory" else 0)
    follower = Follower(llm)
    talk = Talk(llm, kind)
    seq = talk.ask(tokens(15), count=24)
    for _ in range(steps):
        llm.step()
    other = llm.add(request([4] * (1 if where == "kept" else 92), max_tokens=2, priority=3))
    while other.status is not Status.FINISHED:
        llm.step()
        llm.check()
    llm.abort(other)
    assert seq.preemptions == 1
    run(llm)
    assert not follower.broken
    talk.expect(seq, count=24)
    assert (llm.tier.restores == 1) is (where == "host memory")
    assert (llm.scheduler.tally.recomputed > 0) is (where == "nowhere")


@each_sealing
def test_a_later_turn_that_lost_everything_is_read_as_one_prompt(kind: Kind) -> None:
    """Its tokens so far stay, and are read behind the new seal."""
    llm = sealing_engine(24, max_rows=1)
    Follower(llm)
    talk = Talk(llm, kind)
    talk.say(tokens(12), count=3)
    seq = talk.ask([1, 2, 3], count=12)
    while seq.num_generated < 5:
        llm.step()
    made, prompt = seq.token_ids[seq.num_prompt_tokens :], seq.request.token_ids
    other = llm.add(request([4] * 90, max_tokens=2, priority=3))
    while other.status is not Status.FINISHED:
        llm.step()
    llm.abort(other)
    run(llm)
    assert made == answer(talk.line, prompt, count=5)
    play = Play(Line(kind), len(prompt))
    for token in prompt:
        play.read(token)
    play.read_on()
    while play.runs:
        play.line.replay(play.runs.pop(0))
        play.read_on()
    while len(made) < 12:
        for token in seq.token_ids[play.line.length : len(prompt) + len(made)]:
            play.read(token)
        made.append(play.line.draw(0, len(made), 5))
    assert seq.token_ids == prompt + made
    talk.line = play.line
    talk.commit(seq)
    assert talk.say([2], count=3).num_cached_tokens == len(talk.ids) - 5


def test_guesses_are_for_forms_that_can_take_them_back() -> None:
    llm = sealing_engine(60, lookup=6)
    Follower(llm)
    for kind in KINDS:
        seq = Talk(llm, kind, kind.name).say([1, 2, 3] * 5, count=12)
        assert (seq.drafter is not None) is (kind.reuse == "radix")


@pytest.mark.parametrize("units", range(34, 52, 3))
def test_pages_that_a_sibling_holds_do_not_return_at_a_timed_seal(units: int) -> None:
    """The leader counted on them: it is promised others, or its siblings wait."""
    llm = sealing_engine(units, 2, kinds=[APPENDS])
    Follower(llm)
    leader = llm.add(request([1, 2, 3, 4, 0], max_tokens=16))
    seqs = [leader, *(llm.add(request([1, 2, 3, 4, 0], max_tokens=16, seed=seed, beside=leader)) for seed in (1, 2, 3))]
    while llm.has_work:
        for output in llm.step():
            if output.finished:
                assert output.seq.fault is None
                llm.abort(output.seq)
        llm.check()
    for seed, seq in enumerate(seqs):
        assert seq.token_ids[5:] == answer(Line(APPENDS), [1, 2, 3, 4, 0], count=16, seed=seed)
    assert seqs[1].num_cached_tokens == 4 or units < 40


@each_sealing
def test_a_seal_that_fails_ends_its_own_sequence_alone(kind: Kind) -> None:
    llm = sealing_engine(60)
    Follower(llm)
    talk, plain = Talk(llm, kind), Talk(llm, PLAIN, "plain")
    talk.say(tokens(5), count=2)
    held = len(talk.ids)
    unlucky, beside = talk.ask(tokens(14), count=20), plain.ask(tokens(3), count=40)
    llm.runner.fail_seal = True
    ended = []
    while llm.has_work:
        ended += [output.seq for output in llm.step() if output.finished]
        llm.check()
    assert ended == [unlucky, beside]
    assert isinstance(unlucky.fault, EngineFault)
    plain.expect(beside, count=40)
    plain.commit(beside)
    llm.runner.fail_seal = False
    assert talk.say(tokens(4), count=5).num_cached_tokens == held - 1
    plain.say(tokens(3), count=5)


def test_a_sealed_tail_is_no_prefix() -> None:
    """Also where a form that seals forgot to say that its KV is continued by chains alone."""
    kind = replace(EVICTS, reuse="radix")
    llm = sealing_engine(60, kinds=[kind])
    Follower(llm)
    first = llm.add(request(tokens(16), "s", max_tokens=3))
    run(llm)
    llm.commit(first, first.token_ids[16:])
    second = llm.add(request([*first.token_ids, 2], max_tokens=3))
    run(llm)
    assert second.num_cached_tokens == 0
    assert second.token_ids[20:] == answer(Line(kind), [*first.token_ids, 2], count=3)


def test_replays_take_no_part_in_an_answer() -> None:
    """Their tokens are forwarded and counted, and nothing of them is held or generated."""
    llm = sealing_engine(40, step_tokens=5)
    follower = Follower(llm)
    talk = Talk(llm, REPLAYS)
    seq = talk.say(tokens(12), count=6)
    assert follower.replayed[seq.seq_id] == 5
    assert seq.num_prefilled_tokens == 12 + 5
    assert llm.chain_info("s").logical_length == 18
    assert llm.chain_info("s").resident_tokens <= 7 + 1 + 5


def test_an_appending_form_holds_all_of_its_history() -> None:
    llm = sealing_engine(60)
    Follower(llm)
    talk = Talk(llm, APPENDS)
    for count in (3, 9, 17):
        talk.say(tokens(5), count=count)
        state = llm.chains.chains["s"].state
        assert state.resident == state.logical_length
        assert state.slots == state.floor
        assert state.floor == max(0, (state.logical_length - 4) // 4 * 4) or state.logical_length - state.floor < 9


def test_a_new_sealed_part_and_an_old_one_that_nobody_else_holds_fit_the_promise() -> None:
    """Until the prompt is sealed both are there; what is held with others is promised as if it were not."""
    llm = sealing_engine(60)
    talk = Talk(llm, EVICTS)
    talk.say(tokens(20), count=3)
    state, payload = llm.chains.chains["s"].state.fork(), EVICTS_PAYLOAD
    old = len(state.holdings[payload].units)
    shared = llm.oracle.cost(state, [], 40, prompt=36)
    llm.chains.lose(llm.chains.chains["s"], "reclaimed")
    alone = llm.oracle.cost(state, [], 40, prompt=36)
    assert shared.peak.counts[payload] == alone.peak.counts[payload] == old == 3
    edited = llm.oracle.cost(state, [Edit(24, ((0, 2),))], 40, prompt=36)
    assert edited.peak.counts[payload] == 3
    state.release()


def test_a_prune_reads_the_tail_before_the_sealed_part_is_written() -> None:
    """In the order in which units were taken: a new one may lie where a page of the tail was."""
    llm = sealing_engine(60)
    talk = Talk(llm, EVICTS)
    talk.say(tokens(20), count=9)
    state = llm.chains.chains["s"].state.fork()
    change = state.remove([(0, 2), (20, 22)], llm.pools.free)
    assert [type(work) for work in change.moves] == [Moves, SealWork]
    state.release()


def test_units_may_move_for_a_claim_only_behind_the_seals_that_were_decided() -> None:
    """A seal names units; whoever moves units carries out first what the batch has."""
    llm, seen = sealing_engine(60), list[SealWork]()
    claim = llm.oracle.claim

    def spied(claimed: Units) -> bool:
        seen.extend(work for work in llm.scheduler.batch.moves if isinstance(work, SealWork))
        return claim(claimed)

    llm.oracle.claim = spied
    Talk(llm, EVICTS).say(tokens(20), count=3)
    assert len(seen) == llm.runner.seals == 1
