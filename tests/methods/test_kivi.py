"""Few bits: transformers reading what numpy quantised when it was due, bytes, schedules, chains, prunes, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded import DIM, HEADS, LAYERS, Engine, Turn, Twin, make, prompt
from numpy.typing import NDArray
from torch import Tensor

from agentkv import methods
from agentkv.engine.core import Edit, Request
from agentkv.engine.form import Bound, Held, Seal
from agentkv.engine.sparse import Keep, Plain, StateSpec
from agentkv.errors import BadRequest
from agentkv.types import Sampling

OPTIONS: dict[str, Any] = {"bits": 4, "group": 16, "residual": 32}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("kivi"), request.param)


def quantised(x: NDArray[Any], axis: int, bits: int) -> NDArray[Any]:
    """One group along an axis, read back."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = (high - low) / (2**bits - 1), low
    # by way of float32, as torch does it: once in 8192 numbers that is not the nearest
    scale, zero = (each.astype(np.float32).astype(np.float16).astype(np.float64) for each in (scale, zero))
    codes = np.clip(np.rint((x - zero) / np.where(scale == 0, 1, scale)), 0, 2**bits - 1)
    return codes * scale + zero


class Quantised(Twin):
    """floor: tokens before it are quantised; kept: by layer, (k, v) as they are read there."""

    def __init__(self, folder: Path, bits: int, group: int, residual: int, schedule: str = "window") -> None:
        super().__init__(folder, self.read)
        self.bits, self.group, self.residual, self.schedule = bits, group, residual, schedule
        self.floor = 0
        self.kept = [(torch.empty(HEADS, 0, DIM, dtype=torch.float64),) * 2 for _ in range(LAYERS)]

    def read(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old = self.kept[layer]
        return torch.cat((old[0], k[:, self.floor :]), 1), torch.cat((old[1], v[:, self.floor :]), 1)

    def flush(self) -> None:
        """What is due at this length."""
        if self.schedule == "blocks":
            floor = self.forwarded - self.forwarded % self.residual
        else:
            floor = max(0, self.forwarded - self.residual)
            floor -= floor % self.group
        for start in range(self.floor, floor, self.group):
            for layer, attention in enumerate(self.attention):
                parts = []
                for side, x in enumerate(attention.exact):
                    made = x[:, start : start + self.group].numpy().copy()
                    stays = [at for at in range(self.group) if start + at not in self.gone]
                    for head in range(HEADS):
                        if side == 0 and stays:
                            for channel in range(DIM):
                                made[head, stays, channel] = quantised(made[head, stays, channel], 0, self.bits)
                        elif stays:
                            made[head] = np.concatenate(
                                [
                                    quantised(made[head, :, at : at + self.group], 1, self.bits)
                                    for at in range(0, DIM, self.group)
                                ],
                                1,
                            )
                    parts.append(torch.cat((self.kept[layer][side], torch.from_numpy(made)), 1))
                self.kept[layer] = parts[0], parts[1]
        self.floor = max(self.floor, floor)

    def play(self, ids: list[int], turn: Turn) -> float:
        return self.answer(ids, turn, self.flush)


@pytest.mark.parametrize("schedule", ["window", "blocks"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_it_reads_what_is_due_and_no_more(folder: Path, schedule: str, bits: int) -> None:
    """Three turns in chunks: a prompt in full precision, then codes; flushes in answers; later turns forward what is new."""
    options = {"bits": bits, "group": 16, "residual": 32, "schedule": schedule}
    twin, engine = Quantised(folder, **options), Engine(folder, "kivi", **options, step_tokens=37)
    ids, gap = prompt(90), 0.0
    for number, count in enumerate((40, 3, 20)):
        turn = engine.turn(ids, count=count)
        assert turn.prefilled == len(ids) - twin.forwarded
        gap = max(gap, twin.play(ids, turn))
        ids = [*ids, *turn.tokens, *prompt((9, 50, 0)[number], seed=number)]
    print(f"{schedule}, {bits} bits: {gap:.1e}")
    assert twin.floor > 90
    assert gap < 1e-9


@pytest.mark.parametrize("schedule", ["window", "blocks"])
def test_pruned_tokens_are_not_read_whether_sealed_before_or_after(folder: Path, schedule: str) -> None:
    options = {**OPTIONS, "schedule": schedule}
    twin, engine = Quantised(folder, **options), Engine(folder, "kivi", **options)
    ids, edits, gap = prompt(90), (), 0.0
    removals = [[(3, 9), (20, 34), (85, 88)], [(34, 48), (60, 70), (97, 99)], []]
    for number, removed in enumerate(removals):
        turn = engine.turn(ids, edits=edits, count=9)
        assert turn.prefilled == len(ids) - twin.forwarded
        gap = max(gap, twin.play(ids, turn))
        ids = [*ids, *turn.tokens]
        if removed:
            codes = engine.runner.forms[0].sealed[0]
            before = list(engine.llm.chains.chains["c"].state.holdings[codes].units)
            engine.llm.prune("c", removed)
            engine.llm.check()
            assert engine.llm.chains.chains["c"].state.holdings[codes].units == before, "codes stay where they are"
            edits = (*edits, Edit(len(ids), tuple(removed)))
            twin.gone |= {at for start, end in removed for at in range(start, end)}
        ids = [*ids, *prompt(30, seed=number)]
    assert gap < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_prunes_anywhere(folder: Path, seed: int) -> None:
    """Random spans after each of four turns, a whole tail and whole groups among them; flushes go on over the holes."""
    draw = random.Random(seed)
    options = {**OPTIONS, "bits": 2, "schedule": ("window", "blocks")[seed % 2]}
    twin, engine = Quantised(folder, **options), Engine(folder, "kivi", **options)
    ids, edits, gap = prompt(draw.randrange(40, 90), seed), (), 0.0
    for _ in range(4):
        turn = engine.turn(ids, edits=edits, count=draw.randrange(2, 40))
        gap = max(gap, twin.play(ids, turn))
        ids = [*ids, *turn.tokens]
        starts = sorted(draw.sample(range(len(ids) - 1), 2))
        spans = [(start, min(start + draw.choice((1, 7, 40)), len(ids) - 1)) for start in starts]
        spans += [(twin.floor, len(ids) - 1)] * draw.randrange(2)
        engine.llm.prune("c", spans)
        engine.llm.check()
        edits = (*edits, Edit(len(ids), tuple(spans)))
        twin.gone |= {at for start, end in spans for at in range(start, end)}
        ids = [*ids, *prompt(draw.randrange(1, 40), seed)]
    assert gap < 1e-9


def test_the_host_counts_pages_of_a_group_and_of_flags(folder: Path) -> None:
    """Codes are appended; of the flags the last page is written anew, and there are two of it for a moment."""
    runner = Engine(folder, "kivi", **OPTIONS).runner
    form, (codes, flags) = runner.forms[0], runner.forms[0].sealed
    assert form.seal is not None
    assert form.bound is not None
    assert [runner.groups[group].page_size for group in (codes, flags)] == [16, 256]
    assert form.stays == {codes}
    assert form.seal(Held(400, 0, 400, 0, True)) == Seal(368, 368, (23, 2), (0, 0))
    assert form.seal(Held(415, 368, 47, 368, False)) is None
    assert form.seal(Held(416, 368, 48, 368, False)) == Seal(384, 384, (24, 2), (23, 1))
    assert form.bound(400, 416) == Bound(48, (25, 3))
    assert form.bound(10, 30) == Bound(30, (0, 0))
    with pytest.raises(BadRequest, match="only pages of sealed state"):
        StateSpec("x", "slot", "uint8", "append", page_size=32)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_token_takes_its_bits_its_ranges_and_a_flag(folder: Path, bits: int) -> None:
    """544 tokens, 512 of which are codes: two granules of flags."""
    engine = Engine(folder, "kivi", bits=bits, group=16, residual=32)
    turn = engine.turn(prompt(544), count=2)
    kv, codes, flags = turn.bytes_held
    assert flags == 512
    exact = LAYERS * HEADS * 2 * (DIM * bits / 8 + 2 * 2 * DIM / 16)
    assert codes / 512 == exact
    assert kv == 32 * LAYERS * HEADS * 2 * DIM * 8  # the tail, float64


def test_the_schedule_of_keys_is_the_paper_s_in_blocks() -> None:
    """As many keys stay as whole blocks leave over; in a window at least `residual`, and less than a group more."""
    blocks, window = methods.get("kivi", **OPTIONS, schedule="blocks"), methods.get("kivi", **OPTIONS)
    for tokens in range(1, 200):
        for method, stays in ((blocks, [tokens % 32]), (window, range(min(tokens, 32), 48))):
            keep = method.keep(Held(tokens, 0, tokens, 0, True))
            floor = 0 if keep is None else keep.floor
            assert tokens - floor in stays
            assert keep is None or keep == Keep(floor, floor, appends=True)
            assert method.most(tokens, tokens).tail >= min(tokens, 32)
    assert window.keep(Held(80, 32, 0, 32, True)) is None  # nothing there


def test_codes_do_not_depend_on_the_schedule(folder: Path) -> None:
    """A prompt at once, and the same tokens as an answer of one: what is sealed of the same keys is the same bytes."""
    engine = Engine(folder, "kivi", **OPTIONS)
    first = engine.turn(prompt(70), count=60)
    streamed = codes_of(engine)
    whole = Engine(folder, "kivi", **OPTIONS)
    whole.turn([*prompt(70), *first.tokens[:-1]], count=1)
    sealed = codes_of(whole)
    assert torch.equal(sealed[:2, 0], streamed[:2, 0])  # layer 0 and the prompt's own groups: the same keys
    assert len(sealed) == len(streamed) == 6


def codes_of(engine: Engine) -> Tensor:
    """uint8 `[num_units, num_layers, page_bytes]` of the chain's codes."""
    group = engine.runner.forms[0].sealed[0]
    units = engine.llm.chains.chains["c"].state.holdings[group].units
    return engine.runner.pages.state(group)[units]


def test_what_fits_the_residual_is_dense(folder: Path) -> None:
    dense, ours = Engine(folder, "dense"), Engine(folder, "kivi", bits=2, group=16, residual=128)
    ids = prompt(100)
    for _ in range(2):
        a, b = dense.turn(ids), ours.turn(ids)
        assert (a.tokens, a.logprobs) == (b.tokens, b.logprobs)
        ids = [*ids, *a.tokens, *prompt(5, seed=3)]


def test_eight_bits_are_near_full_precision(folder: Path) -> None:
    """The second answered token within 0.05 nats; the first is exact, since prompts are read in full precision."""
    dense = Engine(folder, "dense").turn(prompt(120), count=2)
    turn = Engine(folder, "kivi", **{**OPTIONS, "bits": 8}).turn(prompt(120), count=2)
    assert turn.logprobs[0] == dense.logprobs[0]
    assert turn.tokens == dense.tokens
    assert 0 < abs(turn.logprobs[1] - dense.logprobs[1]) < 0.05


@pytest.mark.parametrize("step_tokens", [5, 64])
def test_chunks_and_others_in_the_step_change_nothing(folder: Path, step_tokens: int) -> None:
    whole, cut = Engine(folder, "kivi", **OPTIONS), Engine(folder, "kivi", **OPTIONS, step_tokens=step_tokens, page_size=7)
    ids = prompt(90)
    for _ in range(2):
        for length in (3, 50):
            cut.llm.add(Request(prompt(length, seed=length), Sampling(max_tokens=4)))
        a, b = whole.turn(ids, count=20), cut.turn(ids, count=20)
        assert a.tokens == b.tokens
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-9
        ids = [*ids, *a.tokens, *prompt(30, seed=3)]


def test_a_rollback_goes_on_as_a_session_that_never_went_further(folder: Path) -> None:
    engine, alone = Engine(folder, "kivi", **OPTIONS), Engine(folder, "kivi", **OPTIONS)
    ids = prompt(90)
    first = engine.turn(ids)
    alone.turn(ids)
    kept = [*ids, *first.tokens]
    engine.turn([*kept, *prompt(60, seed=5)], count=30)
    engine.llm.rollback("c", len(kept))
    more = [*kept, *prompt(9, seed=2)]
    back, wanted = engine.turn(more, count=30), alone.turn(more, count=30)
    assert (back.tokens, back.prefilled) == (wanted.tokens, wanted.prefilled)


def test_a_fork_shares_codes_and_a_chain_comes_back_from_host_memory(folder: Path) -> None:
    engine, alone = Engine(folder, "kivi", **OPTIONS, warm=16 << 20), Engine(folder, "kivi", **OPTIONS)
    ids = prompt(90)
    first = engine.turn(ids)
    alone.turn(ids)
    more = [*ids, *first.tokens, *prompt(9, seed=2)]
    wanted = alone.turn(more, count=30)
    engine.llm.fork("c", "d", len(more) - 9)
    forked = engine.turn(more, chain="d", count=30)
    assert (forked.tokens, forked.prefilled) == (wanted.tokens, 10)
    engine.llm.drop("d")
    engine.llm.suspend("c")
    info = engine.llm.chain_info("c")
    assert info is not None
    assert info.warm_tokens
    back = engine.turn(more, count=30)
    assert (back.tokens, back.prefilled) == (wanted.tokens, 10)


@pytest.mark.parametrize(
    ("bits", "against", "scales"), [(2, "stored", "float16"), (4, "exact", "float32"), (8, "stored", "bfloat16")]
)
def test_the_reference_says_the_same(bits: int, against: str, scales: str) -> None:
    method = methods.get("kivi", bits=bits, group=8, residual=16, against=against, scales=scales)
    k, v = torch.randn(2, 45, 2, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    read = method.reference(Plain([], [k], [v], [], [], [], 1.0), 0)
    for head in range(2):
        assert list(read.positions[head]) == list(range(45))
        assert torch.equal(read.k[head][24:], k[24:, head])
        for x, found in ((k[:24, head], read.k[head][:24]), (v[:24, head], read.v[head][:24])):
            widest = (x.amax() - x.amin()) / (2**bits - 1) / 2
            assert (x - found).abs().max() <= widest * 1.02 + 0.02
    if scales == "float16":
        assert np.array_equal(read.k[0][:8, 3].numpy(), quantised(k[:8, 0, 3].numpy(), 0, bits))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bits": 3}, "bits=3: give 2, 4 or 8"),
        ({"group": 0}, "group=0"),
        ({"residual": 100}, "residual=100: give a multiple of group=32"),
        ({"residual": 0}, "residual=0"),
        ({"schedule": "rolling"}, "schedule='rolling'"),
        ({"scales": "float8"}, "scales='float8'"),
        ({"against": "paper"}, "against='paper'"),
    ],
)
def test_refusals(options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        methods.get("kivi", **options)


def test_a_model_whose_heads_are_no_groups_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequest, match="groups of 12 tokens and 12 channels do not divide"):
        Engine(folder, "kivi", group=12, residual=24)
