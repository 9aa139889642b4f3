"""Who makes way, what it keeps, what it costs; deadlines; tenants; and that everybody's turn comes."""

from __future__ import annotations

import itertools
import logging

import pytest
from fake_engine import Oracle, engine, request, run
from test_output import Pieces

from agentkv.engine.core import Edit, Sequence, Status
from agentkv.engine.llm import LLM
from agentkv.engine.queue import shares
from agentkv.errors import BadRequest, Cancelled


def steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.step()
        llm.check()


def made(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :]


def test_a_higher_priority_takes_the_row_and_the_state_stays_parked() -> None:
    llm = engine(max_rows=1)
    low = llm.add(request([1, 2, 0, 1], max_tokens=12, seed=3))
    steps(llm, 5)
    high = llm.add(request([2, 2], max_tokens=3, priority=1))
    steps(llm, 1)
    assert (high.status, low.status, low.parked) == (Status.RUNNING, Status.WAITING, True)
    assert (llm.stats().parked, llm.stats().preempted, llm.stats().waiting_by_priority) == (2, 1, {0: 1})
    run(llm)
    assert made(low) == Oracle().generate([1, 2, 0, 1], [], 3, 12)
    assert (low.num_prefilled_tokens, low.preemptions, low.miss and low.miss.reason) == (4, 1, "new"), "nothing was recomputed"
    assert (llm.stats().tally.preemptions, llm.stats().tally.recomputed) == (1, 0)


