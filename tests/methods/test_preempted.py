"""A sequence that loses its KV while it answers goes on as if nothing had been: what a step evicted is evicted again."""

from __future__ import annotations

import pytest
from played import engine_of
from subjects import tiny

from agentkv.engine.core import Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.sparse import SparseMethod
from agentkv.methods.h2o import H2O
from agentkv.methods.kvzip import KVzip
from agentkv.types import Sampling

RIVALS = {1: 20, 9: 30, 17: 30, 31: 30}
"""Step -> tokens of the prompt that comes then."""
PROMPT = [(7 * i * i + 3 * i + 11) % 251 for i in range(30)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny(folder, "qwen3")
    return load_model(folder, dtype="float64")


def play(llm: LLM, rivals: dict[int, Request]) -> tuple[list[int], int]:
    """The answer to the prompt, and how often it was preempted; at each step of `rivals` that request comes."""
    seq = llm.add(Request(PROMPT, Sampling(max_tokens=30)))
    for number in range(400):
        if number in rivals:
            llm.add(rivals[number])
        for output in llm.step():
            if output.finished:
                llm.abort(output.seq)
        llm.check()
        if seq.finish_reason is not None:
            assert seq.fault is None, seq.fault
            return seq.token_ids[len(PROMPT) :], seq.preemptions
    raise AssertionError("no progress")


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        (H2O(6, 5, 4), 100_000),
        (H2O(6, 5, 40), 120_000),
        (H2O(0.2, 0.1, 7), 100_000),
        (H2O(6, 5, 4, "interval"), 100_000),
        (KVzip(0.4, chunk=12), 120_000),
        (KVzip(0.4, chunk=12, scope="token"), 95_000),
    ],
)
@pytest.mark.parametrize("warm", [0, 1 << 20])
def test_the_answer_is_that_of_an_undisturbed_run(loaded: LoadedModel, method: SparseMethod, memory: int, warm: int) -> None:
    want, _ = play(engine_of(loaded, method), {})
    llm = engine_of(loaded, method, memory=memory, warm_memory=warm, step_tokens=16)
    rivals = {at: Request([at] * size, Sampling(max_tokens=2), priority=1) for at, size in RIVALS.items()}
    made, preemptions = play(llm, rivals)
    assert preemptions >= 2
    assert llm.stats().restores if warm else llm.stats().tally.recomputed
    assert made == want
