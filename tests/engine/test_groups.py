"""KV groups: windows let go of pages, boundaries keep theirs, prefixes are continued where windows are whole."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from fake_engine import Oracle, Windows, engine, request, run, turn

from agentkv.engine.cache import reclaim as reclaiming
from agentkv.engine.cache.arena import Arena, UnitClass
from agentkv.engine.cache.reclaim import Room, reclaim
from agentkv.engine.core import GRANULE, Edit, Sequence, Status
from agentkv.engine.llm import LLM
from agentkv.engine.units import Units

MIXED: Windows = (None, 6)
PAGE = 4


def cached(llm: LLM, ids: list[int], chain: str | None = None, **options: object) -> tuple[Sequence, list[int]]:
    """A turn, and what it made: the sequence tells what it had cached and why not more."""
    seq = llm.add(request(ids, chain, **options))  # type: ignore[arg-type]
    run(llm)
    made = seq.token_ids[seq.num_prompt_tokens :]
    assert made == Oracle(windows=tuple(group.window for group in llm.runner.groups)).generate(  # type: ignore[attr-defined]
        ids, seq.request.edits, 0, seq.max_tokens
    )
    llm.commit(seq, made)
    llm.check()
    return seq, made


@pytest.mark.parametrize("windows", [(6,), MIXED, (None, 3, 9)])
@pytest.mark.parametrize("slack", [0, 3])
def test_pages_behind_the_window_are_free_while_it_grows(windows: Windows, slack: int) -> None:
    """Brute force over positions: pages that may still be seen are held, and of others those of the last step alone."""
    llm = engine(units=400, page_size=PAGE, windows=windows, slack=slack, step_tokens=8)
    seq = llm.add(request([i % 5 for i in range(50)], max_tokens=60))
    while llm.has_work:
        before = llm.runner.forwarded  # type: ignore[attr-defined]
        llm.step()
        llm.check()
        assert seq.state is not None
        length, forwarded = seq.state.logical_length, llm.runner.forwarded - before  # type: ignore[attr-defined]
        for window, count in zip(windows, seq.state.units.counts, strict=True):
            least, most = (
                {position // PAGE for position in range(0 if window is None else max(0, length - reach), length)}
                for reach in ((window or 0) - 1, (window or 0) - 1 + slack + forwarded)
            )
            assert len(least) <= count <= len(most)
    used = llm.arena.used_bytes
    assert used == llm.pools.bytes(seq.state.units)  # type: ignore[union-attr]
    assert seq.token_ids[50:] == Oracle(windows=windows).generate(seq.token_ids[:50], [], 0, 60)


def test_a_model_of_windows_alone_runs_past_its_memory() -> None:
    """9 pages of 4 hold a window of 6 and a step of 16, so 500 tokens of history are no trouble."""
    llm = engine(units=9, page_size=PAGE, windows=(6,))
    _, made = cached(llm, [i % 5 for i in range(300)], "a", max_tokens=200)
    assert len(made) == 200
    assert llm.peak_bytes <= 9 * llm.pools.pools[0].cls.unit_bytes


def test_a_turn_continues_from_the_end_of_the_last_and_goes_back_to_the_one_before() -> None:
    llm = engine(units=200, page_size=PAGE, windows=MIXED)
    first = [i % 5 for i in range(40)]
    second = first + cached(llm, first, "a", max_tokens=8)[1]
    seq, made = cached(llm, second + [1, 2], "a", max_tokens=30)
    assert seq.num_cached_tokens == len(second) - 1
    llm.rollback("a", len(second))
    seq, _ = cached(llm, second + [3], "a", max_tokens=3)
    assert (seq.num_cached_tokens, seq.miss) == (len(second) - 1, None)
    llm.fork("a", "b", len(second))
    seq, _ = cached(llm, second + [4], "b", max_tokens=3)
    assert seq.num_cached_tokens >= len(second) - 1
    assert made


def test_between_boundaries_there_is_no_window_to_go_back_to_and_the_miss_says_so() -> None:
    llm = engine(units=200, page_size=PAGE, windows=MIXED, reuse="chain")
    ids = [i % 5 for i in range(40)]
    ids += cached(llm, ids, "a", max_tokens=30)[1]
    llm.rollback("a", 50)
    seq, _ = cached(llm, ids[:50], "a", max_tokens=3)
    assert seq.num_cached_tokens == 0
    assert seq.miss is not None
    assert (seq.miss.reason, seq.miss.tokens) == ("reclaimed", 49)


@pytest.mark.parametrize("taken_back", [0, 1, 3, 4])
def test_a_few_tokens_can_be_taken_back(taken_back: int) -> None:
    """As after a stop string: three tokens of slack."""
    llm = engine(units=200, page_size=PAGE, windows=MIXED, slack=3, checkpoints=0)
    seq = llm.add(request([i % 5 for i in range(41)], "a", max_tokens=41))
    run(llm)
    ids = seq.token_ids[: len(seq.token_ids) - taken_back]
    llm.commit(seq, ids[seq.num_prompt_tokens :])
    llm.check()
    again, _ = cached(llm, ids + [1], "a", max_tokens=3)
    assert again.num_cached_tokens == len(ids) - 1
    assert again.miss is None


def test_what_reaches_back_too_far_falls_back_to_the_last_boundary() -> None:
    llm = engine(units=200, page_size=PAGE, windows=MIXED, slack=0)
    ids = [i % 5 for i in range(30)]
    ids += cached(llm, ids, "a", max_tokens=5)[1]
    seq = llm.add(request(ids + [1], "a", max_tokens=40))
    run(llm)
    kept = seq.token_ids[: seq.num_prompt_tokens + 10]
    llm.commit(seq, kept[seq.num_prompt_tokens :])
    llm.check()
    again, _ = cached(llm, kept + [2], "a", max_tokens=3)
    assert again.num_cached_tokens == len(ids) - 1
    assert again.miss is not None
    assert again.miss.reason == "reclaimed"
    assert again.miss.tokens == len(kept) - len(ids)


@pytest.mark.parametrize("gone", [(2, 20), (60, 63), (55, 66), (40, 70)])
def test_a_prune_reaches_the_state_and_each_boundary(gone: tuple[int, int]) -> None:
    """Behind the windows, inside them, and across the edge; then on from the end and from the boundary before."""
    llm, ids, bounds = engine(units=400, page_size=PAGE, windows=MIXED), [i % 5 for i in range(50)], []
    for _ in range(2):
        ids += cached(llm, ids, "a", max_tokens=12)[1]
        bounds.append(len(ids))
    moved: list[int] = []
    move_slots = llm.runner.move_slots
    llm.runner.move_slots = lambda source, target, group=0: (moved.append(group), move_slots(source, target, group))[1]  # type: ignore[method-assign]
    edits = [Edit(len(ids), (gone,))]
    before = llm.arena.free_bytes
    price = llm.price("a", [gone])
    assert llm.prune("a", [gone]) == price
    llm.check()
    assert price[0] == gone[1] - gone[0]
    assert llm.arena.free_bytes - before == price[1]
    if gone == (2, 20):
        assert set(moved) == {0}, "the windows have let go of it: nothing to do there"
    llm.fork("a", "b", bounds[0])
    seq, _ = cached(llm, ids + [1], "a", max_tokens=10, edits=edits)
    assert seq.num_cached_tokens == len(ids) - 1
    clipped = [Edit(bounds[0], ((gone[0], min(gone[1], bounds[0])),))] if gone[0] < bounds[0] else []
    seq, _ = cached(llm, ids[: bounds[0]] + [2], "b", max_tokens=10, edits=clipped)
    assert seq.num_cached_tokens == bounds[0] - 1


def test_a_shared_beginning_is_found_again_from_the_second_request_that_leaves_it() -> None:
    """The first one's windows have moved on; the second computes it again and leaves the window where the two part."""
    llm, head = engine(units=400, page_size=PAGE, windows=MIXED), [i % 5 for i in range(42)]
    counts = [cached(llm, [*head, *[token] * 30], max_tokens=4)[0].num_cached_tokens for token in (0, 1, 3, 4)]
    assert counts == [0, 0, 42, 42]


