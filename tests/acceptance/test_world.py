"""`micro` acts in the agent world: ten seeds here, two hundred by `make test-slow`."""

from __future__ import annotations

import pytest

from agentkv.bench.world import run_world
from agentkv.runtime_engine import model_path
from agentkv.world import trajectory
from agentkv.world.dialect import DIALECTS
from agentkv.world.reference_play import play_with_transformers
from agentkv.world.task import FAMILIES, Task, make_task
from agentkv.world.trajectory import View


def test_ten_unseen_seeds() -> None:
    result = run_world(seeds=range(100, 110), max_bytes=6000, concurrency=2)
    assert result["n"] == 10
    assert result["success"] >= 0.9, result["results"]
    assert set(result["by_family"]) == {"chase", "once", "repair"}


@pytest.mark.slow
def test_two_hundred_unseen_seeds() -> None:
    result = run_world(seeds=range(1000, 1200), concurrency=2)
    assert result["n"] == 200
    assert result["success"] >= 0.95, result["by_family"]


@pytest.mark.parametrize(
    ("dialect", "families"),
    [("native", ["join", "update"]), ("mini-swe-agent", ["again", "once"]), ("openhands", ["repair", "chase"])],
)
def test_new_families_and_dialects(dialect: str, families: list[str]) -> None:
    """Every family and every dialect once, on an unseen seed."""
    result = run_world(seeds=[310], families=families, dialect=dialect, max_bytes=2600, concurrency=2)
    assert [row["solved"] for row in result["results"]] == [True, True], result["results"]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_every_family_in_every_dialect(dialect: str) -> None:
    result = run_world(seeds=range(400, 410), families=list(FAMILIES), dialect=dialect, max_bytes=16_384, concurrency=4)
    assert result["n"] == 10 * len(FAMILIES)
    assert result["success"] >= (0.95 if dialect == "native" else 0.9), result["by_family"]


def test_a_rebuild_takes_away_what_once_needs_and_again_reads_it_again() -> None:
    """Lag at most the results between: once fails, again runs its command again; a longer lag costs nothing."""
    seed, size = 320, 2400
    between = make_task(seed, "once", size).metadata["lag"]
    rows = {}
    for lag in (between, between + 1):
        result = run_world(
            seeds=[seed], families=["once", "again"], max_bytes=size, prune_after=lag, mode="rebuild", concurrency=2
        )
        rows[lag] = {row["family"]: row for row in result["results"]}
    for lag in rows:
        assert rows[lag]["again"]["freed"] == _freed(make_task(seed, "again", size), lag)
    assert not rows[between]["once"]["solved"]
    assert rows[between + 1]["once"]["solved"]
    assert rows[between + 1]["again"]["solved"]
    assert rows[between]["again"]["freed"] > 0


def _freed(task: Task, lag: int) -> int:
    """Bytes that go before the last turn starts, were the expert to play: a body of `lag` results before the last read one."""
    shown = trajectory.play(task, view=View(lag)).results()
    gone = [body for i, body in enumerate(shown) if i + lag < len(shown) - 1]
    return sum(len(body) - len("[pruned]") for body in gone if len(body) > len("[pruned]"))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2000, 2020, 4))
def test_the_same_verdicts_through_transformers(first: int) -> None:
    seeds = range(first, first + 4)
    ours = {row["seed"]: row["solved"] for row in run_world(seeds=seeds, concurrency=2)["results"]}
    theirs = {seed: play_with_transformers(model_path("micro"), seed) for seed in seeds}
    assert ours == theirs
