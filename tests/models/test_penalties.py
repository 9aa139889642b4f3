"""min_p, penalties and biases against transformers' processors, against closed forms, and against their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentkv.engine.core import History, RowWork
from agentkv.engine.penalties import altered
from agentkv.engine.sampler import sample
from agentkv.errors import BadRequest
from agentkv.types import Sampling

VOCAB = 40


def ask(prompt: list[int] = [], made: list[int] = [], seed: int = 0, step: int = 0, **options: Any) -> RowWork:  # noqa: B006
    history = History([*prompt, *made], len(prompt))
    return RowWork(0, [0], 0, 0, True, Sampling(**options), seed, step, history=history)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def after(logits: torch.Tensor, work: RowWork) -> torch.Tensor:
    return altered(logits.double().clone(), [work])


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    logits = some_logits(1).double()
    prompt, made = [1, 5, 5, 7], [5, 9]
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + made]), logits.clone())
    got = after(logits, ask(prompt, made, repetition_penalty=penalty))
    assert (got - want).abs().max() < 1e-12


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    logits = some_logits(1).double()
    got = after(logits, ask([3, 3, 4], [3, 8, 8, 8], presence_penalty=0.5, frequency_penalty=-1.25))
    want = logits.clone()
    want[0, 3] -= 0.5 - 1.25
    want[0, 8] -= 0.5 - 3 * 1.25
    assert torch.equal(got, want)


def test_bias_is_added_after_the_penalties() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]]).double()
    got = after(logits, ask([0, 1], [], repetition_penalty=2.0, logit_bias={0: 3, 2: -100}))
    assert got.tolist() == [[4.0, -2.0, -99.5]]


def test_greedy_takes_the_altered_largest() -> None:
    logits = torch.tensor([[5.0, 4.0, 1.0]]).expand(4, 3)
    works = [
        ask(),
        ask([], [0], presence_penalty=2.0),
        ask([], [0, 0, 1, 1], frequency_penalty=2.0, logit_bias={0: -1}),
        ask([0], [], repetition_penalty=1.5),
    ]
    assert sample(logits, works).tolist() == [0, 1, 2, 1]
    assert sample(logits[:1], [ask(logit_bias={2: 100})]).tolist() == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.15},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 0.7, "top_k": 9, "min_p": 0.05},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3},
        {"top_k": 12, "top_p": 0.9, "repetition_penalty": 0.8},
    ],
)
def test_draws_follow_the_distribution_of_transformers(options: dict[str, Any]) -> None:
    """The set is exactly transformers'; chi-square over 20,000 draws at the 0.1 % point (a bound above the quantile)."""
    options = {"temperature": 1.0} | options
    prompt, made = [2, 6, 6], [7, 11]
    logits = some_logits(1, seed=4)
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options.get("repetition_penalty", 1.0))])
    chain.append(TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k"):
        chain.append(TopKLogitsWarper(options["top_k"]))
    if options.get("top_p"):
        chain.append(TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        chain.append(MinPLogitsWarper(options["min_p"]))
    want = chain(torch.tensor([prompt + made]), logits.double().clone()).softmax(-1)[0]
    count = 20_000
    works = [ask(prompt, made, seed=5, step=step, **options) for step in range(count)]
    seen = torch.bincount(sample(logits.expand(count, -1), works), minlength=VOCAB).double()
    assert seen[want == 0].sum() == 0
    kept = want > 0
    assert kept.sum() > 1
    expected = want[kept] * count
    freedom = int(kept.sum()) - 1
    assert float(((seen[kept] - expected) ** 2 / expected).sum()) < freedom + 4 * (2 * freedom) ** 0.5 + 10


def test_min_p_one_keeps_the_largest_alone() -> None:
    logits = some_logits(1).expand(200, -1)
    got = sample(logits, [ask(seed=1, step=step, temperature=5.0, min_p=1.0) for step in range(200)])
    assert set(got.tolist()) == {int(logits[0].argmax())}


def test_counts_that_grow_equal_counts_made_at_once() -> None:
    """Step after step with one history, as a sequence runs, and from scratch at each length."""
    options: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.2}
    running = ask([1, 2, 3, 2], [], **options)
    assert running.history is not None
    for step in range(12):
        logits = some_logits(1, seed=step)
        token = int(sample(logits, [running]))
        fresh = ask([1, 2, 3, 2], running.history.token_ids[4:], **options)
        assert token == int(sample(logits, [fresh]))
        assert torch.equal(running.history.counts, fresh.history.counts)  # type: ignore[union-attr]
        running.history.token_ids.append(token)
    assert running.history.counted == 15


@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_an_altered_draw_does_not_depend_on_its_neighbours(temperature: float) -> None:
    logits = some_logits(6, seed=8)

    def mine() -> RowWork:
        return ask(
            [1, 2], [3, 3], seed=9, step=2, temperature=temperature, min_p=0.02, presence_penalty=1.0,
            frequency_penalty=0.5, repetition_penalty=1.4, logit_bias={4: 2.5},
        )  # fmt: skip

    others = [
        ask(temperature=1.0, logit_bias={7: -5}),
        ask(),
        ask([1], [2, 2], frequency_penalty=2.0),
        ask(temperature=0.5, min_p=0.5),
        ask(temperature=1.0, top_k=2),
    ]
    alone = int(sample(logits[:1], [mine()]))
    unaltered = ask([1, 2], [3, 3], seed=9, step=2, temperature=temperature)
    want = sample(logits[1:], others).tolist()
    for place in range(6):
        rows = torch.cat([logits[1 : place + 1], logits[:1], logits[place + 1 :]])
        got = sample(rows, [*others[:place], mine(), *others[place:]]).tolist()
        assert got.pop(place) == alone
        assert got == want
    assert int(sample(logits[:1], [unaltered])) in range(VOCAB)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": -0.1}, {"min_p": 1.01}, {"min_p": float("nan")}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
        {"presence_penalty": float("inf")}, {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0},
        {"repetition_penalty": "1"}, {"temperature": True}, {"logit_bias": {1: 101.0}}, {"logit_bias": {1: float("nan")}},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {"a": 1.0}}, {"logit_bias": {2**31: 1.0}}, {"logit_bias": [1]},
        {"logit_bias": {1: "x"}}, {"logit_bias": {True: 1.0}}, {"top_k": 1.5}, {"max_tokens": 2.5},
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as raised:
        Sampling(**options)
    assert raised.value.param == next(iter(options))


def test_bias_keys_may_be_the_text_that_json_has() -> None:
    assert Sampling(logit_bias={"12": 3, 4: -1}).logit_bias == {12: 3.0, 4: -1.0}  # type: ignore[dict-item]
