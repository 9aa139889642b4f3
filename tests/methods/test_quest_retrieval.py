"""Where page selection misses a record of 8K bytes, transformers that reads the same pages misses it too, and says the same.

AGENTKV_QUEST_SEEDS: other sessions, like "20003,20010" or "20000-20199" (all of the retrieval study; those without a miss are
skipped).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from selecting import Twin
from test_quest import by_pages

from agentkv import Runtime
from agentkv.bench.retrieval import ask, reading
from agentkv.engine.core import Request
from agentkv.engine.llm import LLM
from agentkv.runtime_engine import model_path

BUDGET, PAGE = 2048, 16
CHUNK = 256
ASKED = os.environ.get("AGENTKV_QUEST_SEEDS", "20010,20016")


def seeds(text: str) -> list[int]:
    """Of a comma-separated list of numbers and ranges."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]


def answers_of_transformers(requests: list[list[int]], counts: list[int]) -> list[list[int]]:
    """The answers to whole histories, each of which goes on from the one before."""
    twin, held, made = Twin(model_path("micro"), by_pages(BUDGET, PAGE, dense=2)), 0, []
    for ids, count in zip(requests, counts, strict=True):
        new = ids[held:]
        for at in range(0, len(new) - CHUNK, CHUNK):
            twin.turn(new[at : at + CHUNK], count=1)
        rest = (len(new) - 1) // CHUNK * CHUNK
        made.append(twin.turn(new[rest:], count=count).made)
        held = len(ids) + count - 1  # the last token drawn is not forwarded
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds(ASKED))
def test_it_misses_what_transformers_misses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    add = LLM.add

    def noted(llm: LLM, request: Request) -> Any:
        asked.append(list(request.token_ids))
        return add(llm, request)

    monkeypatch.setattr(LLM, "add", noted)
    with Runtime("micro", method=f"quest:budget={BUDGET}", db=None, page_size=PAGE, memory="128MiB") as runtime:
        found = ask(runtime, reading(seed))
        tokenizer = runtime._engine.backend.tokenizer
    if all(found["right"]) and "AGENTKV_QUEST_SEEDS" in os.environ:
        pytest.skip("nothing is missed")
    assert not all(found["right"])
    made = answers_of_transformers(asked, [len(answer) + 1 for answer in found["answers"]])
    assert [tokenizer.decode(ids[:-1]) for ids in made] == found["answers"]
