"""Retrieval: four tool results of records, then a question for one record of each, turn by turn, as in `micro`'s drills."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentkv.errors import BadRequest
from agentkv.runtime import Runtime
from agentkv.types import ToolCall
from agentkv.world.dialect import NATIVE
from agentkv.world.task import EVALUATION_SEEDS
from agentkv.world.words import Fact, Names, below, fill

FILES = 4
BODY = 1850
"""Bytes of each result: with head and calls about 8,150 tokens, of one byte each."""
LENGTH = 8192
"""Nominal length of a text in tokens, what budgets are shares of."""
FIRST = 20_000
"""The first seed."""
KINDS = {
    "single": "the first question of a session",
    "second": "the second question, about another of the four results, asked after the first answer",
    "multi": "all four questions of a session, one after the other, a turn each",
}


@dataclass(frozen=True)
class Reading:
    """What a session holds and is asked. files: name and body, in order; asked: facts, each of another file."""

    seed: int
    files: tuple[tuple[str, str], ...]
    asked: tuple[Fact, ...]


def reading(seed: int) -> Reading:
    """The text and the questions of an evaluation seed. Every fourth seed asks first about the same place of four."""
    if not 0 <= seed < EVALUATION_SEEDS:
        raise BadRequest(f"seed {seed}: evaluation seeds are 0 to {EVALUATION_SEEDS - 1}", param="seeds")
    rng = random.Random(f"retrieval/{seed}")
    names = Names(rng)
    files = [names.fresh() for _ in range(FILES)]
    bodies, asked = [], []
    for _ in files:
        lines, facts = fill(names, BODY)
        bodies.append("\n".join(lines))
        asked.append(facts[below(rng, len(facts))])
    rest = [index for index in range(FILES) if index != seed % FILES]
    rng.shuffle(rest)
    return Reading(seed, tuple(zip(files, bodies, strict=True)), tuple(asked[index] for index in (seed % FILES, *rest)))


def ask(runtime: Runtime, given: Reading) -> dict[str, Any]:
    """The answers of one session, greedily: `seed`, `tokens` of the first prompt, `answers`, `right` (the whole value, and
    nothing else)."""
    session = runtime.session(system=NATIVE.system, tools=NATIVE.tools)
    try:
        session.add_user("Read " + ", ".join(f"{name}.txt" for name, _ in given.files) + ".")
        for name, body in given.files:
            made = NATIVE.call(f"cat {name}.txt")["function"]
            session.add_assistant("", [ToolCall(id=f"call_{name}", name=made["name"], arguments=made["arguments"])])
            session.add_tool_result(f"call_{name}", body)
        session.add_assistant("done")
        answers, tokens = [], 0
        for fact in given.asked:
            session.add_user(f"code of {fact.name}?")
            turn = session.generate(temperature=0.0, max_tokens=12)
            answers.append(turn.text)
            tokens = tokens or turn.usage.prompt_tokens
    finally:
        session.close()
    right = [answer == fact.value for answer, fact in zip(answers, given.asked, strict=True)]
    return {"seed": given.seed, "tokens": tokens, "answers": answers, "right": right}


def ask_all(runtime: Runtime, seeds: Sequence[int], concurrency: int = 1) -> dict[str, Any]:
    """`results` of `ask`, in the order of the seeds, and `seconds`. What a session raises is raised when all have ended."""
    began = time.monotonic()
    given = [reading(seed) for seed in seeds]
    with ThreadPoolExecutor(max(1, concurrency)) as pool:
        results = list(pool.map(lambda one: ask(runtime, one), given))
    return {"results": results, "seconds": round(time.monotonic() - began, 1)}


def verdict(result: dict[str, Any], kind: str) -> bool:
    """Whether a session counts as right in a kind."""
    right: list[bool] = result["right"]
    return all(right) if kind == "multi" else right[("single", "second").index(kind)]
