"""Log-probabilities against log_softmax of transformers' logits, and the bytes of tokens against the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv.engine.core import EngineConfig, History, Request, RowWork
from agentkv.engine.llm import LLM
from agentkv.engine.logprobs import score
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling


def work(**options: Any) -> RowWork:
    return RowWork(0, [0], 0, 0, True, Sampling(**options), 0, 0)


def test_equal_logits_stand_in_order_of_id_and_rows_that_do_not_ask_have_none() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]]).expand(3, 4)
    works = [work(), work(logprobs=True, top_logprobs=20), work(logprobs=True)]
    score(logits, torch.tensor([0, 3, 1]), works).tell()
    want = logits[0].double().log_softmax(0).tolist()
    assert works[0].score is None
    assert works[1].score is not None
    assert works[1].score.logprob == pytest.approx(want[3], abs=1e-12)
    assert [token for token, _ in works[1].score.top] == [1, 2, 0, 3]
    assert [value for _, value in works[1].score.top] == pytest.approx([want[1], want[2], want[0], want[3]], abs=1e-12)
    assert works[2].score is not None
    assert works[2].score.top == ()
    assert works[2].score.logprob == pytest.approx(want[1], abs=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.7, "seed": 4, "top_k": 9}, {"frequency_penalty": 2.0, "logit_bias": {3: 9.0}}]
)
def test_an_engine_tells_what_transformers_computes(model: Any, twin: Any, options: dict[str, Any]) -> None:
    """Raw: whatever the sampling does to the draw. A neighbour that does not ask gets nothing."""
    from agentkv import methods

    loaded = model("qwen3", "float64")
    (group,) = loaded.groups(4)
    config = EngineConfig(memory=40 * group.stripe_bytes, window=100, page_size=4, max_rows=4, step_tokens=16)
    llm = LLM(config, ModelRunner(loaded, config, methods.get("dense")))
    prompt = [5, 9, 9, 61, 3]
    seq = llm.add(Request(prompt, Sampling(max_tokens=12, logprobs=True, top_logprobs=3, **options)))
    other = llm.add(Request([7, 7], Sampling(max_tokens=15)))
    scores = []
    while llm.has_work:
        for output in llm.step():
            assert len(output.scores) == (len(output.token_ids) if output.seq is seq else 0)
            scores += output.scores
    with torch.inference_mode():
        want = twin("qwen3", "float64")(torch.tensor([seq.token_ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    assert len(scores) == 12
    for line, token, got in zip(want, seq.token_ids[len(prompt) :], scores, strict=True):
        assert got.logprob == pytest.approx(float(line[token]), abs=1e-9)
        values, ids = line.topk(3)
        assert [each for each, _ in got.top] == ids.tolist()
        assert [value for _, value in got.top] == pytest.approx(values.tolist(), abs=1e-9)
    assert other.num_generated == 15


def test_scores_do_not_depend_on_penalties_or_neighbours() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, 5, 6, 7])
    alone = work(logprobs=True, top_logprobs=5)
    score(logits[2:3], tokens[2:3], [alone]).tell()
    altered = work(logprobs=True, top_logprobs=5, presence_penalty=2.0, logit_bias={6: -50}, temperature=0.3)
    altered.history = History([1, 6], 1)
    works = [work(), work(logprobs=True, top_logprobs=20), altered, work(logprobs=True)]
    score(logits, tokens, works).tell()
    assert altered.score == alone.score
