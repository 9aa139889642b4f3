"""Who runs when: chunks, order, reservations, progress."""

from __future__ import annotations

import pytest
from fake_engine import Oracle, engine, request, run, turn, unit_bytes

from agentkv.engine.core import Batch, Edit, Status
from agentkv.engine.llm import LLM
from agentkv.errors import BadRequest, Capacity, ContextOverflow


def batches(llm: LLM) -> list[Batch]:
    """Every batch that is executed from now on."""
    seen: list[Batch] = []
    execute = llm.runner.execute

    def recorded(batch: Batch) -> list[int | None]:
        seen.append(batch)
        return execute(batch)

    llm.runner.execute = recorded  # type: ignore[method-assign]
    return seen


def test_decodes_come_first_and_chunks_share_what_is_left() -> None:
    llm = engine(units=64, step_tokens=8)
    first = llm.add(request([1, 2, 3], max_tokens=9))
    llm.step()
    seen = batches(llm)
    llm.add(request([0] * 11, seed=1))
    llm.add(request([1] * 4, seed=1))
    for _ in range(3):
        llm.step()
    shapes = [[(work.seq_id - first.seq_id, len(work.tokens), work.sample) for work in batch.rows] for batch in seen]
    assert shapes == [
        [(0, 1, True), (1, 4, False), (2, 3, False)],  # one each, three of five to the first, two to the shorter
        [(0, 1, True), (1, 6, False), (2, 1, True)],
        [(0, 1, True), (2, 1, True), (1, 1, True)],
    ]


def test_prompts_are_served_in_order_and_none_starves() -> None:
    llm = engine(units=200, max_rows=3, step_tokens=3)
    seqs = [llm.add(request([i % 3] * 7, seed=i, max_tokens=5)) for i in range(8)]
    order: list[int] = []
    while llm.has_work:
        for output in llm.step():
            if output.finished:
                order.append(output.seq.seq_id)
                llm.commit(output.seq, [])
        llm.check()
    assert order == [seq.seq_id for seq in seqs]


def test_step_tokens_must_leave_room_beside_the_decodes() -> None:
    with pytest.raises(BadRequest, match="starve"):
        engine(max_rows=8, step_tokens=7)


def test_chunks_end_at_every_edit() -> None:
    llm, edits = engine(units=64, step_tokens=64), [Edit(5, ((0, 2),)), Edit(6, ((2, 4),)), Edit(20, ((9, 15),))]
    seen = batches(llm)
    seq = llm.add(request(list(range(5)) * 5, edits=edits))
    run(llm)
    assert [len(batch.rows[0].tokens) for batch in seen[:4]] == [4, 1, 14, 6]
    assert [(batch.rows[0].position, batch.rows[0].slot) for batch in seen[:4]] == [(0, 0), (4, 2), (5, 1), (19, 9)]
    assert seq.token_ids[25:] == Oracle().generate(seq.token_ids[:25], edits, 0, 4)


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("step_tokens", [4, 5, 64])
def test_chunked_and_cached_and_batched_give_the_same(length: int, step_tokens: int) -> None:
    llm, ids = engine(units=64, step_tokens=step_tokens), [1, 2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1][:length]
    expected = Oracle().generate(ids, [], 5, 6)
    assert turn(llm, ids, max_tokens=6, seed=5) == expected
    twice = [llm.add(request(ids, max_tokens=6, seed=5)) for _ in range(3)]
    run(llm)
    assert all(seq.token_ids[length:] == expected for seq in twice)
    assert all(seq.num_cached_tokens == length - 1 and seq.num_prefilled_tokens == 1 for seq in twice)


