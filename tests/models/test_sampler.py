"""Sampling: limits that hold exactly, draws that follow the distribution and know nothing of their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv.engine.core import RowWork
from agentkv.engine.sampler import sample
from agentkv.types import Sampling

KNOWN = [918, 158, 93, 257]


def ask(seed: int = 0, step: int = 0, **options: Any) -> RowWork:
    return RowWork(0, [0], 0, 0, True, Sampling(**options), seed, step)


def draws(logits: torch.Tensor, count: int, **options: Any) -> list[int]:
    works = [ask(seed=5, step=step, **options) for step in range(count)]
    return sample(logits.expand(count, -1), works).tolist()


def test_temperature_zero_takes_the_first_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 1.0, 0.0, 2.0]])
    assert sample(logits, [ask(), ask(top_k=3, top_p=0.1)]).tolist() == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    """Chi-square over 20,000 draws of 6 outcomes; 20.5 is the 0.1 % point for 5 degrees of freedom."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5])
    for temperature in (1.0, 2.5):
        count = 20_000
        seen = torch.bincount(torch.tensor(draws(logits, count, temperature=temperature)), minlength=6).double()
        expected = (logits.double() / temperature).softmax(0) * count
        assert float(((seen - expected) ** 2 / expected).sum()) < 20.5


def test_seeds_are_independent_streams() -> None:
    """The same check over seeds at one step, and no equal pair of neighbouring streams."""
    count = 20_000
    logits = torch.zeros(count, 7)
    first = sample(logits, [ask(seed=seed, temperature=1.0) for seed in range(count)])
    second = sample(logits, [ask(seed=seed, step=1, temperature=1.0) for seed in range(count)])
    seen = torch.bincount(first, minlength=7).double()
    assert float(((seen - count / 7) ** 2 / (count / 7)).sum()) < 22.5
    pairs = torch.bincount(first * 7 + second, minlength=49).double()
    assert float(((pairs - count / 49) ** 2 / (count / 49)).sum()) < 84.0


def test_top_k_and_top_p_keep_exactly_their_sets() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(logits, 300, temperature=1.0)) == {0, 1, 2, 3}
    assert set(draws(logits, 300, temperature=1.0, top_k=2)) == {0, 1}
    assert set(draws(logits, 300, temperature=1.0, top_k=99)) == {0, 1, 2, 3}
    assert set(draws(logits, 300, temperature=1.0, top_p=0.6)) == {0, 1}
    assert set(draws(logits, 300, temperature=1.0, top_p=0.79)) == {0, 1}
    assert set(draws(logits, 300, temperature=1.0, top_p=0.81)) == {0, 1, 2}
    assert set(draws(logits, 100, temperature=1.0, top_p=0.01)) == {0}
    # top_p counts within what top_k kept: 0.5 / 0.8 already reaches 0.6
    assert set(draws(logits, 300, temperature=1.0, top_k=2, top_p=0.6)) == {0}


def test_equal_logits_at_the_limit_stand_in_order_of_id() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0])
    assert set(draws(logits, 300, temperature=1.0, top_k=3)) == {0, 1, 2}


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 9}, {"temperature": 1.0, "top_p": 0.7}]
)
def test_a_draw_does_not_depend_on_its_neighbours(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    mine = ask(seed=2**63 + 11, step=7, **options)
    others = [ask(seed=1, temperature=2.0, top_p=0.2), ask(), ask(seed=9, temperature=0.1, top_k=1), ask(top_k=4), ask(seed=3)]
    alone = int(sample(logits[:1], [mine]))
    for place in range(6):
        works = [*others[:place], mine, *others[place:]]
        rows = torch.cat([logits[1 : place + 1], logits[:1], logits[place + 1 :]])
        assert int(sample(rows, works)[place]) == alone


def test_seed_and_step_fix_the_draw_across_runs() -> None:
    """Known values: a change of the stream would change what a stored seed reproduces."""
    logits = torch.zeros(1, 1000)
    got = [
        int(sample(logits, [ask(seed=seed, step=step, temperature=1.0)])) for seed, step in ((0, 0), (0, 1), (1, 0), (-1, 3))
    ]
    assert got == KNOWN
    assert len(set(got)) == 4
