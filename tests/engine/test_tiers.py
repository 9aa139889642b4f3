"""The warm tier over a fake device: what comes back is what went, or a reason; budgets hold; tokens do not change."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
from fake_engine import Oracle, engine, request, run, turn, unit_bytes
from test_mixed_classes import MixedLife
from test_properties import WINDOWS, act

from agentkv.engine.cache.state import KVState
from agentkv.engine.core import Edit
from agentkv.engine.llm import LLM
from agentkv.errors import EngineFault

HEAD = [1, 2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1]


def warm_engine(units: int = 32, budget: int = 64, **options: Any) -> LLM:
    """budget: pages of host memory."""
    return engine(units, warm_pages=budget, **options)


def spoken(llm: LLM, chain: str, count: int = 3, seed: int = 0) -> list[int]:
    ids: list[int] = []
    for number in range(count):
        ids += [*HEAD[: 5 + number], seed]
        ids += turn(llm, ids, chain, seed=seed)
    return ids


def test_suspend_frees_the_arena_and_the_next_turn_counts_it_as_cached() -> None:
    llm = warm_engine()
    ids = spoken(llm, "a")
    held = llm.stats().bytes["chains"]
    llm.suspend("a")
    llm.check()
    stats = llm.stats()
    assert (stats.free, stats.warm_bytes, stats.demotions) == (stats.total, held, 1)
    info = llm.chain_info("a")
    assert info is not None
    assert (info.resident_tokens, info.warm_tokens, info.bytes_held) == (0, len(ids) - 1, 0)
    forwarded = llm.runner.forwarded
    seq = llm.add(request([*ids, 1, 2], "a"))
    run(llm)
    assert seq.token_ids[len(ids) + 2 :] == Oracle().generate([*ids, 1, 2], [], 0, 4)
    assert (seq.num_cached_tokens, seq.num_prefilled_tokens, seq.miss) == (len(ids) - 1, 3, None)
    assert llm.runner.forwarded == forwarded + 3 + 3
    assert (llm.stats().warm_bytes, llm.stats().restores) == (0, 1)


def test_checkpoints_come_back_and_rollback_works_on_either_side() -> None:
    llm = warm_engine()
    ids = spoken(llm, "a")
    lengths = llm.chain_info("a").checkpoints  # type: ignore[union-attr]
    llm.suspend("a")
    assert turn(llm, [*ids, 1], "a") == Oracle().generate([*ids, 1], [], 0, 4)
    assert llm.chain_info("a").checkpoints[0] == lengths[-1]  # type: ignore[union-attr]
    llm.suspend("a")
    llm.rollback("a", lengths[0])
    seq = llm.add(request([*ids[: lengths[0]], 2], "a"))
    run(llm)
    assert seq.num_cached_tokens == lengths[0] - 1
    assert seq.token_ids[lengths[0] + 1 :] == Oracle().generate([*ids[: lengths[0]], 2], [], 0, 4)


def test_pruned_states_go_and_come_back_and_prunes_of_a_warm_chain_are_applied_later() -> None:
    llm = warm_engine()
    ids = spoken(llm, "a")
    edits = [Edit(len(ids), ((2, 7),))]
    llm.prune("a", edits[0].removed)
    llm.suspend("a")
    assert llm.stats().warm_bytes
    late = ((9, 12),)
    assert llm.prune("a", late) == (0, 0)
    edits = [Edit(len(ids), ((2, 7), (9, 12)))]
    seq = llm.add(request([*ids, 1], "a", edits=edits))
    run(llm)
    assert seq.token_ids[len(ids) + 1 :] == Oracle().generate([*ids, 1], edits, 0, 4)
    assert seq.num_cached_tokens == len(ids) - 1


def test_a_fork_of_a_warm_chain_shares_the_copy() -> None:
    llm = warm_engine()
    ids = spoken(llm, "a")
    llm.suspend("a")
    llm.fork("a", "b", len(ids) - 5)
    used = llm.stats().warm_bytes
    for chain, length in (("b", len(ids) - 5), ("a", len(ids))):
        assert llm.stats().warm_bytes == used
        seq = llm.add(request([*ids[:length], 2], chain))
        run(llm)
        assert seq.num_cached_tokens >= length - 1
        assert seq.token_ids[length + 1 :] == Oracle().generate([*ids[:length], 2], [], 0, 4)
        llm.commit(seq, [])
    assert llm.stats().warm_bytes == 0


def test_pressure_demotes_idle_chains_in_order_and_the_budget_loses_the_oldest() -> None:
    llm = warm_engine(units=24, budget=20)
    llm.runner.vocab_size = 7  # the chains' names are tokens
    told = {name: spoken(llm, name, seed=seed) for seed, name in enumerate("abcdefg")}
    stats = llm.stats()
    assert stats.demotions >= 3
    assert 0 < stats.warm_bytes <= 20 * unit_bytes(llm)
    reasons = {}
    for name, ids in reversed(told.items()):
        seq = llm.add(request([*ids, 1], name, seed=3))
        run(llm)
        assert seq.token_ids[len(ids) + 1 :] == Oracle().generate([*ids, 1], [], 3, 4)
        reasons[name] = seq.miss.reason if seq.miss else None
        llm.commit(seq, seq.token_ids[len(ids) + 1 :])
        llm.check()
    assert reasons["g"] is None
    assert reasons["f"] is None
    assert reasons["a"] == "reclaimed"
    assert llm.stats().restores >= 1


@pytest.mark.parametrize("what", ["data", "token_ids", "edits", "fingerprint"])
def test_what_fails_its_check_is_a_miss_with_a_reason(what: str) -> None:
    llm = warm_engine(fingerprint="one")
    ids = spoken(llm, "a")
    llm.suspend("a")
    warm = llm.chains.chains["a"].warm
    assert warm is not None
    if what == "data":
        (part,) = warm.parts or ()
        broken = bytearray(part.data)
        broken[len(broken) // 2] ^= 1
        warm.parts = (part._replace(data=memoryview(broken)),)
    elif what == "token_ids":
        warm.token_ids[3] ^= 1
    elif what == "edits":
        warm.edits = (Edit(4, ((0, 1),)),)
    else:
        llm.tier.fingerprint = "another"
    seq = llm.add(request([*ids, 1], "a"))
    run(llm)
    assert seq.token_ids[len(ids) + 1 :] == Oracle().generate([*ids, 1], [], 0, 4)
    if what == "edits":  # the request's history does not fit it: not even tried
        assert seq.num_cached_tokens == 0
        return
    assert seq.miss is not None
    assert (seq.miss.reason, seq.num_cached_tokens) == ("fingerprint" if what == "fingerprint" else "corrupt", 0)
    assert (llm.tier.rejected, llm.stats().warm_bytes, llm.stats().restores) == (1, 0, 0)


def test_no_budget_no_tier_and_too_large_is_refused() -> None:
    for budget in (0, 2):
        llm = warm_engine(budget=budget)
        spoken(llm, "a")
        llm.suspend("a")
        assert llm.stats().warm_bytes == llm.stats().demotions == 0
        assert llm.stats().chains > 2


def test_a_copy_that_would_free_little_is_not_made() -> None:
    llm = warm_engine()
    ids = spoken(llm, "a")
    llm.fork("a", "b", len(ids))
    llm.suspend("a")
    assert llm.stats().warm_bytes == 0
    llm.drop("b")
    llm.suspend("a")
    assert llm.stats().warm_bytes > 0


def test_a_parked_state_by_itself() -> None:
    """What the scheduler does with a preempted sequence's state."""
    llm = warm_engine(units=8, budget=4)
    state = KVState(llm.pools)
    state.append(14)
    for index in range(14):
        llm.runner._write(0, state.holdings[0].slot(index), (index, 1, 2))
    warm = llm.tier.demote(state, [0] * 20)
    state.release()
    assert warm is not None
    assert llm.tier.restore(warm, lambda units: units.total > 4) is None
    assert warm.lost == ""
    cls = llm.pools.pools[0].cls
    held = llm.arena.allocate(cls, 5)
    assert llm.tier.restore(warm) is None
    assert not warm.lost
    llm.arena.free(cls, held)
    back = llm.tier.restore(warm)
    assert back is not None
    assert [llm.runner._read(0, back.holdings[0].slot(index)) for index in range(14)] == [(i, 1, 2) for i in range(14)]
    assert llm.tier.restore(warm) is None
    assert warm.lost == "restored"


