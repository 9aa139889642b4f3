"""The engine's verbs: what a chain is after each, what is reused and why not, and what faults leave behind."""

from __future__ import annotations

import pytest
from fake_engine import Oracle, engine, reclaim, request, run, turn, unit_bytes
from test_output import Pieces

from agentkv.engine.core import ChainInfo, Edit, Status
from agentkv.engine.llm import LLM
from agentkv.errors import BadRequest, Busy, Capacity, EngineFault

HEAD = [1, 2, 0, 2, 1, 1, 0, 2, 0, 1]


def info(llm: LLM, chain: str) -> ChainInfo:
    found = llm.chain_info(chain)
    assert found is not None
    return found


def reasons(llm: LLM, ids: list[int], chain: str | None, **options: object) -> tuple[str | None, int, int]:
    """(miss reason, cached, prefilled) of a request, which is then aborted."""
    seq = llm.add(request(ids, chain, **options))  # type: ignore[arg-type]
    run(llm)
    llm.abort(seq)
    return seq.miss.reason if seq.miss else None, seq.num_cached_tokens, seq.num_prefilled_tokens


def test_a_session_of_many_turns_prefills_only_what_is_new() -> None:
    llm, ids = engine(units=100, step_tokens=7), []
    for number in range(12):
        fresh = HEAD[: 1 + number % 6]
        seq = llm.add(request(ids + fresh, "a", seed=number))
        run(llm)
        assert seq.token_ids[seq.num_prompt_tokens :] == Oracle().generate(ids + fresh, [], number, 4)
        assert seq.num_prefilled_tokens == len(fresh) + (1 if number else 0)
        assert (seq.miss is None) is (number > 0 or len(fresh) == 1)
        llm.commit(seq, seq.token_ids[seq.num_prompt_tokens :])
        ids = list(seq.token_ids)
        llm.check()
    state = info(llm, "a")
    assert (state.logical_length, state.resident_tokens) == (len(ids), len(ids) - 1)
    assert state.checkpoints == (len(ids) - 4 - 6, len(ids))


def test_a_pruned_session_is_the_same_with_and_without_its_kv() -> None:
    """Design section 7: resumed without KV it gives the tokens of one that was never interrupted."""
    resident, ids, edits = engine(units=100), [], []
    for number in range(6):
        fresh = [number % 3] * 5
        made = turn(resident, ids + fresh, "a", seed=number, edits=edits)
        assert made == Oracle().generate(ids + fresh, edits, number, 4)
        assert turn(engine(units=100), ids + fresh, "b", seed=number, edits=edits) == made
        ids = ids + fresh + made
        removed = ((number * 9 + 1, number * 9 + 4),)
        freed = resident.prune("a", removed)
        assert freed[0] == 3
        edits.append(Edit(len(ids), removed))
        resident.check()
    assert info(resident, "a").resident_tokens == len(ids) - 1 - 18


def test_busy_is_refused_and_disturbs_nothing() -> None:
    llm = engine()
    seq = llm.add(request(HEAD, "a"))
    for call in (lambda: llm.add(request(HEAD, "a")), lambda: llm.drop("a"), lambda: llm.rollback("a", 0)):
        with pytest.raises(Busy):
            call()
    with pytest.raises(Busy):
        llm.prune("a", [(0, 2)])
    run(llm)
    assert seq.token_ids[10:] == Oracle().generate(HEAD, [], 0, 4)
    with pytest.raises(Busy):
        llm.add(request(HEAD, "a"))  # finished, not committed
    llm.commit(seq, seq.token_ids[10:])
    assert not info(llm, "a").busy


def test_a_token_that_the_model_has_not_is_refused_before_it_harms_others() -> None:
    llm = engine(units=20)
    beside = llm.add(request(HEAD))
    for ids in ([1, llm.runner.vocab_size], [10**9, 1]):
        with pytest.raises(BadRequest, match="none of the model's"):
            llm.add(request(ids))
    run(llm)
    assert beside.finish_reason == "length"
    llm.check()


def test_why_something_was_recomputed() -> None:
    llm = engine(units=64)
    ids = HEAD + turn(llm, HEAD, "a")
    assert reasons(llm, [*ids, 1], "a") == (None, 13, 2)
    assert reasons(llm, ids, "a") == (None, 13, 1)
    assert reasons(llm, ids[:6], "a") == (None, 5, 1), "a shorter history: everything reusable was reused"
    assert reasons(llm, [*ids[:7], 4, 4, 4, 4, 4, 4, 4, 4], "a") == ("diverged", 7, 8)
    assert reasons(llm, [*ids, 1], "a", salt="other") == ("salt", 0, 15)
    assert reasons(llm, [*ids, 1], "new") == ("new", 13, 2)
    assert reasons(llm, [4, 4, 4], "new") == ("new", 0, 3)
    llm.prune("a", [(3, 6)])
    assert reasons(llm, [*ids, 1], "a", edits=[Edit(14, ((3, 6),))]) == (None, 13, 2)
    assert reasons(llm, [*ids, 1], "a") == ("pruned_not_accepted", 3, 12)
    reclaim(llm, 64)
    assert reasons(llm, [*ids, 1], "a", edits=[Edit(14, ((3, 6),))]) == ("reclaimed", 0, 15)


