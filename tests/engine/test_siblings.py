"""Sequences of one prompt: it is forwarded once, each draws what it would draw alone, and nothing is left behind."""

from __future__ import annotations

import random

import pytest
from fake_engine import ALL, FakeRunner, Oracle, Windows, engine, request, run

from agentkv.engine.core import Edit, Sequence, Status
from agentkv.engine.llm import LLM
from agentkv.engine.units import Units

PROMPT = [index % 5 for index in range(21)]


def family(llm: LLM, prompt: list[int], seeds: list[int], chains: bool = False, **options: object) -> list[Sequence]:
    """Sequences of one prompt, all beside the first."""
    made: list[Sequence] = []
    for seed in seeds:
        chain = f"chain-{seed}" if chains else None
        made.append(llm.add(request(prompt, chain, seed=seed, beside=made[0] if made else None, **options)))  # type: ignore[arg-type]
    return made


def forwarded(llm: LLM) -> int:
    runner = llm.runner
    assert isinstance(runner, FakeRunner)
    return runner.forwarded


def made(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :]


@pytest.mark.parametrize("reuse", ["radix", "chain"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 21])
def test_the_prompt_is_forwarded_once(length: int, reuse: str) -> None:
    llm = engine(reuse=reuse)
    seqs = family(llm, PROMPT[:length], [1, 2, 3], max_tokens=6)
    run(llm)
    assert [seq.num_prefilled_tokens for seq in seqs] == [length, 1, 1]
    assert forwarded(llm) == length + 2 + 3 * 5
    assert [made(seq) for seq in seqs] == [Oracle().generate(PROMPT[:length], (), seed, 6) for seed in (1, 2, 3)]
    assert all(seq.miss is None for seq in seqs[1:])
    for seq in seqs:
        llm.commit(seq, made(seq))
        llm.check()


def test_siblings_hold_the_prompt_once() -> None:
    llm = engine(units=32, page_size=4)
    seqs = family(llm, [1] * 16, [1, 2, 3, 4], max_tokens=2)
    while any(not seq.num_generated for seq in seqs):
        llm.step()
        llm.check()
    assert llm.stats().active <= 4 + 2 * 4  # four pages of prompt; a copied last page and a fresh one each


def test_edits_of_the_prompt_are_applied_once() -> None:
    edits = (Edit(12, ((3, 9),)), Edit(21, ((10, 15),)))
    llm = engine()
    seqs = family(llm, PROMPT, [1, 2], max_tokens=5, edits=edits)
    run(llm)
    assert [seq.num_prefilled_tokens for seq in seqs] == [21, 1]
    assert [made(seq) for seq in seqs] == [Oracle().generate(PROMPT, edits, seed, 5) for seed in (1, 2)]


@pytest.mark.parametrize("steps", range(6))
def test_a_leader_that_is_aborted_promotes_a_sibling(steps: int) -> None:
    llm = engine(step_tokens=8)
    before = llm.stats().bytes
    seqs = family(llm, PROMPT, [1, 2, 3], max_tokens=4)
    for _ in range(steps):
        llm.step()
        llm.check()
    had = seqs[0].num_forwarded
    llm.abort(seqs[0])
    llm.check()
    run(llm)
    assert [made(seq) for seq in seqs[1:]] == [Oracle().generate(PROMPT, (), seed, 4) for seed in (2, 3)]
    assert forwarded(llm) <= had + len(PROMPT) + 1 + 2 * 3  # the prompt at most once more, by one of them
    for seq in seqs[1:]:
        llm.abort(seq)
    assert llm.stats().bytes == before


def test_a_leader_that_faults_takes_nobody_along() -> None:
    llm = engine(step_tokens=8)
    runner = llm.runner
    assert isinstance(runner, FakeRunner)
    runner.fail_execute = {2}  # in the middle of the leader's prompt
    seqs = family(llm, PROMPT, [1, 2, 3], max_tokens=4)
    run(llm)
    assert seqs[0].fault is not None
    assert [made(seq) for seq in seqs[1:]] == [Oracle().generate(PROMPT, (), seed, 4) for seed in (2, 3)]


def test_a_prompt_that_is_another_is_not_shared() -> None:
    llm = engine()
    leader = llm.add(request(PROMPT, max_tokens=4, seed=1))
    for ids, salt in (([*PROMPT[:-1], 1], ""), (PROMPT[:-1], ""), (PROMPT, "another tenant")):
        other = llm.add(request(ids, max_tokens=4, seed=1, beside=leader, salt=salt))
        assert other.leader is None
        assert not other.held
    run(llm)


def test_who_waits_for_a_prompt_does_not_hold_up_others() -> None:
    llm = engine(step_tokens=4, max_rows=3)
    family(llm, PROMPT, [1, 2, 3, 4], max_tokens=2)
    other = llm.add(request([1, 2], max_tokens=2, seed=9))
    llm.step()
    assert other.status is Status.RUNNING
    run(llm)


