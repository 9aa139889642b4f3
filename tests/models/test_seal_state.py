"""State and seals: items that move with their slots, states that a method seals itself, page state, queries, replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from seal_hand import HEADS, LAYERS, RECENT, Hand, HeadToy, Toy
from torch import Tensor

from agentkv.engine.core import SLOT, Batch
from agentkv.engine.form import Held, Seal
from agentkv.engine.sealed import SealJob
from agentkv.engine.selection import Selection
from agentkv.engine.sparse import Keep, Kept, ModelShape, SparseMethod, StateSpec
from agentkv.engine.view import DeviceBatch, PageFill
from agentkv.engine.work import PageWork
from agentkv.errors import EngineFault

PROMPT = [(7 * i + 3) % 97 for i in range(45)]
MORE = [(11 * i + 5) % 97 for i in range(30)]


@pytest.fixture(scope="module")
def loaded(model: Any) -> Any:
    return model("llama", "float64")


def mark(positions: Tensor) -> Tensor:
    """`[num_layers, num_kv_heads, n, 2]` of positions `[..., n]`: another value for each layer, head and position."""
    layers, heads = torch.arange(LAYERS)[:, None, None], torch.arange(HEADS)[:, None]
    value = 100 * positions.double() + 10 * layers + heads
    return torch.stack((value, -value), -1)


class Marks(SparseMethod):
    """Mixed into a toy: marks each token's slots, in two orders of dims, and finds the marks wherever they have gone."""

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        heads = (LAYERS, HEADS)
        return (
            StateSpec("mark", "slot", "float64", "mutable", (*heads, SLOT, 2), "both"),
            StateSpec("front", "slot", "float64", "append", (SLOT, *heads, 2), "both"),
            StateSpec("tail", "slot", "int32", "append"),
        )

    def on_step_begin(self, batch: DeviceBatch) -> None:
        made = mark(batch.positions).movedim(2, 0)
        units, places = batch.state("mark")
        units.movedim(3, 1)[places.entries, places.offsets] = made
        units, places = batch.state("front")
        units[places.entries, places.offsets] = made
        units, places = batch.state("tail")
        units[places.entries, places.offsets] = batch.positions.to(torch.int32)

    def on_step_end(self, batch: DeviceBatch) -> None:
        if batch.sealed is None:
            return
        positions = torch.stack([batch.sealed.positions(layer) for layer in range(LAYERS)], 1)
        lens = torch.stack([batch.sealed.lens(layer) for layer in range(LAYERS)], 1)
        units, rows = batch.sealed.state("mark")
        marks = units[rows].movedim(1, 3).flatten(3, 4)
        units, rows = batch.sealed.state("front")
        front = units[rows].flatten(1, 2).movedim(1, 3)
        for row in range(len(rows)):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    count = int(lens[row, layer, head])
                    at = positions[row, layer, head, :count]
                    assert (at.diff() > 0).all()
                    expected = 100 * at.double() + 10 * layer + head
                    for each in (marks, front):
                        assert torch.equal(each[row, layer, head, :count, 0], expected)
                        assert torch.equal(each[row, layer, head, :count, 1], -expected)


@dataclass(frozen=True)
class MarkedToy(Marks, Toy):
    def seal(self, job: SealJob) -> Kept:
        _items_are_of_the_candidates(job)
        return Toy.seal(self, job)


@dataclass(frozen=True)
class MarkedHeadToy(Marks, HeadToy):
    def seal(self, job: SealJob) -> Kept:
        _items_are_of_the_candidates(job)
        return HeadToy.seal(self, job)


def _items_are_of_the_candidates(job: SealJob) -> None:
    for layer in range(LAYERS):
        found = job.candidates(layer)
        expected = torch.where(found.valid, mark(found.positions)[layer, ..., 0], 0)
        for items in (job.items("mark"), job.items("front").movedim(0, 2)):
            assert torch.equal(torch.where(found.valid, items[layer, ..., 0], 0), expected)
        assert torch.equal(job.items("tail"), found.positions[0, found.tail :])
        assert torch.equal(job.items("tail"), job.positions())


@pytest.mark.parametrize("toy", [MarkedToy, MarkedHeadToy])
def test_items_of_slots_move_with_their_slots(loaded: Any, toy: Any) -> None:
    hand = Hand(loaded, toy())
    hand.logits({0: PROMPT, 1: PROMPT[:30]})
    hand.seal(0)
    hand.logits({0: [1], 1: MORE[:4]})
    hand.seal(1)
    hand.logits({0: MORE[:9], 1: [2]})
    hand.seal(0)
    hand.logits({0: [1], 1: [3]})
    hand.seal(0, removed=((3, 20),))
    hand.logits({0: [1], 1: [3]})
    assert hand.runner.forms[0].mutable == {1, 6}
    assert not hand.runner.forms[0].truncates