def test_a_device_that_fails_on_the_way_back_loses_no_text() -> None:
    llm = warm_engine()
    ids = spoken(llm, "a")
    llm.suspend("a")
    seq = llm.add(request([*ids, 1], "a"))
    llm.runner.fail_move = True
    llm.step()
    llm.runner.fail_move = False
    llm.check()
    run(llm)
    assert isinstance(seq.fault, EngineFault) or seq.token_ids[len(ids) + 1 :] == Oracle().generate([*ids, 1], [], 0, 4)


def test_long_lives_with_a_warm_tier() -> None:
    """Random lives beside another class, with budgets from nothing to plenty."""
    seen: Counter[str] = Counter()
    for seed in range(int(os.environ.get("AGENTKV_LIVES", "20"))):
        rng, life = random.Random(seed), MixedLife()
        try:
            life.warm_pages = rng.choice([3, 10, 40])
            sizes = rng.randrange(9, 40), rng.choice([2, 3, 4]), rng.randrange(1, 5), 8, rng.randrange(3)
            life.start(*sizes, "radix", WINDOWS[seed % len(WINDOWS)], 2)
            for _ in range(120):
                if rng.random() < 0.2:
                    life.shift(rng)
                if rng.random() < 0.2:
                    life.suspend(rng.randrange(20))
                act(life, rng)
            life.teardown()
        except Exception as error:
            raise AssertionError(f"life {seed}") from error
        assert life.llm.tier.used_bytes == 0
        seen["demotions"] += life.llm.tier.demotions
        seen["restores"] += life.llm.tier.restores
        seen["rejected"] += life.llm.tier.rejected
    assert seen["demotions"] > seen["restores"] > 30, seen
    assert seen["rejected"] == 0
