"""The bundled model acts in real worlds through transformers' own generate."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import agentkv
from agentkv.world import masked_play, micro_model
from agentkv.world.dialect import DIALECTS
from agentkv.world.env import World
from agentkv.world.reference_play import answer_of, call_of, play_with_transformers
from agentkv.world.task import FAMILIES, make_task

FOLDER = Path(agentkv.__file__).parent / "data" / "micro"


@pytest.mark.parametrize("seed", [10, 12])
def test_micro_solves(seed):
    assert play_with_transformers(FOLDER, seed, max_bytes=2600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 38))
def test_micro_solves_more(seed):
    family, dialect = list(FAMILIES)[seed % 6], list(DIALECTS.values())[seed // 6 % 3]
    assert play_with_transformers(FOLDER, seed, family=family, dialect=dialect)


def test_calls_are_read_and_run():
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert call_of(text) == ("bash", {"command": "ls"})
    with World(make_task(1)) as world:
        assert answer_of(text, world) == world.bash("ls")
        for bad in (
            "done",
            "<tool_call>\n{]\n</tool_call>",
            text.replace('"ls"', "3"),
            text.replace("command", "c"),
            text.replace("bash", "sh"),
            text.replace('{"command": "ls"}', "[1]"),
        ):
            assert answer_of(bad, world) is None


def test_attention_may_be_laid_out_as_on_a_gpu(monkeypatch):
    """There its output is contiguous with heads behind tokens; the next token does not depend on that."""
    model, text = micro_model.load(FOLDER), [list(b"code of kqz?"), list(b"kqz 4117")]
    plain = masked_play.Player(model, 2, 64, None).feed(text)
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *of: attend(*of).transpose(1, 2).contiguous().transpose(1, 2))
    assert not F.scaled_dot_product_attention(*[torch.ones(2, 2, 3, 4)] * 3).is_contiguous()
    assert masked_play.Player(model, 2, 64, None).feed(text) == plain


def test_a_short_window_hides_what_the_whole_one_finds():
    """Played by the training module with masks: all solve the task, none with the last 512 tokens and the task alone."""
    with ExitStack() as stack:
        tasks = [make_task(seed, "once", max_bytes=2200) for seed in (40, 41)]
        worlds = [stack.enter_context(World(task)) for task in tasks]
        assert masked_play.play(FOLDER, worlds, None) == [True, True]
    with ExitStack() as stack:
        worlds = [stack.enter_context(World(task)) for task in tasks]
        assert masked_play.play(FOLDER, worlds, 512, most_turns=9) == [False, False]