def test_a_drawn_seed_is_the_sequences_own() -> None:
    llm = engine()
    seq = llm.add(request([1, 2], seed=None))
    other = llm.add(request([1, 2], seed=None))
    assert seq.seed != other.seed
    run(llm)
    assert seq.token_ids[2:] == Oracle().generate([1, 2], [], seq.seed, 4)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    llm = engine(units=8, page_size=4, window=100)
    with pytest.raises(Capacity, match=r"30 prompt tokens and 4 .* 9 pages .* has 8") as caught:
        llm.add(request([0] * 30, max_tokens=4))
    assert caught.value.retry_after is None
    assert caught.value.hint
    with pytest.raises(Capacity):
        llm.add(request([0] * 33, max_tokens=None))
    with pytest.raises(ContextOverflow) as overflow:
        llm.add(request([0] * 100, edits=[Edit(50, ((10, 30),))]))
    error = overflow.value
    assert (error.details["logical"], error.details["resident"]) == (100, 80)
    assert (error.details["limit"], error.details["freeable"]) == (100, 20)
    assert not llm.has_work
    assert llm.add(request([0] * 30, max_tokens=3)).max_tokens == 3  # the last token needs no slot


def test_max_tokens_is_what_window_and_memory_leave() -> None:
    assert engine(units=8, window=20).add(request([0] * 12, max_tokens=None)).max_tokens == 8
    assert engine(units=8, window=99).add(request([0] * 12, max_tokens=None)).max_tokens == 21
    assert engine(units=9000, window=99999).add(request([0] * 12, max_tokens=None)).max_tokens == 4096
    assert engine(units=8, window=20).add(request([0] * 12, max_tokens=50)).max_tokens == 8


def test_two_requests_of_sixty_percent_run_one_after_the_other() -> None:
    llm = engine(units=10, page_size=4)
    first, second = (llm.add(request([i] * 20, max_tokens=5, seed=i)) for i in range(2))
    llm.step()
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    assert first.reserved_units.counts == (2,)
    while first.status is not Status.FINISHED:
        llm.step()
    for _ in range(3):
        assert llm.step() == []
    assert second.status is Status.WAITING, "its memory is held until the first is committed"
    llm.commit(first, first.token_ids[20:])
    run(llm)
    assert second.status is Status.FINISHED
    assert second.token_ids[20:] == Oracle().generate([1] * 20, [], 1, 5)


def test_two_sessions_of_sixty_percent_take_turns() -> None:
    llm, histories = engine(units=10, page_size=4), {"a": [0] * 18, "b": [1] * 18}
    for _ in range(3):
        for name, ids in histories.items():
            made = turn(llm, ids, name, max_tokens=3)
            assert made == Oracle().generate(ids, [], 0, 3)
            ids += made
    assert llm.chain_info("b").resident_tokens == len(histories["b"]) - 1  # type: ignore[union-attr]


def test_the_peak_is_promised_before_a_sequence_starts() -> None:
    """Four that fit one by one never run short of memory together."""
    llm = engine(units=12, page_size=4, max_rows=4)
    for seed in range(4):
        llm.add(request([seed % 3], max_tokens=16, seed=seed))
    most = 0
    while llm.has_work:
        for output in llm.step():
            if output.finished:
                llm.commit(output.seq, [])
        most = max(most, len(llm.scheduler.running))
        llm.check()
    assert most == 3


def test_a_prune_is_replayed_in_a_pool_hardly_larger_than_the_prompt() -> None:
    ids = [i % 3 for i in range(30)]
    edits = [Edit(16, ((2, 9),)), Edit(24, ((10, 14), (17, 20)))]
    llm = engine(units=6, page_size=4)
    assert turn(llm, ids, "a", edits=edits, max_tokens=2) == Oracle().generate(ids, edits, 0, 2)
    assert llm.peak_bytes <= 6 * unit_bytes(llm)


def test_a_resident_state_that_leaves_no_room_is_given_up() -> None:
    """One page short beside its own chain: it starts again from nothing, and says so."""
    llm, ids = engine(units=8, page_size=4), [1] * 20
    ids += turn(llm, ids, "a", max_tokens=2)
    assert llm.chain_info("a").resident_tokens == 21  # type: ignore[union-attr]
    edits = [Edit(len(ids), ((1, 3),))]  # applied while the chain still holds what it removes: 6 pages and 6 copies
    seq = llm.add(request(ids + [2] * 3, "a", max_tokens=4, edits=edits))
    run(llm)
    assert seq.token_ids[25:] == Oracle().generate(seq.token_ids[:25], edits, 0, 4)
    assert seq.miss is not None
    assert (seq.miss.reason, seq.num_prefilled_tokens) == ("reclaimed", 25)