def test_a_chain_of_another_tenant_is_never_continued() -> None:
    llm = engine()
    ids = HEAD + turn(llm, HEAD, "a", salt="x")
    seq = llm.add(request([*ids, 1], "a", salt="y"))
    run(llm)
    assert seq.num_cached_tokens == 0
    llm.commit(seq, [])
    llm.check()
    assert reasons(llm, [*ids, 1], None, salt="x")[1] == 0, "the chain left its old entries"
    assert reasons(llm, [*ids, 1], None, salt="y")[1] == 14


def test_prune_frees_what_it_says_and_applies_to_checkpoints() -> None:
    llm, ids = engine(units=64), [0] * 20
    ids += turn(llm, ids, "a")
    ids += [1] + turn(llm, [*ids, 1], "a")
    assert info(llm, "a").checkpoints == (24, 29)
    before = llm.arena.free_bytes
    price = llm.price("a", [(4, 12), (17, 18)])
    assert llm.prune("a", [(4, 12), (17, 18)]) == price == (9, 2 * unit_bytes(llm))
    assert llm.arena.free_bytes == before + price[1]
    assert info(llm, "a").checkpoints == (24, 29)
    llm.rollback("a", 24)
    llm.check()
    assert info(llm, "a").resident_tokens == 23 - 9
    edits = [Edit(24, ((4, 12), (17, 18)))]
    made = turn(llm, [*ids[:24], 2], "a", edits=edits)
    assert made == Oracle().generate([*ids[:24], 2], edits, 0, 4)
    assert reasons(llm, [*ids[:24], 2, *made, 1], "a", edits=edits) == (None, 28, 2), "the prune is now one made at 24"


def test_prune_of_shared_pages_frees_nothing_and_harms_nobody() -> None:
    llm, ids = engine(units=64), [0] * 20
    ids += turn(llm, ids, "a")
    llm.fork("a", "b", len(ids))
    assert llm.price("a", [(4, 8)]) == (4, 0)
    assert llm.prune("a", [(4, 8)]) == (4, 0)
    llm.check()
    assert turn(llm, [*ids, 1], "b") == Oracle().generate([*ids, 1], [], 0, 4)
    edits = [Edit(24, ((4, 8),))]
    assert turn(llm, [*ids, 1], "a", edits=edits) == Oracle().generate([*ids, 1], edits, 0, 4)


def test_prune_without_room_to_copy_gives_the_kv_up() -> None:
    llm, ids = engine(units=8, page_size=4), [0] * 25
    ids += turn(llm, ids, "a", max_tokens=3)
    llm.fork("a", "b", 20)
    running = llm.add(request([*ids[:20], 1], "b", max_tokens=2))
    llm.step()
    llm.prune("a", [(1, 3)])
    llm.check()
    run(llm)
    assert running.token_ids[21:] == Oracle().generate([*ids[:20], 1], [], 0, 2)
    llm.commit(running, [])
    edits = [Edit(len(ids), ((1, 3),))]
    assert turn(llm, [*ids, 1], "a", edits=edits, max_tokens=2) == Oracle().generate([*ids, 1], edits, 0, 2)


def test_fork_and_rollback() -> None:
    llm, ids = engine(units=64), list(HEAD)
    for _ in range(3):
        ids += turn(llm, ids, "a")
    before = llm.arena.used_bytes
    for child in range(8):
        llm.fork("a", f"child{child}", 14)
    assert llm.arena.used_bytes == before, "a fork costs nothing"
    assert info(llm, "child0").bytes_unique == 0
    for child in range(8):
        assert reasons(llm, [*ids[:14], child % 3], f"child{child}") == (None, 14, 1)
    busy = llm.add(request([*ids, 1], "a"))
    llm.step()
    llm.fork("a", "late", len(ids))
    run(llm)
    assert reasons(llm, [*ids, 2], "late") == (None, len(ids) - 1, 2)
    llm.abort(busy)
    llm.rollback("a", 18)
    assert info(llm, "a").logical_length == 18
    assert info(llm, "a").checkpoints == (18,)
    assert reasons(llm, [*ids[:18], 2], "a") == (None, 17, 2)
    with pytest.raises(BadRequest):
        llm.rollback("child0", -1)
    llm.rollback("a", 99)
    llm.fork("a", "whole", 99)
    assert info(llm, "whole").logical_length == info(llm, "a").logical_length == 18
    with pytest.raises(BadRequest):
        llm.fork("a", "child1", 3)
    llm.check()


