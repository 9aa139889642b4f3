"""Lets the tests of this folder import their helpers by name, and makes the models that they share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with grouped queries."""
    from subjects import tiny

    made: Path = tmp_path_factory.mktemp(request.param)
    tiny(made, request.param)
    return made
