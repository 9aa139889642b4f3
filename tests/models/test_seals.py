"""Seals on the device: what a sequence reads afterwards, against transformers with a mask for each layer and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from seal_hand import HEADS, LAYERS, RECENT, Hand, HeadToy, Thirds, Toy, drops, oracle
from torch.utils._python_dispatch import TorchDispatchMode

from agentkv import methods
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.form import Seal
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Kept
from agentkv.errors import EngineFault
from agentkv.types import Sampling

PROMPT = [(7 * i + 3) % 97 for i in range(45)]
MORE = [(11 * i + 5) % 97 for i in range(30)]
CLOSE = 1e-11
KINDS = [Toy, HeadToy]


@pytest.fixture(scope="module")
def loaded(model: Any) -> Any:
    return model("llama", "float64")


def after(seals: Sequence[int], removed: Sequence[int] = (), gone_at: int = 0) -> Callable[[int, int, int, int], bool]:
    """What is seen where seals were done at these lengths, each on what the ones before left."""

    def visible(layer: int, head: int, query: int, key: int) -> bool:
        if key in removed and query >= gone_at:
            return False
        return not any(query >= tokens and key < tokens - RECENT and drops(key, layer, head, tokens) for tokens in seals)

    return visible


@pytest.mark.parametrize("toy", KINDS)
@pytest.mark.parametrize("page_size", [4, 16, 7])
def test_decode_after_a_seal_sees_what_was_kept(loaded: Any, twin: Any, toy: Any, page_size: int) -> None:
    hand = Hand(loaded, toy(), page_size)
    parts = [hand.logits({0: PROMPT[:20]}), hand.logits({0: PROMPT[20:]})]
    hand.seal(0)
    parts += [hand.logits({0: [token]}) for token in MORE[:9]]
    wanted = oracle(twin("llama", "float64"), PROMPT + MORE[:9], after([45]))
    assert (torch.cat(parts) - wanted).abs().max() < CLOSE


@pytest.mark.parametrize("toy", KINDS)
def test_a_second_turn_reads_sealed_part_and_tail_and_is_sealed_again(loaded: Any, twin: Any, toy: Any) -> None:
    """Chunks over a sealed part, then a seal of what both hold, then one as timed work, then a row without any tail to seal."""
    hand = Hand(loaded, toy())
    parts = [hand.logits({0: PROMPT})]
    hand.seal(0)
    parts += [hand.logits({0: [token]}) for token in MORE[:2]]
    parts += [hand.logits({0: MORE[2:9]}), hand.logits({0: MORE[9:15]})]
    hand.seal(0)
    parts += [hand.logits({0: [token]}) for token in MORE[15:20]]
    hand.seal(0, prompt_end=False)
    parts += [hand.logits({0: [token]}) for token in MORE[20:25]]
    wanted = oracle(twin("llama", "float64"), PROMPT + MORE[:25], after([45, 60, 65]))
    assert (torch.cat(parts) - wanted).abs().max() < CLOSE


def test_a_seal_that_appends_leaves_full_pages_where_they_are(loaded: Any, twin: Any) -> None:
    hand = Hand(loaded, Thirds())

    def visible(layer: int, head: int, query: int, key: int) -> bool:
        floor = max((at - RECENT for at in (45, 60, 66) if at <= query), default=0)
        return key >= floor or key % 3 > 0

    parts = [hand.logits({0: PROMPT})]
    hand.seal(0)
    (payload, *_) = hand.runner.forms[0].sealed
    for more, slots in ((MORE[:15], 28), (MORE[15:21], 38)):
        before = list(hand.rows[0].units[payload])
        assert hand.rows[0].slots == slots
        parts.append(hand.logits({0: more}))
        hand.seal(0)
        whole = slots // 16
        assert hand.rows[0].units[payload][:whole] == before[:whole]
        assert hand.rows[0].units[payload][whole] != before[whole]
    parts += [hand.logits({0: [token]}) for token in MORE[21:24]]
    wanted = oracle(twin("llama", "float64"), PROMPT + MORE[:24], visible)
    assert (torch.cat(parts) - wanted).abs().max() < CLOSE


@pytest.mark.parametrize("toy", KINDS)
def test_a_prune_of_the_sealed_part(loaded: Any, twin: Any, toy: Any) -> None:
    hand = Hand(loaded, toy())
    parts = [hand.logits({0: PROMPT})]
    hand.seal(0)
    most = hand.seal(0, removed=((5, 12), (30, 33)))
    gone = [*range(5, 12), *range(30, 33)]
    left = [p for p in range(45 - RECENT) if p not in gone]
    counts = [sum(not drops(p, layer, head, 45) for p in left) for layer in range(LAYERS) for head in range(HEADS)]
    assert most == max(counts)
    parts += [hand.logits({0: [token]}) for token in MORE[:5]]
    hand.seal(0)
    parts += [hand.logits({0: [token]}) for token in MORE[5:8]]
    wanted = oracle(twin("llama", "float64"), PROMPT + MORE[:8], after([45, 50], gone, 45))
    assert (torch.cat(parts) - wanted).abs().max() < CLOSE


def test_rows_of_several_methods_in_one_step_are_each_alone(loaded: Any) -> None:
    """Decodes and chunks, with and without sealed parts, of three methods, in an order that the step must undo."""
    forms = [methods.get("dense"), Toy(), HeadToy()]
    turns: list[dict[int, list[int]]] = [{0: MORE[:4], 1: [7], 2: MORE[4:9], 3: [1]}, {3: [5], 2: [8], 1: MORE[:6], 0: [3]}]

    def start(hand: Hand, rows: Sequence[int]) -> None:
        for row in rows:
            hand.logits({row: PROMPT[row : 30 + row]}, form=row % 3)
            if row in (1, 2):
                hand.seal(row)

    together = Hand(loaded, forms)
    start(together, range(4))
    found = [together.logits(turn) for turn in turns]
    for row in range(4):
        alone = Hand(loaded, forms[row % 3])
        alone.logits({row: PROMPT[row : 30 + row]})
        if row in (1, 2):
            alone.seal(row)
        for turn, scores in zip(turns, found, strict=True):
            counts = [len(tokens) for tokens in turn.values()]
            mine = torch.split(scores, counts)[list(turn).index(row)]
            assert (alone.logits({row: turn[row]}) - mine).abs().max() < CLOSE


@pytest.mark.parametrize("toy", KINDS)
def test_a_row_that_was_sealed_before_holds_nothing_of_that(loaded: Any, toy: Any) -> None:
    """Beside a sealed row, in the row of a sequence that was sealed and has ended: its table still names those units."""
    hand, alone = Hand(loaded, toy()), Hand(loaded, toy())
    hand.logits({0: PROMPT, 1: PROMPT})
    hand.seal(0)
    hand.seal(1)
    del hand.rows[1]
    hand.logits({1: MORE[:9]})
    found = hand.logits({0: [4], 1: [5]})[1]
    alone.logits({1: MORE[:9]})
    assert (alone.logits({1: [5]})[0] - found).abs().max() < CLOSE


def test_a_row_touches_the_tables_of_its_own_form_alone(loaded: Any) -> None:
    hand = Hand(loaded, [Toy(), HeadToy()])
    groups = [form.groups + form.sealed for form in hand.runner.forms]
    for row in range(2):
        hand.logits({row: PROMPT}, form=row)
        hand.seal(row)
    for row, other in ((0, 1), (1, 0)):
        for group in set(groups[other]) - set(groups[row]):
            assert not hand.runner.pages.tables[group][row].any()


class NoWait(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a GPU would be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"), name
        if name == "index" or name.startswith("index_put") or name == "_index_put_impl_":
            assert all(each is None or each.dtype != torch.bool for each in args[1]), "an index by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("toy", KINDS)
def test_a_seal_does_not_wait_for_the_device(loaded: Any, toy: Any) -> None:
    hand = Hand(loaded, toy(window=4))
    for _ in range(2):
        hand.logits({0: PROMPT})
        work = hand.work(0)
        with NoWait():
            hand.runner.seal(work)
        hand.seal(0)


def test_a_seal_of_nothing_writes_nothing(loaded: Any) -> None:
    hand = Hand(loaded, Toy())
    hand.logits({0: PROMPT[:RECENT]})
    before = hand.runner.pages.arena.clone()
    assert hand.work(0).seal == Seal(0, 0, (0, 0), (0, 0))
    assert hand.seal(0) == 0
    assert torch.equal(hand.runner.pages.arena, before)
    assert torch.isfinite(hand.logits({0: MORE[:3]})).all()


@dataclass(frozen=True)
class Greedy(Toy):
    """Says it keeps more than the host was told, and candidates that there are none of."""

    def seal(self, job: SealJob) -> Kept:
        kept = super().seal(job)
        return replace(kept, indices=kept.indices + 1000, counts=kept.counts + 1000)


def test_what_a_method_says_too_much_stays_in_its_own_units(loaded: Any) -> None:
    hand = Hand(loaded, Greedy())
    hand.logits({0: PROMPT})
    work = hand.work(0)
    mine = torch.zeros_like(hand.runner.pages.arena, dtype=torch.bool)
    for group, units in zip(hand.runner.forms[0].sealed, work.new, strict=True):
        for unit in units:
            mine[unit * 256 : unit * 256 + hand.runner.groups[group].stripe_bytes] = True
    before = hand.runner.pages.arena.clone()
    assert hand.runner.seal(work) == 42
    changed = hand.runner.pages.arena != before
    assert changed.any()
    assert not (changed & ~mine).any()
    lens = hand.runner.pages.state(hand.runner.forms[0].sealed[1])[work.new[1][0]]
    assert (lens == 42).all()


@dataclass(frozen=True)
class Silent(Toy):
    def seal(self, job: SealJob) -> Any:
        return None


def test_a_seal_must_say_what_it_keeps(loaded: Any) -> None:
    hand = Hand(loaded, Silent())
    hand.logits({0: PROMPT})
    with pytest.raises(EngineFault, match="did not say"):
        hand.seal(0)


def test_the_engine_does_what_the_hand_does(loaded: Any) -> None:
    """Three forms side by side through the scheduler: seals of prompts and as timed work, then a prune of what is sealed."""
    forms = [methods.get("dense"), Toy(window=4), HeadToy()]
    config = EngineConfig(8 << 20, 128, page_size=4, max_rows=4, step_tokens=16)
    llm = LLM(config, ModelRunner(loaded, config, forms))
    seqs = [llm.add(Request(PROMPT[: 30 + f], Sampling(max_tokens=6), chain_id=str(f), form=f)) for f in range(3)]
    while llm.has_work:
        llm.step()
        llm.check()
    for form, seq in enumerate(seqs):
        assert seq.fault is None
        hand = Hand(loaded, forms)
        made = [int(hand.logits({0: PROMPT[: 30 + form]}, form=form)[-1].argmax())]
        if form:
            hand.seal(0)
        while len(made) < 6:
            if form and hand.work(0, prompt_end=False).seal is not None:
                hand.seal(0, prompt_end=False)
            made.append(int(hand.logits({0: [made[-1]]})[-1].argmax()))
        assert seq.token_ids[30 + form :] == made
        llm.commit(seq, made)
        llm.prune(str(form), [(4, 9)])
        llm.check()
