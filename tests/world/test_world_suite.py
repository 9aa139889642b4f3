"""The suite, with scripted sessions instead of a model."""

import subprocess
import sys

import pytest

from agentkv.errors import BadRequest
from agentkv.world import expert
from agentkv.world.suite import run_suite, wilson


class Scripted:
    """Plays the expert through the world's real tool."""

    closed = 0

    def __init__(self, world, fail=()):
        self.world, self.fail = world, fail

    def add_user(self, text):
        assert text == self.world.task.prompt

    def run(self, *, max_turns, prune_after):
        assert (max_turns, prune_after) == (24, 2)
        if self.world.task.seed in self.fail:
            raise RuntimeError("lost")
        while step := expert.next_step(self.world.task.rounds[0], self.world.history):
            self.world.bash(step.command)

    def close(self):
        Scripted.closed += 1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_suite(concurrency):
    Scripted.closed = 0
    seen = []
    answer = run_suite(lambda w: Scripted(w, {7}), range(6, 12), prune_after=2, concurrency=concurrency, on_result=seen.append)
    assert answer["n"] == 6
    assert answer["success"] == pytest.approx(5 / 6)
    assert answer["by_family"]["once"] == {"success": 0.5, "n": 2}
    assert answer["by_family"]["chase"] == {"success": 1.0, "n": 2}
    assert [r["seed"] for r in answer["results"]] == list(range(6, 12))
    assert answer["results"][1]["error"] == "RuntimeError: lost"
    assert len(seen) == 6
    assert Scripted.closed == 6


def test_families_filter_and_refusals():
    answer = run_suite(Scripted, range(6), families=["repair"], prune_after=2)
    assert [r["seed"] for r in answer["results"]] == [2, 5]
    for bad in ({"seeds": []}, {"seeds": [1_000_000]}, {"seeds": [1], "families": ["x"]}, {"seeds": [1], "max_bytes": 1}):
        with pytest.raises((BadRequest, ValueError)):
            run_suite(Scripted, **bad)


def test_wilson_against_published_values():
    assert wilson(81, 263) == pytest.approx([0.2553, 0.3662], abs=5e-4)  # Newcombe 1998, table I
    assert wilson(0, 20) == pytest.approx([0.0, 0.1611], abs=5e-4)
    assert wilson(1, 29) == pytest.approx([0.0061, 0.1718], abs=5e-4)


def test_the_world_needs_no_torch():
    code = "import sys, agentkv.world; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
