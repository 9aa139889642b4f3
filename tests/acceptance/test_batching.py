"""Invariant 2 on the real model: batched = alone, cache on = cache off, whatever the page size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import make_task

SEEDS = (3, 7, 8, 12, 16)
TURNS = 3


def play(runtime: Runtime, seed: int) -> list[Any]:
    """What the model says in its first turns of a task, a fork's answer included."""
    with World(make_task(seed)) as world:
        session = runtime.session(system=NATIVE.system, tools=[world.bash])
        session.add_user(world.task.prompt)
        for _ in range(TURNS):
            turn = session.generate(max_tokens=80)
            for call in turn.tool_calls:
                session.add_tool_result(call.id, world.bash(**call.arguments) if "command" in call.arguments else "?")
        fork = session.fork()
        fork.generate(max_tokens=20)
        said = [(message["role"], message["content"]) for message in fork.messages()]
        calls = [[call["function"]["arguments"] for call in message.get("tool_calls", [])] for message in fork.messages()]
        fork.close()
        session.close()
        return [said, calls]


@pytest.mark.parametrize("page_size", [16, 128])
def test_batched_is_alone(page_size: int) -> None:
    options: dict[str, Any] = {"db": None, "memory": "256MiB", "page_size": page_size}
    alone = []
    for seed in SEEDS:
        with Runtime("micro", **options) as runtime:  # nothing cached from the seed before
            alone.append(play(runtime, seed))
    with Runtime("micro", **options) as runtime, ThreadPoolExecutor(len(SEEDS)) as pool:
        together = list(pool.map(lambda seed: play(runtime, seed), SEEDS))
        again = play(runtime, SEEDS[0])  # now the head at least is in the prefix cache
        runtime.check()
    assert together == alone
    assert again == alone[0]
