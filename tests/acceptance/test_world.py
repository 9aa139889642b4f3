"""`micro` acts in the agent world: ten seeds here, two hundred by `make test-slow`."""

from __future__ import annotations

import pytest

from agentkv.bench.world import run_world
from agentkv.runtime_engine import model_path
from agentkv.world.reference_play import play_with_transformers


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


@pytest.mark.slow
def test_the_same_verdicts_through_transformers() -> None:
    seeds = range(2000, 2020)
    ours = {row["seed"]: row["solved"] for row in run_world(seeds=seeds, concurrency=2)["results"]}
    theirs = {seed: play_with_transformers(model_path("micro"), seed) for seed in seeds}
    assert ours == theirs