@pytest.mark.parametrize("windows", [(5,), (None, 6), (None, 4, 9)])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_windows_that_siblings_hold_together_are_reserved_for(windows: Windows, late: int) -> None:
    """The leader counts on pages behind its windows; those that a sibling holds too do not return."""
    llm = engine(units=200, windows=windows, step_tokens=6, slack=5)
    first = llm.add(request(PROMPT, seed=1, max_tokens=30))
    while not first.num_generated:
        llm.step()
    for _ in range(late):
        llm.step()
        llm.check()
    others = [llm.add(request(PROMPT, seed=seed, max_tokens=30, beside=first)) for seed in (2, 3)]
    run(llm)
    for seq in (first, *others):
        assert made(seq) == Oracle(windows=windows).generate(PROMPT, (), seq.seed, 30)
    assert [seq.num_prefilled_tokens for seq in others] == [1, 1]


def test_a_sibling_that_ran_goes_on_without_its_leader() -> None:
    """Both are preempted and the leader's KV is cut: the sibling neither waits for it nor stands in its way."""
    llm = engine(units=10, max_rows=1, step_tokens=64)
    first = llm.add(request(PROMPT, seed=1, max_tokens=20))
    llm.step()
    second = llm.add(request(PROMPT, seed=2, max_tokens=4, beside=first, priority=1))
    llm.step()
    third = llm.add(request([4] * 12, seed=3, max_tokens=4, priority=2))
    llm.step()
    llm.check()
    assert (first.parked, second.parked, first.prefilling, second.prefilling) == (True, True, True, False)
    ended: list[Sequence] = []
    for _ in range(60):
        for output in llm.step():
            if output.finished:
                ended.append(output.seq)
                assert made(output.seq) == Oracle().generate(
                    output.seq.request.token_ids, (), output.seq.seed, output.seq.max_tokens
                )
                llm.commit(output.seq, made(output.seq))
        llm.check()
    assert ended == [third, second, first]


def test_a_prompt_is_shared_from_its_end_on() -> None:
    llm = engine(step_tokens=64)
    first = llm.add(request(PROMPT, max_tokens=8, seed=1))
    llm.step()
    second = llm.add(request(PROMPT, max_tokens=8, seed=2))
    run(llm)
    assert second.num_cached_tokens == 20  # whole pages of 4
    assert [made(seq) for seq in (first, second)] == [Oracle().generate(PROMPT, (), seed, 8) for seed in (1, 2)]


@pytest.mark.parametrize("chain", [None, "c"])
def test_an_aborted_prompt_leaves_the_prefix_cache(chain: str | None) -> None:
    llm = engine(step_tokens=64)
    empty = llm.stats().bytes
    seq = llm.add(request(PROMPT, chain, max_tokens=8))
    llm.step()
    assert list(llm.radix.slices())
    llm.abort(seq)
    assert llm.stats().bytes == empty
    llm.check()


def test_what_others_hold_of_an_aborted_prompt_stays_theirs() -> None:
    llm = engine(step_tokens=64)
    first = llm.add(request(PROMPT, max_tokens=8, seed=1))
    llm.step()
    second = llm.add(request([*PROMPT, 1, 2], max_tokens=8, seed=2))
    llm.step()
    llm.abort(first)
    llm.check()
    run(llm)
    assert second.num_cached_tokens == 20
    assert made(second) == Oracle().generate([*PROMPT, 1, 2], (), 2, 8)
    llm.commit(second, made(second))
    again = llm.add(request([*PROMPT, 1, 2], max_tokens=1))
    run(llm)
    assert again.num_cached_tokens == 22


@pytest.mark.parametrize("seed", range(40))
def test_random_families_in_a_small_arena(seed: int) -> None:
    """Families come, are aborted and committed at random; every answer is what it would be alone, accounts always hold."""
    chance = random.Random(seed)
    windows: Windows = [ALL, (5,), (None, 6), (None, 4, 9)][seed % 4]
    llm = engine(
        units=chance.randint(14, 24) * (1, 3, 6)[len(windows) - 1],
        max_rows=3,
        step_tokens=chance.choice([4, 7, 64]),
        slack=chance.randint(0, 5),
        windows=windows,
        warm_pages=chance.choice([0, 10, 40]),
    )
    empty = llm.stats().bytes
    alive: list[Sequence] = []
    for number in range(12):
        prompt = PROMPT[: chance.randint(1, 21)] if chance.random() < 0.7 else [chance.randrange(5) for _ in range(9)]
        seeds = [100 * number + index for index in range(chance.randint(1, 3))]
        rank = chance.choice([0, 0, 3, -3])
        alive += family(llm, prompt, seeds, chains=chance.random() < 0.5, max_tokens=chance.randint(1, 6), priority=rank)
        for _ in range(chance.randint(0, 6)):
            llm.step()
            llm.check()
            for seq in list(alive):
                if seq.status is Status.FINISHED or chance.random() < 0.05:
                    alive.remove(seq)
                    whole = seq.status is Status.FINISHED
                    if whole:
                        ids = seq.token_ids[: seq.num_prompt_tokens]
                        assert made(seq) == Oracle(windows=windows).generate(ids, (), seq.seed, seq.max_tokens)
                    if whole and chance.random() < 0.5:
                        llm.commit(seq, made(seq))
                    else:
                        llm.abort(seq)
                    llm.check()
    for seq in alive:
        llm.abort(seq)
        llm.check()
    for chain_id in list(llm.chains.chains):
        llm.drop(chain_id)
    llm.oracle.reclaim(Units.of(pool.total_units for pool in llm.pools.pools))
    assert llm.stats().bytes == empty
