"""The kit: methods that keep the contract pass; for each check, one broken in just that way fails it, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken import BROKEN, Impatient
from torch import Tensor
from toys import Edges, Newest

from agentkv import methods
from agentkv.check.kit import CHECKS, check
from agentkv.check.models import TINY, opened, tiny
from agentkv.check.outcome import Failed, Outcome
from agentkv.check.scene import Case
from agentkv.check.subject import configured
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.view import DeviceBatch

SOUND: dict[str, type[SparseMethod]] = {"edges": Edges, "newest": Newest}
SKIPPED = {"edges": {"append", "uneven"}, "newest": {"append", "counts", "uneven"}}


@pytest.fixture(scope="module", params=TINY)
def family(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return tiny(TINY[0], sliding=(None, None))


def made(kind: type[SparseMethod], **options: Any) -> SparseMethod:
    return configured(kind, kind.__name__, options)


def failures(outcomes: list[Outcome]) -> dict[str, str]:
    return {each.check: each.detail for each in outcomes if each.result == "failed"}


@pytest.mark.parametrize("name", SOUND)
def test_a_method_that_keeps_the_contract_passes(name: str, family: LoadedModel) -> None:
    outcomes = check(made(SOUND[name]), family)
    assert failures(outcomes) == {}
    assert {each.check for each in outcomes if each.result == "skipped"} == SKIPPED[name]


def test_windows_of_the_model_are_taken_into_account() -> None:
    outcomes = check(methods.get("dense"), tiny(TINY[0], sliding=(24, None, 24)))
    assert failures(outcomes) == {}
    assert {each.check for each in outcomes if each.result == "skipped"} == {"counts", "memory", "uneven"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_on_micro_too(name: str) -> None:
    (micro,) = opened("micro")
    assert failures(check(made(SOUND[name]), micro)) == {}


def test_each_check_has_a_method_that_breaks_it() -> None:
    assert BROKEN.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", BROKEN)
def test_a_method_broken_in_one_way_fails_that_check_and_no_other(name: str, small: LoadedModel) -> None:
    assert failures(check(made(BROKEN[name]), small)).keys() == {name}


@pytest.mark.parametrize(
    "way", ["item", "tolist", "numpy", "nonzero", "where", "bool", "int", "mask", "unique", "repeat", "number"]
)
def test_every_way_to_wait_is_seen(way: str, small: LoadedModel) -> None:
    with pytest.raises(Exception, match="waits for the device"):
        CHECKS["waits"](Case(Impatient(way), small))


def test_what_does_not_wait_passes(small: LoadedModel) -> None:
    assert CHECKS["waits"](Case(Impatient("sized"), small))


class Frozen(SparseMethod):
    """The same operations in every step, on lengths that the host gave when they were captured."""

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        if batch.prefill:
            return out
        scale = [1 + 0.1 * (length % 5) for length in batch.table_of(layer).host_lens]
        parts = zip(batch.rows, scale, strict=True)
        return torch.cat([out[span.start : span.end] * each for span, each in parts])


class Known(SparseMethod):
    """The same where prompts are read."""

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        return out * (1 + 0.1 * (max(batch.table_of(layer).host_lens) % 5)) if batch.prefill else out


@pytest.mark.parametrize("method", [Frozen(), Known()])
def test_a_length_of_the_host_in_a_captured_step_is_seen(method: SparseMethod, small: LoadedModel) -> None:
    with pytest.raises(Failed, match="replayed from a graph"):
        CHECKS["graph"](Case(method, small))


def test_a_step_that_cannot_be_captured_is_seen(small: LoadedModel) -> None:
    class Safe(Impatient):
        graph_safe = True

    with pytest.raises(Failed, match="cannot be captured: Failed: item of a tensor waits"):
        CHECKS["graph"](Case(Safe(), small))


class Silent(Newest):
    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        return tokens


def test_who_selects_says_how_much(small: LoadedModel) -> None:
    with pytest.raises(Exception, match="declares no budget"):
        CHECKS["reads"](Case(Silent(), small))


def test_options_that_were_given_stay() -> None:
    assert made(Edges, first=7) == Edges(budget=50, first=7)
    assert made(Edges, budget=3, first=2) == Edges(budget=3, first=2)
    assert made(SparseMethod) == SparseMethod()