def test_the_exact_end_of_a_request_is_cached() -> None:
    llm, ids = engine(units=400, page_size=PAGE, windows=MIXED), [i % 5 for i in range(42)]
    ids += cached(llm, ids, max_tokens=7)[1]
    assert cached(llm, [*ids, 1])[0].num_cached_tokens == len(ids) - 1


def test_shared_parts_survive_the_closing_of_a_session() -> None:
    llm, head = engine(units=400, page_size=PAGE, windows=MIXED), [i % 5 for i in range(42)]
    for name, token in (("a", 0), ("b", 1)):
        turn_ids = [*head, *[token] * 30]
        seq = llm.add(request(turn_ids, name, max_tokens=4))
        run(llm)
        llm.commit(seq, seq.token_ids[seq.num_prompt_tokens :])
    llm.drop("a")
    llm.check()
    assert cached(llm, [*head, 2, 2])[0].num_cached_tokens == 42


def test_what_costs_more_to_compute_again_stays_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two leaves of the same size: the one further back goes first, unless the other was not used for much longer."""
    monkeypatch.setattr(reclaiming, "KNEE", 8)
    near, far = [2] * 16, [0] * 40 + [1] * 16
    for used_lately, left in ((1, (12, 56)), (60, (16, 52))):
        llm = engine(units=200, page_size=PAGE)
        for ids in ([0] * 40, far, near):
            turn(llm, ids, max_tokens=1)
        llm.radix.match("", far, 99)
        for _ in range(used_lately):
            llm.radix.match("", near, 99)
        reclaim(llm.radix, Room(llm.pools, llm.pools.free + Units((1,))))
        assert tuple(llm.radix.match("", ids, 99).length for ids in (near, far)) == left


@pytest.mark.parametrize("windows", [(None,), MIXED, (None, 7, 40)])
def test_a_request_that_leaves_five_percent_is_admitted_at_once(windows: Windows) -> None:
    """Also of several classes, beside a sequence that holds memory of all of them."""
    for held in (10, 90, 400):
        llm = engine(units=500, page_size=PAGE, windows=windows, step_tokens=16)
        first = llm.add(request([0] * held, max_tokens=2))
        run(llm)
        free, pool = llm.arena.free_bytes, llm.arena.num_granules * GRANULE

        def peak_bytes(length: int, llm: LLM = llm) -> int:
            return llm.pools.bytes(llm.oracle.cost(None, (), length).peak)

        length = bisect_right(range(2500), free - pool // 20, key=peak_bytes) - 1  # the longest that leaves so much
        assert length > 100
        seq = llm.add(request([1] * (length - 3), max_tokens=4))
        llm.step()
        assert seq.status is Status.RUNNING
        llm.check()
        llm.abort(first)
        run(llm)
        assert seq.status is Status.FINISHED
        llm.abort(seq)


def test_claims_of_one_class_are_out_of_reach_of_another() -> None:
    small, large = UnitClass("small", GRANULE), UnitClass("large", 3 * GRANULE)
    arena = Arena(30, slab_units=2)
    assert arena.claim([(small, 6), (large, 5)])
    arena.check()
    assert not arena.claim([(small, 16), (large, 5)])
    assert (arena.claimed(small), arena.claimed(large)) == (6, 5)
    arena.allocate(small, arena.available(small))
    units = arena.allocate(large, 5)
    assert len(units) == 5
    arena.sticky = True
    arena.free(large, units[:4])
    assert arena.available(small) == 0, "what was just freed stays where the next claim finds it"
    assert arena.claim([(small, 0), (large, 4)])
    assert arena.claim([(small, 0), (large, 0)])
    assert arena.available(small) > 0
    arena.check()
