"""A preempted request draws what it would have drawn: seeds, penalties, masks and logprobs go on where they were."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv import methods
from agentkv.engine.core import EngineConfig, Request, Sequence, TokenScore
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling

PROMPT = [8, 1, 4, 60, 22, 9, 9, 31, 5, 77, 2, 14, 3]
SAMPLINGS = {
    "greedy": Sampling(max_tokens=14),
    "seeded": Sampling(max_tokens=14, temperature=1.3, top_p=0.9, seed=5),
    "penalised": Sampling(max_tokens=14, temperature=0.7, seed=2, repetition_penalty=1.4, frequency_penalty=1.5),
    "scored": Sampling(max_tokens=14, temperature=1.0, seed=9, logprobs=True, top_logprobs=3),
}


def engine(model: Any, pages: int, warm_pages: int = 0) -> LLM:
    loaded = model("qwen3", "float64")
    page = sum(group.stripe_bytes for group in loaded.groups(4))
    config = EngineConfig(
        memory=pages * page, window=100, page_size=4, max_rows=4, step_tokens=8, warm_memory=warm_pages * page
    )
    return LLM(config, ModelRunner(loaded, config, methods.get("dense")))


def odd(ids: list[int]) -> bytes:
    """Ids of the parity that the number of drawn ones has, and 7 never twice in a row: a mask with a memory."""
    return bytes(token % 2 == len(ids) % 2 and not (token == 7 and ids[-1:] == [7]) for token in range(97))


def play(llm: LLM, seq: Sequence, disturb: dict[int, Request]) -> tuple[list[int], list[TokenScore]]:
    """Run it to its end; at each step of `disturb` that request comes. What was drawn, and its scores."""
    ids: list[int] = []
    scores: list[TokenScore] = []
    for number in range(400):
        if number in disturb:
            llm.add(disturb[number])
        for output in llm.step():
            if output.seq is seq:
                ids += output.token_ids
                scores += output.scores
            if output.finished:
                llm.abort(output.seq)
        llm.check()
        if seq.finish_reason is not None:
            return ids, scores
    raise AssertionError("no progress")


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("warm_pages", [0, 20])
def test_tokens_and_scores_are_those_of_an_undisturbed_run(model: Any, name: str, masked: bool, warm_pages: int) -> None:
    asked = Request(PROMPT, SAMPLINGS[name], mask=odd if masked else None)
    calm = engine(model, 30)
    want, told = play(calm, calm.add(asked), {})
    llm = engine(model, 9, warm_pages)
    seq = llm.add(asked)
    rivals = {
        step: Request([step % 97] * size, Sampling(max_tokens=2), priority=1)
        for step, size in {1: 9, 8: 20, 16: 30, 24: 33}.items()  # in the prompt and later: parked, cut, lost
    }
    ids, scores = play(llm, seq, rivals)
    assert seq.preemptions >= 3
    stats = llm.stats()
    assert stats.demotions == stats.restores
    assert (stats.demotions > 0) is (warm_pages > 0)
    assert (seq.num_prefilled_tokens > len(PROMPT)) is (stats.tally.recomputed > 0)
    assert stats.demotions or stats.tally.recomputed
    assert ids == want == seq.token_ids[len(PROMPT) :]
    assert [[token for token, _ in score.top] for score in scores] == [[token for token, _ in score.top] for score in told]
    assert all(abs(a.logprob - b.logprob) < 1e-9 for a, b in zip(scores, told, strict=True))
