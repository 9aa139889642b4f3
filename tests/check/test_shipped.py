"""Every method that ships keeps the contract; those that are prepared for a model first have tests of their own."""

from __future__ import annotations

import pytest

from agentkv import methods
from agentkv.check.kit import check
from agentkv.check.models import TINY, opened, tiny
from agentkv.check.subject import subjects
from agentkv.engine.loader import LoadedModel

NAMES = [name for name in methods.NAMES if methods.resolve(name).preparation is None]


def failures(name: str, loaded: LoadedModel) -> dict[str, str]:
    (method,) = subjects(name, {})
    return {each.check: each.detail for each in check(method, loaded) if each.result == "failed"}


@pytest.mark.parametrize("name", NAMES)
def test_on_a_tiny_qwen3(name: str) -> None:
    assert failures(name, tiny(TINY[0])) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["llama", "micro"])
def test_on_a_tiny_llama_and_on_micro(name: str, model: str) -> None:
    assert failures(name, tiny(TINY[1]) if model == "llama" else opened("micro")[0]) == {}