def test_verbs_on_a_chain_that_is_not_known_do_nothing() -> None:
    llm = engine()
    llm.fork("x", "y", 5)
    llm.rollback("x", 5)
    llm.suspend("x")
    llm.drop("x")
    assert llm.prune("x", [(0, 5)]) == llm.price("x", [(0, 5)]) == (0, 0)
    assert llm.chain_info("x") is llm.chain_info("y") is None


def test_drop_frees_the_unique_tail_and_leaves_the_shared_head() -> None:
    llm, head = engine(units=64), [0] * 16
    turn(llm, [*head, 1, 1, 1], "a")
    turn(llm, [*head, 2, 2, 2], "b")
    promised, before = info(llm, "a").bytes_unique, llm.arena.free_bytes
    llm.drop("a")
    assert llm.arena.free_bytes - before == promised > 0
    assert reasons(llm, [*head, 3], None)[1] == 16
    llm.drop("b")
    assert llm.arena.used_bytes == 0


def test_commit_of_less_and_of_other_ids_than_were_made() -> None:
    llm = engine(units=64)
    seq = llm.add(request(HEAD, "a", max_tokens=8))
    run(llm)
    made = seq.token_ids[10:]
    kept = [*made[:3], 4, 4]
    llm.commit(seq, kept)
    assert (info(llm, "a").logical_length, info(llm, "a").resident_tokens) == (15, 13)
    assert llm.price("a", [(0, 4)]) == llm.prune("a", [(0, 4)]) == (0, 0), "a replay would apply it two tokens later"
    edits = [Edit(15, ((0, 4),))]
    assert turn(llm, [*HEAD, *kept, 1], "a", edits=edits) == Oracle().generate([*HEAD, *kept, 1], edits, 0, 4)
    with pytest.raises(BadRequest, match="closed"):
        llm.commit(seq, [])
    waiting = llm.add(request(HEAD, "c"))
    with pytest.raises(BadRequest, match="waiting"):
        llm.commit(waiting, [])


def test_a_request_without_a_chain_leaves_its_prefix() -> None:
    llm = engine(units=64)
    made = turn(llm, HEAD)
    assert reasons(llm, HEAD + made, None) == (None, 13, 1)
    assert llm.stats().radix == 4
    with_chains_only = engine(units=64, reuse="chain")
    made = turn(with_chains_only, HEAD)
    assert with_chains_only.arena.used_bytes == 0
    assert reasons(with_chains_only, HEAD + made, None) == ("new", 0, 14)


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("chain", [None, "a"])
def test_abort_at_every_point_returns_the_accounts(steps: int, chain: str | None) -> None:
    llm = engine(units=32, step_tokens=4)
    ids = HEAD + turn(llm, HEAD, "a")
    llm.prune("a", [(2, 5)])
    edits = [Edit(len(ids), ((2, 5),))]
    before, held = llm.stats(), llm.chain_info("a")
    seq = llm.add(request([*ids, *HEAD], chain, edits=edits))
    for _ in range(steps):
        llm.step()
    llm.abort(seq)
    llm.abort(seq)
    llm.check()
    assert seq.status is Status.CLOSED
    assert (llm.stats(), llm.chain_info("a")) == (before, held)
    assert turn(llm, [*ids, 1], "a", edits=edits) == Oracle().generate([*ids, 1], edits, 0, 4)


def test_an_aborted_first_turn_leaves_no_chain() -> None:
    llm = engine()
    llm.abort(llm.add(request(HEAD, "a")))
    assert llm.chain_info("a") is None
    assert not llm.has_work


@pytest.mark.parametrize("step", range(1, 6))
def test_a_fault_ends_the_batch_and_nothing_else(step: int) -> None:
    llm = engine(units=64, max_rows=2, step_tokens=4)
    ids = HEAD + turn(llm, HEAD, "a")
    before = llm.stats()
    llm.runner.fail_execute.add(llm.runner.steps + step)  # type: ignore[attr-defined]
    seqs = [
        llm.add(request([*ids, 1], "a", max_tokens=9)),
        llm.add(request([2, 2], max_tokens=9)),
        llm.add(request([1], max_tokens=9)),
    ]
    ended = []
    while llm.has_work:
        ended += [output.seq for output in llm.step() if output.finished]
        llm.check()
    assert set(ended) == set(seqs)
    assert all(isinstance(seq.fault, EngineFault) for seq in seqs[:1])
    assert seqs[2].fault is None
    assert seqs[2].token_ids[1:] == Oracle().generate([1], [], 0, 9)
    for seq in seqs:
        llm.abort(seq)
    assert llm.stats() == before
    assert turn(llm, [*ids, 1], "a") == Oracle().generate([*ids, 1], [], 0, 4)


