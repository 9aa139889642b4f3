"""Masks: a fixed string whatever the sampling, exact distributions, and faults that stay with their own sequence."""

from __future__ import annotations

from array import array
from typing import Any

import numpy
import pytest
import torch

from agentkv import methods
from agentkv.engine.core import EngineConfig, Request, RowWork
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sampler import sample
from agentkv.types import Sampling

VOCAB = 97


def as_bytes(ids: set[int], vocab: int = VOCAB) -> Any:
    return bytes(each in ids for each in range(vocab))


def as_bools(ids: set[int], vocab: int = VOCAB) -> Any:
    return numpy.isin(numpy.arange(vocab), list(ids))


def as_words(ids: set[int], vocab: int = VOCAB) -> Any:
    words = [0] * -(-vocab // 32)
    for each in ids:
        words[each // 32] |= 1 << (each % 32)
    return array("I", words)


FORMS = [as_bytes, as_bools, as_words]


def engine(model: Any) -> LLM:
    loaded = model("llama", "float32")
    config = EngineConfig(memory=60 * loaded.groups(4)[0].stripe_bytes, window=100, page_size=4, max_rows=4, step_tokens=16)
    return LLM(config, ModelRunner(loaded, config, methods.get("dense")))


def run(llm: LLM) -> None:
    while llm.has_work:
        llm.step()
        llm.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_forces_a_fixed_string_and_leaves_its_neighbours_alone(model: Any, form: Any) -> None:
    want = [5, 96, 0, 31, 32, 64, 5]
    llm = engine(model)
    alone = llm.add(Request([8, 1, 4], Sampling(max_tokens=9)))
    run(llm)
    llm.abort(alone)
    asked: list[list[int]] = []

    def mask(made: list[int]) -> Any:
        asked.append(made)
        return form({want[len(made)]})

    hot = Sampling(max_tokens=7, temperature=2.0, top_p=0.5, frequency_penalty=2.0, logit_bias={5: -100}, logprobs=True)
    forced = [llm.add(Request([3, 9], sampling, mask=mask)) for sampling in (Sampling(max_tokens=7), hot)]
    free = llm.add(Request([8, 1, 4], Sampling(max_tokens=9)))
    run(llm)
    assert [seq.token_ids[2:] for seq in forced] == [want, want]
    assert free.token_ids == alone.token_ids
    assert sorted(map(len, asked)) == sorted([*range(7)] * 2)


def test_draws_under_a_mask_follow_the_rest_of_the_distribution() -> None:
    """Chi-square over 20,000 draws of 3 of 6 outcomes; 13.8 is the 0.1 % point for 2 degrees of freedom."""
    logits, count = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5]), 20_000
    mask = memoryview(as_bytes({0, 2, 4}, 6))
    works = [RowWork(0, [0], 0, 0, True, Sampling(temperature=1.0), 5, step, allowed=lambda: mask) for step in range(count)]
    seen = torch.bincount(sample(logits.expand(count, -1), works), minlength=6).double()
    expected = logits.double()[[0, 2, 4]].softmax(0) * count
    assert seen[[1, 3, 5]].sum() == 0
    assert float(((seen[[0, 2, 4]] - expected) ** 2 / expected).sum()) < 13.8


def fail(made: list[int]) -> Any:
    raise RuntimeError("no such state")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (fail, "no such state"),
        (lambda made: as_bytes(set()), "allows no token"),
        (lambda made: as_words(set()), "allows no token"),
        (lambda made: as_bytes({1}, 96), "no mask of 97 tokens"),
        (lambda made: None, "TypeError"),
        (lambda made: as_bytes({2}) if len(made) < 3 else b"", "no mask of 97 tokens"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_fails_ends_its_own_sequence_alone(model: Any, mask: Any, said: str, temperature: float) -> None:
    llm = engine(model)
    bad = llm.add(Request([3, 9], Sampling(max_tokens=7, temperature=temperature, logprobs=True), mask=mask))
    good = llm.add(Request([8, 1, 4], Sampling(max_tokens=9)))
    run(llm)
    assert said in str(bad.fault)
    assert bad.state is None
    assert good.fault is None
    assert good.num_generated == 9
    llm.abort(good)
    llm.check()
