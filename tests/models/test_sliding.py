"""Sliding windows: layers that see the last tokens only equal transformers, whatever the chunks, pages, holes, neighbours."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from agentkv import methods
from agentkv.engine.core import Batch, Edit, EngineConfig, Request, RowWork
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.errors import EngineFault
from agentkv.types import Interval, Sampling

WINDOW = 7  # of the tiny checkpoints, in two layers of three
FAMILIES = ["gemma3", "qwen3-sliding"]
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def masked_logits(twin: Any, tokens: list[int], prunes: list[tuple[int, Interval]]) -> torch.Tensor:
    """transformers' logits where tokens from `at` on no longer see an interval, in layers of both kinds: explicit masks."""
    count = len(tokens)
    seen = torch.ones(count, count).tril().bool()
    for at, (start, end) in prunes:
        seen[at:, start:end] = False
    near = seen & ~torch.ones(count, count).tril(-WINDOW).bool()
    dtype = twin.dtype
    masks = [torch.zeros(1, 1, count, count, dtype=dtype).masked_fill(~each, -torch.inf) for each in (seen, near)]
    with torch.inference_mode():
        by_kind = dict(zip(("full_attention", "sliding_attention"), masks, strict=True))
        return twin(torch.tensor([tokens]), attention_mask=by_kind).logits[0]


def test_the_masks_of_these_tests_are_those_of_transformers(twin: Any) -> None:
    for family in FAMILIES:
        tokens, theirs = tokens_of(40, 1), twin(family, "float64")
        with torch.inference_mode():
            want = theirs(torch.tensor([tokens])).logits[0]
        assert torch.equal(masked_logits(theirs, tokens, []), want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [4, 16])
def test_logits_at_window_edges(model: Any, twin: Any, host: Any, family: str, dtype: str, page_size: int) -> None:
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 1, 13 * WINDOW):
        tokens = tokens_of(length, length)
        with torch.inference_mode():
            want = twin(family, dtype)(torch.tensor([tokens])).logits[0]
        mine = host(model(family, dtype), page_size)
        chunkings: list[list[int]] = [[], [WINDOW - 1, 1, 1], [WINDOW, 2, 1], [1] * length]
        for row, chunks in enumerate(chunkings):
            got = mine.chunked(row, tokens, chunks)
            assert (got - want).abs().max() <= TOLERANCE[dtype], (length, chunks)


