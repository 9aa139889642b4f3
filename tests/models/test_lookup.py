"""Prompt lookup with a real model: the tokens, and what is said of them, are those of an engine that does not guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv import methods
from agentkv.engine.core import EngineConfig, Request, StepOutput
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.view import RowTable
from agentkv.types import Sampling

COPY = [5, 9, 61, 3, 17, 40, 8, 2, 33] * 5
PROMPTS = [COPY, COPY[3:20], [7] * 12, [*range(40), *range(20)], [1]]


def answers(loaded: Any, options: list[dict[str, Any]], lookup: int, page_size: int = 4) -> tuple[list[Any], LLM]:
    """(ids, scores) of each prompt, all of them in one engine at once."""
    memory = 200 * sum(group.stripe_bytes for group in loaded.groups(page_size))
    config = EngineConfig(memory, window=150, page_size=page_size, max_rows=5, step_tokens=64, lookup=lookup)
    llm = LLM(config, ModelRunner(loaded, config, methods.get("dense")))
    seqs = [llm.add(Request(prompt, Sampling(**each))) for prompt, each in zip(PROMPTS, options, strict=True)]
    made: dict[int, list[StepOutput]] = {seq.seq_id: [] for seq in seqs}
    while llm.has_work:
        for output in llm.step():
            assert len(output.scores) == (len(output.token_ids) if output.seq.request.sampling.logprobs else 0)
            made[output.seq.seq_id].append(output)
        llm.check()
    return [(seq.token_ids, [score for each in made[seq.seq_id] for score in each.scores]) for seq in seqs], llm


@pytest.mark.parametrize(
    ("family", "dtype", "page_size"),
    [
        ("llama", "float64", 4),
        ("qwen3", "float64", 16),
        ("qwen3", "float32", 4),
        ("gemma3", "float64", 4),
        ("gemma3", "float32", 4),
    ],
)
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logprobs": True, "top_logprobs": 3, "logit_bias": {4: 2.0}},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11},
        {"temperature": 0.4, "top_k": 5, "seed": 3, "logprobs": True},
        {"temperature": 0.5, "seed": 3, "frequency_penalty": 0.5},
    ],
)
def test_an_engine_that_guesses_says_the_same(
    model: Any, family: str, dtype: str, sampling: dict[str, Any], page_size: int
) -> None:
    """Only the shape of the products differs (invariant 2: equal but where two logits are as good as equal; none is here)."""
    loaded = model(family, dtype)
    options = [{"max_tokens": 60, **sampling}] * 4 + [{"max_tokens": 40}]  # a neighbour that asks for other things
    want, _ = answers(loaded, options, 0, page_size)
    got, llm = answers(loaded, options, 8, page_size)
    for (ids, scores), (want_ids, want_scores) in zip(got, want, strict=True):
        assert ids == want_ids
        near = 1e-9 if dtype == "float64" else 2e-5
        assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in want_scores], abs=near)
        assert [[token for token, _ in score.top] for score in scores] == [[token for token, _ in s.top] for s in want_scores]
    assert llm.decoding.drafted >= llm.decoding.accepted > 0
    if family != "gemma3" or "top_k" in sampling:  # a tiny greedy Gemma repeats itself: every guess is right
        assert llm.decoding.drafted > llm.decoding.accepted


def test_a_line_for_each_query() -> None:
    """What the GPU's kernel reads, and torch's: the last slots of a row, one length each, and where each begins to see."""
    rows, lens = torch.tensor([4, 0, 2]), torch.tensor([10, 7, 1], dtype=torch.int32)
    starts = ((5, 6, 7), (2, 3), (0,))
    flat = torch.tensor([5, 6, 7, 2, 3, 0], dtype=torch.int32)
    table = RowTable(torch.zeros(5, 3, dtype=torch.int32), rows, lens, (4, 0, 2), (10, 7, 1), 4, flat, starts)
    got = table.by_query((3, 2, 1))
    assert got.rows.tolist() == list(got.host_rows) == [4, 4, 4, 0, 0, 2]
    assert got.lens.tolist() == list(got.host_lens) == [8, 9, 10, 6, 7, 1]
    assert got.lens.dtype == torch.int32
    assert got.first_slots == (5, 6, 7, 2, 3, 0)
    assert table.by_query((3, 2, 1)) is got
    assert table.by_query((1, 1, 1)) is table
