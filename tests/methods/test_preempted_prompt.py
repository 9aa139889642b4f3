"""A prompt that loses its row amid its last queries is sealed as if it had not: they are forwarded again."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv import methods
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling

PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(84)]


def drawn(folder: Path, name: str, disturbed_after: int | None, turns: int) -> list[list[int]]:
    """What a chain of turns draws in a row that a better claim takes after so many steps of the last prompt."""
    config = EngineConfig(8 << 20, 400, page_size=4, max_rows=1, step_tokens=20)
    runner = ModelRunner(load_model(folder, dtype="float64"), config, methods.get(name, capacity=40, window=8))
    llm = LLM(config, runner)
    ids, made = list(PROMPT), []
    for turn in range(turns):
        seq = llm.add(Request(ids, Sampling(max_tokens=6, temperature=0), chain_id="c"))
        steps = 0
        while llm.has_work:
            if steps == disturbed_after and turn == turns - 1:
                llm.add(Request([1, 2, 3], Sampling(max_tokens=2, temperature=0), priority=10, chain_id="other"))
            llm.step()
            llm.check()
            steps += 1
        assert seq.preemptions == (disturbed_after is not None and turn == turns - 1)
        made.append(seq.token_ids[len(ids) :])
        llm.commit(seq, made[-1])
        llm.check()
        ids = [*seq.token_ids, *PROMPT[turn : turn + 47]]
    return made


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
@pytest.mark.parametrize(("turns", "after"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_who_loses_its_row_keeps_what_it_would_have_kept(folder: Path, name: str, turns: int, after: int) -> None:
    assert drawn(folder, name, after, turns) == drawn(folder, name, None, turns)
