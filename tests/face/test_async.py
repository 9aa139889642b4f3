"""The async twins over the real engine: the same answers, many sessions at once, cancellation rolls back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentkv import AsyncClient, AsyncRuntime
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import make_task

SEEDS = (6, 12, 18)


async def solve(opened: object, seed: int) -> bool:
    with World(make_task(seed)) as world:
        async with await opened.session(system=NATIVE.system, tools=[world.bash]) as session:  # type: ignore[attr-defined]
            await session.add_user(world.task.prompt)
            turn = await session.run(max_turns=24, prune_after=2)
            assert turn.finish_reason == "stop"
            return world.verdict()


def test_three_agents_at_once_in_process(tmp_path: Path) -> None:
    async def main() -> list[bool]:
        async with await AsyncRuntime.open("micro", memory="256MiB", db=tmp_path / "async.db") as runtime:
            solved = await asyncio.gather(*(solve(runtime, seed) for seed in SEEDS))
            runtime.runtime.check()
            assert len(await runtime.sessions()) == len(SEEDS)
            return solved

    assert asyncio.run(main()) == [True] * len(SEEDS)


def test_over_http(base_url: str) -> None:
    async def main() -> bool:
        async with AsyncClient(base_url) as client:
            return await solve(client, SEEDS[0])

    assert asyncio.run(main())


def test_cancelling_the_task_rolls_the_turn_back() -> None:
    async def main() -> None:
        async with AsyncRuntime("micro", memory="64MiB", db=None) as runtime:
            session = await runtime.session()
            await session.add_user("babble")
            task = asyncio.create_task(session.generate(max_tokens=4000, logit_bias={65: 100}))  # it never ends by itself
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.turns == 0
            assert runtime.runtime.stats()["arena"]["active"] == 0
            assert (await session.generate(max_tokens=4)).number == 1
            runtime.runtime.check()

    asyncio.run(main())