@dataclass(frozen=True)
class Sums(SparseMethod):
    """Seals into states of its own: a running sum of positions, whatever page they lie in, and the positions themselves."""

    seals_into: ClassVar[Any] = "states"
    most = Toy.most

    def keep(self, held: Held) -> Keep | None:
        return Keep(held.tokens - RECENT, held.tokens - RECENT, appends=True)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return (
            StateSpec("sum", "sequence", "int64", "mutable", (1,), "sealed"),
            StateSpec("held", "slot", "int64", "append", (2, SLOT), "sealed"),
        )

    def seal(self, job: SealJob) -> None:
        assert job.work.seal is not None
        count = job.work.seal.floor - job.work.held.floor
        moved = job.positions()[:count].to(torch.int64)
        (units, old), (_, new) = job.old("sum"), job.new("sum")
        before = units[old].sum()
        units[new] = (before + moved.sum()).expand(1, 1)
        units, new = job.new("held")
        whole = (
            torch.cat((job.items("held"), torch.stack((moved, -moved))), 1)
            if job.work.held.slots
            else torch.stack((moved, -moved))
        )
        first = job.work.seal.keeps[1] * 16
        padded = torch.nn.functional.pad(whole[:, first:], (0, len(new) * 16 - first - (whole.shape[1] - first)))
        units[new[first // 16 :]] = padded.view(2, -1, 16).transpose(0, 1)

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> Any:
        return SparseMethod.view(self, layer, selection, replace(batch, sealed=None))

    def on_step_end(self, batch: DeviceBatch) -> None:
        if batch.sealed is not None:
            units, rows = batch.sealed.state("sum")
            held, pages = batch.sealed.state("held")
            for index, span in enumerate(batch.rows):
                floor = int(batch.sealed.lens(0)[index, 0])
                if not floor:
                    continue
                assert int(units[rows[index]].sum()) == floor * (floor - 1) // 2
                values = held[pages[index]].transpose(0, 1).flatten(1)[:, :floor]
                assert values.tolist() == [list(range(floor)), [-p for p in range(floor)]]
                assert floor <= span.position


def test_a_method_that_seals_into_states_writes_them_itself(loaded: Any) -> None:
    hand = Hand(loaded, Sums())
    hand.logits({0: PROMPT, 1: PROMPT[:9]})
    assert hand.seal(0) == 42
    hand.logits({0: [1], 1: [1]})
    hand.seal(1)
    hand.logits({0: MORE[:9], 1: [1]})
    assert hand.work(0).seal == Seal(52, 52, (1, 4), (0, 2))
    hand.seal(0)
    hand.logits({0: [1], 1: [3]})
    with pytest.raises(EngineFault, match="cannot be pruned"):
        hand.seal(0, removed=((3, 20),))


@dataclass(frozen=True)
class Means(SparseMethod):
    """Keeps the mean key of each page, made when the page is full."""

    made: Any = None

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return (StateSpec("mean", "page", "float64", "append", (LAYERS, HEADS, model.head_dim)),)

    def on_pages(self, pages: PageFill) -> None:
        means, into = pages.state("mean")
        self.made.append(pages.entries.tolist())
        for layer in range(LAYERS):
            means[into, layer] = pages.pages(layer)[pages.entries, :, 0].mean(2)


def test_page_state_is_made_once_when_its_page_is_full(loaded: Any) -> None:
    hand = Hand(loaded, Means([]))
    means, pages = hand.runner.pages.state(1), hand.runner.pages
    assert hand.runner.forms[0].paged
    for work in ({0: PROMPT[:6]}, {0: [1], 1: PROMPT[:13]}, {0: [2], 1: [4]}, {0: MORE[:2]}, {1: MORE[:10], 0: [5]}):
        hand.logits(work)
    units = {row: hand.rows[row].units for row in (0, 1)}
    full = {0: 11 // 4, 1: 24 // 4}
    assert sorted(unit for each in hand.runner.controller.methods[0].made for unit in each) == sorted(
        unit for row in (0, 1) for unit in units[row][0][: full[row]]
    )
    for row in (0, 1):
        for layer in range(LAYERS):
            keys = pages.layer(layer)[torch.tensor(units[row][0][: full[row]]), :, 0]
            assert torch.equal(means[torch.tensor(units[row][1][: full[row]]), layer], keys.mean(2))
    assert means[units[0][1][2]].isnan().all()
    hand.runner.refresh(PageWork(0, (units[1][0][1:2], units[0][1][2:3])))
    assert torch.equal(means[units[0][1][2]], means[units[1][1][1]])


# -- the query window and replays


@dataclass(frozen=True)
class Watching(Toy):
    """Also writes down every query that it is shown, by row."""

    queries: Any = None

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        for span in batch.rows:
            if not batch.replay:
                self.queries.setdefault((span.row, layer), []).extend(q[span.start : span.end].clone())
        return None


@pytest.mark.parametrize("window", [1, 5, 8])
def test_the_newest_queries_of_the_prompt_are_kept_for_its_seal(loaded: Any, window: int) -> None:
    """Chunks shorter and longer than the window, one token at the end, two rows; decodes and replays leave no trace."""
    method = Watching(window=window, queries={})
    hand = Hand(loaded, method)
    for work in ({0: PROMPT[:3], 1: PROMPT[:20]}, {1: PROMPT[20:22], 0: PROMPT[3:19]}, {0: PROMPT[19:23], 1: PROMPT[22:23]}):
        hand.logits(work)
    hand.logits({0: MORE[:6]}, replay=True)
    hand.logits({0: [9]}, step=0)
    for row in (0, 1):
        hand.seal(row)
        for layer in range(LAYERS):
            assert torch.equal(method.seen[-1][layer], torch.stack(method.queries[row, layer][-window:]))
    hand.logits({0: [4]}, step=1)
    hand.seal(0)
    assert method.seen[-1][0].shape == (0, 6, 12)
    hand.logits({1: MORE[:3]})
    hand.seal(1)
    for layer in range(LAYERS):
        assert torch.equal(method.seen[-1][layer], torch.stack(method.queries[1, layer][-min(3, window) :]))


def test_a_row_of_another_sequence_starts_its_window_afresh(loaded: Any) -> None:
    method = Watching(window=8, queries={})
    hand = Hand(loaded, method)
    hand.logits({0: PROMPT[:9]})
    batch = hand.batch({0: PROMPT[9:12]})
    batch.rows[0].seq_id = 77
    hand.runner.logits(batch)
    hand.seal(0)
    assert torch.equal(method.seen[-1][1], torch.stack(method.queries[0, 1][-3:]))
    work = hand.work(0)
    work.row = None
    hand.runner.seal(work)
    assert len(method.seen[-1][1]) == 0


@dataclass(frozen=True)
class Phases(Means):
    """Notes the batches of each step."""

    batches: Any = None

    def on_step_end(self, batch: DeviceBatch) -> None:
        self.batches.append((batch.prefill, batch.replay, [span.row for span in batch.rows]))


def test_a_replay_leaves_no_trace(loaded: Any) -> None:
    """Beside a chunk and a decode: in a batch of its own, drawn from never, no page state made; what follows is what it was."""
    hand, plain = (Hand(loaded, Phases([], batches=[])) for _ in range(2))
    for each in (hand, plain):
        each.logits({0: PROMPT[:17], 1: PROMPT[:9]})
    method = hand.runner.controller.methods[0]
    assert isinstance(method, Phases)
    method.made.clear()
    method.batches.clear()
    replay = hand.batch({0: MORE[:9]}, replay=True, step=0)
    rest = hand.batch({1: [3], 2: PROMPT[:3]}, step=0)
    drawn = hand.runner.execute(Batch([*replay.rows, *rest.rows], [*replay.table_updates, *rest.table_updates]))
    assert drawn[0] is None
    assert None not in drawn[1:]
    assert method.batches == [(False, False, [1]), (True, False, [2]), (True, True, [0])]
    assert method.made == []
    plain.logits({1: [3], 2: PROMPT[:3]})
    assert torch.equal(hand.logits({0: PROMPT[17:]}), plain.logits({0: PROMPT[17:]}))


def test_replays_are_given_room_behind_a_full_window(loaded: Any) -> None:
    @dataclass(frozen=True)
    class Replaying(Toy):
        def replay_most(self, prompt: int) -> int:
            return 20

        def replay(self, held: Held, token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
            return (tuple(token_ids[:20]),)

    hand = Hand(loaded, Replaying())
    (form,) = hand.runner.forms
    assert form.replay is not None
    assert form.replay(Held(9, 0, 9, 0, True), PROMPT) == (tuple(PROMPT[:20]),)
    hand.logits({0: (PROMPT * 3)[:128]})
    assert torch.isfinite(hand.logits({0: MORE[:20]}, replay=True)).all()