def test_the_window_matters(model: Any, twin: Any) -> None:
    """Or the tests above would pass without one."""
    tokens, theirs = tokens_of(40, 3), twin("gemma3", "float64")
    full = torch.zeros(1, 1, 40, 40, dtype=torch.float64).masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
    with torch.inference_mode():
        wide = theirs(
            torch.tensor([tokens]), attention_mask=dict.fromkeys(("full_attention", "sliding_attention"), full)
        ).logits
        want = theirs(torch.tensor([tokens])).logits
    assert (wide - want)[0, :WINDOW].abs().max() < 1e-9
    assert (wide - want)[0, WINDOW:].abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize(
    "prunes",
    [
        [(30, (5, 11))],  # behind the window
        [(30, (25, 29))],  # inside it
        [(30, (20, 26))],  # across its edge
        [(30, (17, 30))],  # the window and what is before it
        [(30, (2, 9)), (33, (28, 31)), (41, (31, 40))],
    ],
)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_prunes(family: str, page_size: int, prunes: list[tuple[int, Interval]], model: Any, twin: Any, host: Any) -> None:
    tokens = tokens_of(60, 9)
    want = masked_logits(twin(family, "float64"), tokens, prunes)
    for chunk in (1, 5, 60):
        mine = host(model(family, "float64"), page_size)
        outs, at = [], 0
        for boundary, gone in [*prunes, (60, (0, 0))]:
            piece = tokens[at:boundary]
            outs.append(mine.chunked(0, piece, [chunk] * (len(piece) // chunk)))
            mine.prune(0, *gone)
            at = boundary
        assert (torch.cat(outs) - want).abs().max() <= 1e-9
    unpruned = masked_logits(twin(family, "float64"), tokens, [])
    assert (want - unpruned)[30:].abs().max() > 1e-3, "the prune must matter for this test to see it"


def test_holes_that_a_batch_does_not_name_are_a_fault(model: Any, host: Any) -> None:
    mine = host(model("gemma3", "float64"), 4)
    mine.logits(0, tokens_of(30, 1))
    with pytest.raises(EngineFault, match="24 slots at position 30"):
        mine.runner.logits(Batch([RowWork(0, [5], 30, 24, False, Sampling(), 0, 0)]))


def engine_of(model: Any, family: str, reuse: Any = "radix", **sizes: Any) -> LLM:
    config = EngineConfig(**({"memory": 8 << 20, "window": 256, "page_size": 4, "max_rows": 8, "step_tokens": 48} | sizes))
    return LLM(config, ModelRunner(model(family, "float64"), config, methods.get("dense")), reuse=reuse)


def request(tokens: list[int], chain: str | None = None, edits: tuple[Edit, ...] = ()) -> Request:
    return Request(tokens, Sampling(temperature=0.0, max_tokens=12), chain, edits)


def answers(llm: LLM, requests: list[Request]) -> list[list[int]]:
    """What is generated for requests that run together."""
    open_ = [llm.add(each) for each in requests]
    while llm.has_work:
        llm.step()
    made = [seq.token_ids[seq.num_prompt_tokens :] for seq in open_]
    for seq, ids in zip(open_, made, strict=True):
        assert seq.fault is None
        llm.commit(seq, ids)
    llm.check()
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *FAMILIES])
@pytest.mark.parametrize("page_size", [4, 16])
def test_batched_is_alone_and_cache_on_is_off(family: str, page_size: int, model: Any) -> None:
    """Eight requests of random lengths, half of them from a shared beginning, edited histories among them."""
    rng = random.Random(page_size)
    head = tokens_of(33, 4)
    requests = []
    for index in range(8):
        tokens = head * (index % 2) + tokens_of(rng.randint(1, 60), 20 + index)
        edits = (Edit(len(tokens) - 3, ((2, len(tokens) // 2),)),) if index in (3, 6) and len(tokens) > 12 else ()
        requests.append(request(tokens, edits=edits))
    alone = [answers(engine_of(model, family, page_size=page_size), [each])[0] for each in requests]
    shared = engine_of(model, family, page_size=page_size)
    assert answers(shared, requests) == alone
    assert answers(shared, requests) == alone  # now out of the prefix cache
    assert shared.radix.enabled
    assert answers(engine_of(model, family, "chain", page_size=page_size), requests) == alone
    assert answers(engine_of(model, family, page_size=page_size, step_tokens=9, max_rows=8), requests) == alone
    assert answers(engine_of(model, family, page_size=page_size, lookup=8), requests) == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_chain_generates_what_transformers_does(family: str, model: Any, twin: Any) -> None:
    """Two turns, prunes between them behind and inside the window; masks by hand, one full forward pass a token."""
    llm, history = engine_of(model, family), tokens_of(40, 6)
    history += answers(llm, [request(history, "a")])[0]
    gone = ((10, 30), (len(history) - 6, len(history) - 3))
    llm.prune("a", gone)
    edit = Edit(len(history), gone)
    prunes = [(len(history) - 1, each) for each in gone]
    history += tokens_of(5, 7)
    for chain in ("a", "b"):  # b has no KV: it replays the prune
        got = answers(llm, [request(history, chain, (edit,))])[0]
        want: list[int] = []
        for _ in got:
            want.append(int(masked_logits(twin(family, "float64"), history + want, prunes)[-1].argmax()))
        assert got == want


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_that_full_retention_would_not_fit_in(family: str, model: Any) -> None:
    """Pages behind the window are freed and used again, and nothing changes: 220 tokens, batched, chunked, turn after turn."""
    loaded = model(family, "float64")
    every = sum(group.token_bytes for group in loaded.groups(4))
    near = sum(group.token_bytes for group in loaded.groups(4) if group.window)
    prompts = [tokens_of(200, 30), tokens_of(120, 31)]
    for reuse in ("radix", "chain"):
        small = engine_of(model, family, reuse, memory=every * 430 - near * 200, step_tokens=16)
        histories = [list(prompt) for prompt in prompts]
        for turn in range(3):
            asked = [request(ids, f"c{index}") for index, ids in enumerate(histories)]
            made = answers(small, asked)
            fresh = engine_of(model, family, "chain")
            assert made == [answers(fresh, [request(ids)])[0] for ids in histories]
            histories = [ids + more + tokens_of(2, turn) for ids, more in zip(histories, made, strict=True)]
        assert sum(len(ids) for ids in histories) > 400
        small.rollback("c0", 212)
        assert answers(small, [request(histories[0][:212] + [5], "c0")]) == answers(
            engine_of(model, family, "chain"), [request(histories[0][:212] + [5])]
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, model: Any, host: Any, checkpoint: Any) -> None:
    from transformers import AutoModelForCausalLM

    tokens, kind = tokens_of(50, 4), getattr(torch, dtype)
    rough = load_model(checkpoint("gemma3"), dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint("gemma3"), dtype=kind).eval()
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        assert torch.equal(rough.model.embed(ids), theirs.model.embed_tokens(ids)), "the scale is rounded as theirs"
        scores = theirs(ids[None]).logits[0].float()
    mine = host(rough, 16)
    got = torch.cat([mine.logits(0, tokens[:30]), *(mine.logits(0, [token]) for token in tokens[30:])])
    want = host(model("gemma3", "float32"), 16).logits(0, tokens)
    limit = 0.05 * want.abs().max()
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < limit
    assert (scores - want).abs().max() < limit, "theirs strays as far"
