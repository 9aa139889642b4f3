"""Every method that ships keeps the contract."""

from __future__ import annotations

import pytest

from agentkv import methods
from agentkv.check.kit import check
from agentkv.check.models import TINY, opened, tiny
from agentkv.check.subject import ready, subjects
from agentkv.engine.loader import LoadedModel


def failures(name: str, loaded: LoadedModel) -> dict[str, str]:
    (method,) = subjects(name, {})
    with ready(method, loaded) as mine:
        return {each.check: each.detail for each in check(mine, loaded) if each.result == "failed"}


@pytest.mark.parametrize("name", methods.NAMES)
def test_on_a_tiny_qwen3(name: str) -> None:
    assert failures(name, tiny(TINY[0])) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.NAMES)
@pytest.mark.parametrize("model", ["llama", "micro"])
def test_on_a_tiny_llama_and_on_micro(name: str, model: str) -> None:
    assert failures(name, tiny(TINY[1]) if model == "llama" else opened("micro")[0]) == {}