@pytest.mark.parametrize("prompt", [20, 21, 22, 23])
def test_what_memory_takes_is_recomputed_and_nothing_said_twice(prompt: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentkv")
    llm = engine(units=10, page_size=4, tokenizer=Pieces([each.encode() for each in "abcde"]))
    ids = [i % 3 for i in range(prompt)]
    low = llm.add(request(ids, "chat", max_tokens=12, seed=7))
    text = ""
    steps(llm, 1)
    for _ in range(5):
        text += "".join(output.text for output in llm.step())
    before, forwarded = made(low), low.num_forwarded
    high = llm.add(request([1] * 20, max_tokens=5, priority=5))
    llm.step()
    assert low.parked
    kept = low.num_forwarded
    assert 0 < kept < forwarded, "only as much is given up as is needed"
    while llm.has_work:
        for output in llm.step():
            text += output.text if output.seq is low else ""
            if output.seq is high and output.finished:
                llm.commit(high, made(high))
        llm.check()
    expected = Oracle().generate(ids, [], 7, 12)
    assert made(low)[: len(before)] == before
    assert made(low) == expected
    assert text.endswith("".join("abcde"[token] for token in expected[-11:]))
    assert len(text) in (11, 12)
    assert low.num_prefilled_tokens == prompt + forwarded - kept
    assert llm.stats().tally.recomputed == forwarded - kept
    events = [(record.event, record.seq_id) for record in caplog.records if hasattr(record, "event")]
    assert events == [("preempted", low.seq_id), ("resumed", low.seq_id)]
    llm.commit(low, made(low))
    assert llm.chain_info("chat").logical_length == prompt + 12  # type: ignore[union-attr]


@pytest.mark.parametrize("progress", range(1, 9))
@pytest.mark.parametrize("rival", [4, 12, 28])
@pytest.mark.parametrize("warm", [0, 20])
def test_pruned_histories_survive_a_preemption_at_any_point(progress: int, rival: int, warm: int) -> None:
    """Inside the prompt, at an edit, behind it: parked, cut, copied or lost, the tokens are those of an undisturbed run."""
    ids, edits = [i % 3 for i in range(22)], [Edit(6, ((1, 3),)), Edit(15, ((4, 9),))]
    llm = engine(units=8, page_size=4, step_tokens=6, warm_pages=warm)
    low = llm.add(request(ids, "a", max_tokens=6, edits=edits))
    steps(llm, progress)
    high = llm.add(request([2] * rival, max_tokens=4, priority=1))
    run_and_commit(llm)
    assert low.preemptions == (rival > 4 and progress < 9)
    assert made(low) == Oracle().generate(ids, edits, 0, 6)
    assert made(high) == Oracle().generate([2] * rival, [], 0, 4)


@pytest.mark.parametrize("rival", [8, 20, 28, 36])
def test_preemption_demotes_and_recomputes_only_where_that_is_cheaper(rival: int) -> None:
    """What is lacking decides: nothing, parked as it is; most of the state, copied whole, and nothing is forwarded again."""
    ids = [i % 3 for i in range(21)]
    llm = engine(units=10, page_size=4, warm_pages=20)
    low = llm.add(request(ids, max_tokens=12, seed=7))
    steps(llm, 6)
    llm.add(request([1] * rival, max_tokens=5, priority=5))
    steps(llm, 1)
    assert low.status is Status.WAITING
    assert (low.parked, low.warm is not None) == (rival == 8, rival != 8)
    run_and_commit(llm)
    assert made(low) == Oracle().generate(ids, [], 7, 12)
    stats = llm.stats()
    assert (stats.demotions, stats.restores) == ((0, 0) if rival == 8 else (1, 1))
    assert (low.num_prefilled_tokens, stats.tally.recomputed, stats.warm_bytes) == (21, 0, 0)


def test_a_cut_that_costs_little_is_no_copy() -> None:
    llm = engine(units=20, page_size=4, step_tokens=64, warm_pages=20)
    low = llm.add(request([i % 3 for i in range(57)], max_tokens=8))
    steps(llm, 3)
    llm.add(request([1] * 20, max_tokens=5, priority=5))
    steps(llm, 1)
    assert (low.parked, low.num_forwarded, llm.stats().demotions) == (True, 56, 0), "59 had been"
    run_and_commit(llm)
    assert made(low) == Oracle().generate([i % 3 for i in range(57)], [], 0, 8)
    assert llm.stats().tally.recomputed == 3


def in_host_memory(warm_pages: int = 20) -> tuple[LLM, Sequence]:
    """A sequence whose KV has gone to host memory, beside the one that took its place."""
    llm = engine(units=10, page_size=4, warm_pages=warm_pages)
    low = llm.add(request([i % 3 for i in range(21)], "low", max_tokens=12, seed=7, timeout=1000))
    steps(llm, 6)
    llm.add(request([1] * 30, max_tokens=5, priority=5))
    steps(llm, 1)
    return llm, low


@pytest.mark.parametrize("what", ["corrupt", "lost", "too large", "a device fault"])
def test_without_its_copy_it_is_computed_again(what: str) -> None:
    llm, low = in_host_memory(3 if what == "too large" else 20)
    assert (low.warm is None) is (what == "too large")
    if low.warm is not None and what == "corrupt":
        low.warm.token_ids[3] ^= 1
    elif low.warm is not None and what == "lost":
        llm.tier._lose(low.warm, "reclaimed")
    high = llm.scheduler.running[0]
    llm.runner.fail_move = what == "a device fault"  # type: ignore[attr-defined]
    while not llm.stats().tally.recomputed and low.status is not Status.RUNNING:
        for output in llm.step():
            if output.seq is high and output.finished:
                llm.commit(high, made(high))
        llm.check()
        if high.status is Status.CLOSED and low.warm is not None and what == "a device fault":
            assert low.status is Status.WAITING, "the copy stays for another try"
            llm.runner.fail_move = False  # type: ignore[attr-defined]
    run_and_commit(llm)
    assert made(low) == Oracle().generate([i % 3 for i in range(21)], [], 7, 12)
    again = llm.stats().tally.recomputed
    assert {"a device fault": again == 0, "too large": 0 < again < 25}.get(what, again == 25), again
    assert llm.stats().warm_bytes == 0


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_copy_goes_with_its_sequence(how: str) -> None:
    now = 0.0
    llm, low = in_host_memory()
    assert low.warm is not None
    assert llm.stats().warm_bytes > 0
    if how == "abort":
        llm.abort(low)
    else:
        llm._clock = lambda: now
        low.deadline = now
        steps(llm, 1)
        assert isinstance(low.fault, Cancelled)
    llm.check()
    assert llm.stats().warm_bytes == 0


def run_and_commit(llm: LLM) -> list[Sequence]:
    """Run to the end, committing at once; who finished, in order."""
    done = []
    for _ in range(5000):
        if not llm.has_work:
            return done
        for output in llm.step():
            if output.finished and output.seq.fault is None:
                llm.commit(output.seq, made(output.seq))
                done.append(output.seq)
        llm.check()
    raise AssertionError("no progress")


def test_idle_chains_go_before_running_work_and_parked_work_goes_last() -> None:
    llm = engine(units=12, page_size=4, max_rows=4)
    idle = llm.add(request([0] * 12, "idle", max_tokens=2))
    run_and_commit(llm)
    low = llm.add(request([1] * 12, max_tokens=9))
    steps(llm, 2)
    high = llm.add(request([2] * 20, max_tokens=4, priority=1))
    steps(llm, 1)
    assert low.status is Status.RUNNING, "reclaiming the idle chain was enough"
    assert idle.status is Status.CLOSED
    assert llm.chain_info("idle").resident_tokens < 13  # type: ignore[union-attr]
    higher = llm.add(request([0] * 4, max_tokens=4, priority=2))
    steps(llm, 1)
    assert llm.chain_info("idle").resident_tokens == 0  # type: ignore[union-attr]
    assert (low.parked, high.status, higher.status) == (True, Status.RUNNING, Status.RUNNING)
    run_and_commit(llm)


def test_the_lowest_and_newest_make_way_and_no_more_than_needed() -> None:
    llm = engine(units=10, page_size=4, max_rows=4)
    first, second, low = (llm.add(request([i] * 8, max_tokens=5, priority=rank)) for i, rank in enumerate((0, 0, -1)))
    steps(llm, 1)
    llm.add(request([3] * 4, max_tokens=5, priority=1))
    steps(llm, 1)
    assert [seq.status for seq in (first, second, low)] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    llm.add(request([4] * 10, max_tokens=3, priority=1))
    steps(llm, 1)
    assert [seq.status for seq in (first, second)] == [Status.RUNNING, Status.WAITING]
    run_and_commit(llm)


def test_equals_never_preempt_each_other() -> None:
    llm = engine(units=10, page_size=4, patience=1000)
    for number in range(6):
        llm.add(request([number % 3] * 20, max_tokens=5, salt="ab"[number % 2]))
    assert len(run_and_commit(llm)) == 6
    assert llm.stats().tally.preemptions == 0


# -- deadlines


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    now = 0.0
    llm = engine(max_rows=1, clock=lambda: now)
    parked = llm.add(request([1, 2], "p", max_tokens=50, timeout=9))
    steps(llm, 3)
    running = llm.add(request([0], "r", max_tokens=50, timeout=6, priority=1))
    waiting = llm.add(request([0], "w", timeout=3))
    steps(llm, 2)
    assert (parked.parked, running.status, waiting.status) == (True, Status.RUNNING, Status.WAITING)
    for now, seq, words in ((3.0, waiting, "while it waited for room"), (6.0, running, "tokens"), (9.0, parked, "after")):  # noqa: B007
        outputs = llm.step()
        assert [output.seq for output in outputs if output.finished] == [seq]
        assert isinstance(seq.fault, Cancelled)
        assert words in str(seq.fault)
        llm.check()
    assert llm.arena.used_bytes == 0
    assert llm.stats().tally.deadline_misses == 3
    assert not llm.has_work


def test_the_sooner_deadline_goes_first() -> None:
    llm = engine(max_rows=1)
    timeouts = [None, 50.0, 9.0, None, 20.0]
    seqs = [llm.add(request([1], max_tokens=2, timeout=timeout)) for timeout in timeouts]
    assert run_and_commit(llm) == [seqs[i] for i in (2, 4, 1, 0, 3)]


@pytest.mark.parametrize("bad", [{"priority": 11}, {"priority": -11}, {"priority": True}, {"priority": 0.5}, {"timeout": 0}])
def test_out_of_range_is_refused_at_the_door(bad: dict[str, object]) -> None:
    llm = engine()
    with pytest.raises(BadRequest) as caught:
        llm.add(request([1], "a", **bad))  # type: ignore[arg-type]
    assert caught.value.details["param"] in bad
    assert not llm.has_work
    llm.add(request([1], "a"))


# -- fairness


def test_many_requests_of_one_tenant_do_not_hold_up_another() -> None:
    """Two rows, 20 requests of a before the two of b: b is served by turns with a, not after it."""
    llm = engine(units=400, max_rows=2, step_tokens=8, reuse="chain")
    for number in range(20):
        llm.add(request([number % 3] * 6, max_tokens=4, salt="a"))
    late = [llm.add(request([1] * 6, max_tokens=4, salt="b")) for _ in range(2)]
    done = run_and_commit(llm)
    assert max(done.index(seq) for seq in late) <= 3


def test_service_is_counted_in_tokens() -> None:
    """a's requests are four times as long: while both have work, b gets four for one, whatever the arrivals."""
    llm = engine(units=900, max_rows=1, step_tokens=50, reuse="chain")
    for _ in range(30):
        llm.add(request([1] * 40, max_tokens=1, salt="a"))
    for _ in range(80):
        llm.add(request([1] * 10, max_tokens=1, salt="b"))
    names = [seq.request.salt for seq in run_and_commit(llm)]
    llm_tokens = [40 if name == "a" else 10 for name in names]
    lead = 0
    for name, tokens in zip(names[:90], llm_tokens, strict=False):
        lead += tokens if name == "a" else -tokens
        assert abs(lead) <= 40, "nobody is ahead by more than one request"


def test_an_absent_tenant_saves_nothing_up() -> None:
    llm = engine(units=400, max_rows=1, step_tokens=8, reuse="chain")
    for _ in range(10):
        llm.add(request([0] * 5, max_tokens=3, salt="a"))
    for _ in range(13):
        for output in llm.step():
            if output.finished:
                llm.abort(output.seq)
    for _ in range(10):
        llm.add(request([2] * 5, max_tokens=3, salt="b"))
    names = [seq.request.salt for seq in run_and_commit(llm)]
    assert names[1:7] in (list("bababa"), list("ababab"))


@pytest.mark.parametrize("crowd", [1, 3])
def test_low_priority_progresses_under_a_stream_of_higher_ones(crowd: int) -> None:
    """A new high one as soon as one ends, for ever: the low one waits `patience` steps, and is then not disturbed again."""
    patience, length = 6, 9
    llm = engine(units=10, page_size=4, max_rows=crowd, patience=patience)
    alive = [llm.add(request([1] * 3, max_tokens=8, priority=9)) for _ in range(crowd)]
    low = llm.add(request([0] * 20, max_tokens=length, priority=-9))
    for number in itertools.count(1):
        assert number < patience + 8 + length + 5, "it starves"
        for output in llm.step():
            if output.finished:
                llm.abort(output.seq)
                if output.seq is low:
                    assert made(low) == Oracle().generate([0] * 20, [], 0, length)
                    return
                alive.append(llm.add(request([1] * 3, max_tokens=8, priority=9)))
        llm.check()


def test_a_tenant_that_fills_the_engine_makes_way_for_one_that_has_nothing() -> None:
    llm = engine(units=400, max_rows=2, patience=5)
    rich = [llm.add(request([i] * 3, max_tokens=200, salt="a")) for i in range(2)]
    steps(llm, 2)
    poor = llm.add(request([0] * 3, max_tokens=4, salt="b"))
    steps(llm, 5)
    assert poor.status is Status.WAITING
    steps(llm, 1)
    assert (poor.status, [seq.status for seq in rich]) == (Status.RUNNING, [Status.RUNNING, Status.WAITING])
    run(llm)


# -- the prefill budget


def test_a_huge_prompt_does_not_hold_up_short_ones() -> None:
    llm = engine(units=900, max_rows=4, step_tokens=32)
    huge = llm.add(request([0] * 2000, max_tokens=1))
    steps(llm, 1)
    short = [llm.add(request([1] * 10, max_tokens=1, seed=i)) for i in range(2)]
    steps(llm, 2)
    assert all(seq.status is Status.FINISHED for seq in short)
    assert huge.num_forwarded >= 32 + 16, "and gets no less than half of each step itself"


@pytest.mark.parametrize("wants", list(itertools.product([1, 2, 5, 40], repeat=3)))
def test_shares(wants: tuple[int, int, int]) -> None:
    for budget in (3, 4, 9, 30, 200):
        given = shares(budget, list(wants), [0, 0, 0])
        assert sum(given) == min(budget, sum(wants)), "nothing is left over"
        assert all(1 <= got <= want for got, want in zip(given, wants, strict=True))
        assert given[0] >= min(wants[0], (budget - 3) // 2 + 1), "half of a step is the first one's"
        shortest = min(range(3), key=lambda i: wants[i])
        assert given[shortest] >= min(wants[shortest], (budget - 3) // 2 + 1)
        assert shares(budget, list(wants), [0, 9, 0])[1] >= given[1]
