"""The bundled model acts in real worlds through transformers' own generate."""

from pathlib import Path

import pytest

import agentkv
from agentkv.world.reference_play import command_of, play_with_transformers

FOLDER = Path(agentkv.__file__).parent / "data" / "micro"


@pytest.mark.parametrize("seed", [10, 12])
def test_micro_solves(seed):
    assert play_with_transformers(FOLDER, seed, max_bytes=2600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 38))
def test_micro_solves_more(seed):
    assert play_with_transformers(FOLDER, seed)


def test_command_of():
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert command_of(text) == "ls"
    for bad in ("done", "<tool_call>\n{]\n</tool_call>", text.replace('"ls"', "3"), text.replace("command", "c")):
        assert command_of(bad) is None
