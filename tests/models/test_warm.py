"""KV that was in host memory, or moved inside the arena, gives the tokens that it would have given: tiny models, real bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from agentkv import methods
from agentkv.engine.cache.arena import UnitClass
from agentkv.engine.cache.compaction import make_room
from agentkv.engine.core import GRANULE, Edit, EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling

PROMPT = [5, 17, 80, 3, 44, 44, 9, 61, 2, 30, 31, 7, 12, 90, 1, 66, 23]


def engine_of(loaded: Any, pages: int = 60, warm_pages: int = 60) -> LLM:
    stripe = sum(group.stripe_bytes for group in loaded.groups(4))
    config = EngineConfig(pages * stripe, 200, page_size=4, max_rows=4, step_tokens=16, warm_memory=warm_pages * stripe)
    return LLM(config, ModelRunner(loaded, config, methods.get("dense")), fingerprint="tiny")


def turn(llm: LLM, ids: list[int], chain: str, edits: tuple[Edit, ...] = (), count: int = 8) -> tuple[list[int], int]:
    """(ids with the answer, tokens prefilled)."""
    seq = llm.add(Request(ids, Sampling(max_tokens=count), chain_id=chain, edits=edits))
    while llm.has_work:
        llm.step()
        llm.check()
    assert seq.fault is None
    llm.commit(seq, seq.token_ids[len(ids) :])
    return list(seq.token_ids), seq.num_prefilled_tokens


def talk(llm: LLM, between: Any) -> tuple[list[int], list[int]]:
    """Four turns with a prune after the second; `between` is called after each. (all ids, prefilled by turn)."""
    ids, prefilled, edits = list(PROMPT), [], ()
    for number in range(4):
        ids, count = turn(llm, ids, "a", edits)
        prefilled.append(count)
        if number == 1:
            edits = (Edit(len(ids), ((3, 9), (14, 20))),)
            llm.prune("a", edits[0].removed)
        between()
        ids = [*ids, 40 + number, 8]
    return ids, prefilled


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("llama", "float64"), ("gemma3", "float64")])
def test_a_session_that_went_warm_after_every_turn(model: Any, family: str, dtype: str) -> None:
    loaded = model(family, dtype)
    hot, warm = engine_of(loaded), engine_of(loaded)
    junk = UnitClass("junk", 3 * GRANULE)

    def away() -> None:
        """Out, its old pages overwritten, and back into other ones."""
        warm.suspend("a")
        assert warm.stats().chains == 0
        warm.runner.pages.arena.fill_(0xFF)
        warm.arena.followers[junk] = lambda moved: None
        warm.arena.allocate(junk, 1)

    want = talk(hot, lambda: None)
    assert talk(warm, away) == want
    assert (warm.stats().demotions, warm.stats().restores) == (4, 3)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("gemma3", "float64")])
def test_units_move_under_running_sessions(model: Any, family: str, dtype: str) -> None:
    """Junk of another class grows and shrinks between turns, so that pages must move; its bytes stay as they are."""
    loaded = model(family, dtype)
    want = talk(engine_of(loaded), lambda: None)
    llm, rng = engine_of(loaded, pages=36), random.Random(2)
    cls, held = UnitClass("junk", 5 * GRANULE), {}

    def follow(moved: dict[int, int]) -> None:
        for unit in list(held):
            if unit in moved:
                held[moved[unit]] = held.pop(unit)

    def shift() -> None:
        raw = llm.runner.pages.arena
        for unit, filler in held.items():
            assert torch.equal(raw[unit * GRANULE :][: cls.unit_bytes].unique(), torch.tensor([filler], dtype=torch.uint8))
        room = llm.arena.attainable(cls)
        make_room(llm.arena, [(cls, room)])
        for unit in llm.arena.allocate(cls, room):
            held[unit] = rng.randrange(256)
            raw[unit * GRANULE :][: cls.unit_bytes] = held[unit]
        while llm.arena.free_bytes < 14 * sum(pool.cls.unit_bytes for pool in llm.pools.pools):
            unit = rng.choice(list(held))
            del held[unit]
            llm.arena.free(cls, [unit])

    llm.arena.followers[cls] = follow
    shift()
    assert talk(llm, shift) == want
    shift()
    assert llm.arena.compactions > 0
    assert llm.stats().moved_bytes > llm.pools.pools[0].cls.unit_bytes


def test_units_are_read_and_written_bit_for_bit(model: Any) -> None:
    llm = engine_of(model("qwen3", "float32"))
    runner = llm.runner
    raw = runner.pages.arena
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    before, size = raw.clone(), 7 * GRANULE
    units = [90, 3, 44]
    data = runner.read_units(size, units)
    assert bytes(data) == b"".join(bytes(before[unit * GRANULE :][:size].numpy()) for unit in units)
    raw.zero_()
    runner.write_units(size, units, data)
    for unit in units:
        assert torch.equal(raw[unit * GRANULE :][:size], before[unit * GRANULE :][:size])
    assert int(raw.count_nonzero()) == sum(int(before[unit * GRANULE :][:size].count_nonzero()) for unit in units)
    assert runner.read_units(size, []).nbytes == 0


def test_flipped_bits_are_prefilled_again(model: Any) -> None:
    loaded = model("qwen3", "float64")
    llm = engine_of(loaded)
    ids, _ = turn(llm, PROMPT, "a")
    llm.suspend("a")
    llm.chains.chains["a"].warm.parts[0].data[1000] ^= 4
    seq = llm.add(Request([*ids, 7], Sampling(max_tokens=8), chain_id="a"))
    while llm.has_work:
        llm.step()
    assert (seq.miss.reason, seq.num_cached_tokens) == ("corrupt", 0)
    assert seq.token_ids == turn(engine_of(loaded), [*ids, 7], "b")[0]
