"""Logits and greedy tokens equal transformers' own, whatever the chunks, pages and neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv.engine.core import Batch
from agentkv.engine.work import TableUpdate
from agentkv.kernels.native import native

FAMILIES = [
    "llama",
    "llama-biased",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3-sliding",
    "qwen3-moe",
    "qwen3-moe-sparse",
    "gemma3",
    "micro",
]
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}


def tokens_of(count: int, seed: int, vocab: int = 97) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(twin: Any, tokens: list[int], **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return twin(torch.tensor([tokens]), **inputs).logits[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [4, 16])
def test_logits_equal_transformers_at_page_edges(
    model: Any, twin: Any, host: Any, family: str, dtype: str, page_size: int
) -> None:
    edges = [1, page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1, 4 * page_size]
    if family == "micro":  # larger, so fewer lengths here; its own page size is below
        edges = [page_size - 1, page_size + 1, 2 * page_size]
    for length in edges:
        tokens = tokens_of(length, length)
        want = reference_logits(twin(family, dtype), tokens)
        assert want.std() > 0.2, "logits too small for an absolute tolerance to mean anything"
        mine = host(model(family, dtype), page_size)
        chunkings: list[list[int]] = [[], [1], [page_size], [page_size - 1, 2], [1] * 9, [page_size + 1, 1, 1, page_size]]
        for row, chunks in enumerate(chunkings):
            if row % mine.max_rows == 0:
                mine = host(model(family, dtype), page_size)
            got = mine.chunked(row % mine.max_rows, tokens, chunks)
            assert (got - want).abs().max() <= TOLERANCE[dtype], (length, chunks)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_equal_transformers_generate(model: Any, twin: Any, host: Any, family: str) -> None:
    prompt = tokens_of(21, 5)
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, 21, dtype=torch.long)}
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    want = twin(family, "float32").generate(**inputs, **options)[0, 21:].tolist()
    assert len(want) == 64
    assert host(model(family, "float32"), 4).greedy(1, prompt, 64) == want
    assert host(model(family, "float32"), 16).greedy(0, prompt, 64) == want


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe", "gemma3"])
def test_a_mixed_batch_equals_each_row_alone(model: Any, host: Any, family: str) -> None:
    """A decode, a chunk with history, a fresh prompt and a second decode, out of order, in one step."""
    loaded = model(family, "float64")
    histories = {0: tokens_of(9, 1), 1: tokens_of(13, 2), 2: [], 3: tokens_of(33, 3)}
    work = {1: tokens_of(6, 4), 0: tokens_of(1, 5), 2: tokens_of(11, 6), 3: tokens_of(1, 7)}
    together = host(loaded, 4)
    for row, history in histories.items():
        if history:
            together.logits(row, history)
    got = torch.split(together.runner.logits(together.batch(work)), [len(tokens) for tokens in work.values()])
    for (row, tokens), scores in zip(work.items(), got, strict=True):
        alone = host(loaded, 4)
        if histories[row]:
            alone.logits(row, histories[row])
        assert (alone.logits(row, tokens) - scores).abs().max() <= 1e-12


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_decodes_of_a_batch_are_the_same_bits_as_alone(model: Any, host: Any, family: str) -> None:
    """In float32, at page edges, with the compiled kernels: nothing that a decode computes depends on the rest of the batch."""
    if not native().functions:
        pytest.skip(native().note)
    loaded, lengths = model(family, "float32"), [3, 15, 16, 33]
    together, alone = host(loaded, 16), host(loaded, 16)
    for row, length in enumerate(lengths):
        for each in (together, alone):
            each.logits(row, tokens_of(length, row))
    for step in range(3):
        work = {row: tokens_of(1, 10 * step + row) for row in range(len(lengths))}
        scores = together.runner.logits(together.batch(work))
        for row, tokens in work.items():
            assert torch.equal(alone.logits(row, tokens)[0], scores[row])


def test_tokens_come_back_in_the_order_of_the_batch(model: Any, host: Any) -> None:
    loaded = model("qwen3", "float32")
    work = {2: tokens_of(7, 1), 0: tokens_of(1, 2), 3: tokens_of(5, 3)}
    mine = host(loaded, 4)
    batch = mine.batch(work, sample=True)
    batch.rows[2].sample = False
    got = mine.runner.execute(batch)
    want = [host(loaded, 4).greedy(row, tokens, 1)[0] for row, tokens in work.items()]
    assert got == [want[0], want[1], None]


def test_an_empty_batch_still_updates_the_table(model: Any, host: Any) -> None:
    mine = host(model("qwen3", "float32"), 4)
    assert mine.runner.execute(Batch([], [TableUpdate(1, 2, [7, 8]), TableUpdate(1, 3, [9])])) == []
    assert mine.runner.pages.tables[0][1, 2:4].tolist() == [7, 9]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_pruned_slots_are_gone_and_positions_stay(model: Any, twin: Any, host: Any, family: str) -> None:
    """Slots [5, 11) of 30 are removed in place; 12 more tokens follow at positions 30 on, slots 24 on."""
    tokens = tokens_of(42, 9)
    mine = host(model(family, "float64"), 4)
    mine.logits(0, tokens[:30])
    place = [(unit, slot) for unit in mine.units[0] for slot in range(4)]
    mine.runner.move_slots(place[11:30], place[5:24])
    mine.lengths[0] = [30, 24]
    got = torch.cat([mine.logits(0, tokens[30:37]), *(mine.logits(0, [token]) for token in tokens[37:])])

    visible = torch.ones(42, 42).tril().bool()
    visible[30:, 5:11] = False
    mask = torch.zeros(1, 1, 42, 42, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    want = reference_logits(twin(family, "float64"), tokens, attention_mask=mask)[30:]
    assert (got - want).abs().max() <= 1e-9
    unpruned = reference_logits(twin(family, "float64"), tokens)[30:]
    assert (got - unpruned).abs().max() > 1e-3, "the prune must matter for this test to see it"


def test_move_slots_with_overlapping_sets_equals_a_copy_by_hand(model: Any, host: Any) -> None:
    mine = host(model("qwen3", "float32"), 4)
    mine.logits(0, tokens_of(40, 1))
    mine.logits(1, tokens_of(40, 2))
    layers = [mine.runner.pages.layer(index) for index in range(3)]
    place = [(unit, slot) for row in (0, 1) for unit in mine.units[row][:10] for slot in range(4)]
    source, target = place[3:60], [*place[1:40], *reversed(place[61:79])]
    before = {at: [pages[at[0], :, :, at[1]].clone() for pages in layers] for at in place}
    mine.runner.move_slots(source, target)
    expected = before | {to: before[at] for at, to in zip(source, target, strict=True)}
    for (unit, slot), want in expected.items():
        assert all(torch.equal(pages[unit, :, :, slot], old) for pages, old in zip(layers, want, strict=True))


def test_bfloat16_runs_near_float32(model: Any, host: Any, checkpoint: Any) -> None:
    from agentkv.engine.loader import load_model

    tokens = tokens_of(30, 4)
    rough = host(load_model(checkpoint("llama"), dtype="bfloat16"), 16)
    got = torch.cat([rough.logits(0, tokens[:20]), *(rough.logits(0, [token]) for token in tokens[20:])])
    want = host(model("llama", "float32"), 16).logits(0, tokens)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.fixture
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' RMSNorm without its rounding to float32.

    transformers rounds there even in a float64 model, and so do we. With hundreds of tokens a difference of 1e-16 before a norm
    now and then falls on the border of two float32 values and comes out as 1e-7, which would hide what this test is for.
    """
    from transformers.models.qwen3 import modeling_qwen3

    from agentkv.engine import layers
    from agentkv.kernels import rotate

    def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return exact(x, self.weight, self.variance_epsilon)

    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", forward)
    monkeypatch.setattr(layers, "rms_norm", exact)
    monkeypatch.setattr(rotate, "rms_norm", exact)


def micro_in_chunks(model: Any, twin: Any, host: Any, dtype: str, seed: int) -> float:
    """Largest difference of logits over chunkings around the edges of 128-token pages."""
    tokens = tokens_of(260, seed, vocab=262)
    want = reference_logits(twin("micro", dtype), tokens)
    worst = 0.0
    for chunks in ([127, 1, 1], [128, 1, 1], [255, 1, 1], [256, 1, 1], [100, 56, 1, 1], []):
        got = host(model("micro", dtype), 128, pages_a_row=3, max_rows=2).chunked(1, tokens, chunks)
        worst = max(worst, float((got - want).abs().max()))
    return worst


def test_micro_at_the_edges_of_the_pages_it_is_served_with(model: Any, twin: Any, host: Any) -> None:
    assert micro_in_chunks(model, twin, host, "float32", 8) <= TOLERANCE["float32"]


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("seed", [8, 9])
def test_micro_at_the_edges_of_its_pages_in_float64(model: Any, twin: Any, host: Any, seed: int) -> None:
    assert micro_in_chunks(model, twin, host, "float64", seed) <= TOLERANCE["float64"]