def test_a_runner_that_samples_wrongly_is_a_fault() -> None:
    llm = engine()
    seq = llm.add(request(HEAD))
    llm.runner.execute = lambda batch: [None]  # type: ignore[method-assign]
    (output,) = llm.step()
    assert output.finished
    assert isinstance(seq.fault, EngineFault)
    llm.check()


def test_pressure_takes_suspended_chains_then_the_prefix_cache_then_the_oldest() -> None:
    llm = engine(units=64, page_size=4)
    turn(llm, [4] * 16, max_tokens=1)
    for name, token in (("old", 0), ("slept", 1), ("young", 2)):
        turn(llm, [token] * 16, name, max_tokens=1)
    llm.suspend("slept")

    def left() -> list[int]:
        chains = [info(llm, name).resident_tokens for name in ("slept", "old", "young")]
        return [*chains, sum(len(node.tokens) for node in llm.radix.nodes() if "" in node.owners)]

    assert left() == [16, 16, 16, 16]
    reclaim(llm, 1)
    assert left() == [12, 16, 16, 16], "from its end, and no more than needed"
    reclaim(llm, 4)
    assert left() == [0, 16, 16, 12]
    reclaim(llm, 4)
    assert left() == [0, 12, 16, 0]
    reclaim(llm, 5)
    assert left() == [0, 0, 8, 0]
    llm.check()


def test_chains_that_share_everything_can_be_had_too() -> None:
    llm = engine(units=16)
    turn(llm, [0] * 40, "a")
    for child in range(3):
        llm.fork("a", f"b{child}", 40)
    assert reclaim(llm, 16) == 11
    llm.check()
    assert llm.arena.used_bytes == 0


def test_text_and_stop_strings() -> None:
    """Pieces 0 to 4 are the vocabulary of the fake; the generated text is searched over their borders."""
    tokenizer = Pieces([b"ab", b"cd", b"e", b"fg", b"h"])
    plain = engine(units=64, tokenizer=tokenizer)
    seq, shown = plain.add(request(HEAD, max_tokens=20)), ""
    while plain.has_work:
        shown += "".join(output.text for output in plain.step())
    made = seq.token_ids[10:]
    assert shown == tokenizer.text(made)
    assert (seq.finish_reason, seq.kept_ids) == ("length", None)
    stop = shown[9:12]
    end = shown.index(stop)
    llm = engine(units=64, tokenizer=tokenizer)
    seq, shown_now = llm.add(request(HEAD, "a", max_tokens=20, stop=(stop,))), ""
    while llm.has_work:
        shown_now += "".join(output.text for output in llm.step())
    assert shown_now == shown[:end]
    assert (seq.finish_reason, seq.stop_text) == ("stop", stop)
    assert seq.kept_ids is not None
    assert tokenizer.text(seq.kept_ids) == shown[:end]
    llm.commit(seq, seq.kept_ids)
    llm.check()
    assert info(llm, "a").logical_length == 10 + len(seq.kept_ids)
    with pytest.raises(BadRequest, match="tokenizer"):
        engine().add(request(HEAD, stop=("x",)))


def test_a_stop_id_ends_it_and_is_part_of_it() -> None:
    expected = Oracle().generate(HEAD, [], 0, 20, stop=[3])
    assert 3 in expected
    tokenizer = Pieces([b"ab", b"cd", b"e", b"!", b"h"])
    llm, shown = engine(units=64, tokenizer=tokenizer), ""
    seq = llm.add(request(HEAD, max_tokens=20, stop_ids=frozenset([3])))
    while llm.has_work:
        shown += "".join(output.text for output in llm.step())
    assert (seq.token_ids[10:], seq.finish_reason) == (expected, "stop")
    assert shown == tokenizer.text(expected[:-1])


def test_stats_add_up_and_the_peak_is_the_most() -> None:
    llm = engine(units=32)
    llm.reset_peak()
    ids = HEAD + turn(llm, HEAD, "a")
    seq = llm.add(request([*ids, 1], "a"))
    llm.step()
    stats = llm.stats()
    assert stats.free + stats.active + stats.chains + stats.checkpoints + stats.radix == stats.total == 32
    assert (stats.rows, stats.waiting, stats.active) == (1, 0, 4)
    assert stats.bytes["active"] == 4 * stats.unit_bytes
    run(llm)
    llm.abort(seq)
    assert llm.peak_bytes == 5 * stats.unit_bytes
    llm.reset_peak()
    assert llm.peak_bytes == llm.arena.used_bytes


def test_nothing_changes_when_a_request_is_refused() -> None:
    llm = engine(units=4)
    with pytest.raises(Capacity):
        llm.add(request([0] * 50, "a"))
    with pytest.raises(BadRequest):
        llm.add(request([], "a"))
    assert llm.chain_info("a") is None
    llm.check()
