"""The suite, with scripted sessions instead of a model."""

import subprocess
import sys

import pytest

from agentkv.errors import BadRequest
from agentkv.world import expert
from agentkv.world.env import World, secrets
from agentkv.world.suite import run_suite, wilson
from agentkv.world.task import FAMILIES, make_task


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


def test_named_families_and_refusals():
    """Each seed in each of the named families."""
    answer = run_suite(Scripted, range(2), families=["repair", "join"], prune_after=2)
    assert [(r["seed"], r["family"]) for r in answer["results"]] == [(0, "repair"), (1, "repair"), (0, "join"), (1, "join")]
    assert answer["success"] == 1
    for bad in ({"seeds": []}, {"seeds": [1_000_000]}, {"seeds": [1], "families": ["x"]}, {"seeds": [1], "max_bytes": 1}):
        with pytest.raises((BadRequest, ValueError)):
            run_suite(Scripted, **bad)


@pytest.mark.parametrize("family", FAMILIES)
def test_nobody_solves_a_task_whose_facts_are_struck_out(family):
    """Even the expert's plan, with the value that it can read in the struck-out results, fails."""
    for seed in range(6):
        task = make_task(seed, family)
        with World(task, blank=True) as world:
            shown = "\n".join(world.bash(step.command) for step in task.rounds[0].steps[:-1])
            assert secrets(task)
            assert not any(f" {word}\n" in shown + "\n" for word in secrets(task))


def test_what_was_read_again_is_counted():
    with World(make_task(3, "again")) as world:
        for step in world.task.rounds[0].steps:
            world.bash(step.command)
        assert world.rereads() == 0
        world.bash("sh list.sh")
        assert world.rereads() == 1
        world.bash("cat nope.txt")
        assert world.rereads() == 1
    with World(make_task(3, "update")) as world:
        for step in world.task.rounds[0].steps:
            world.bash(step.command)
        assert world.rereads() == 0


def test_wilson_against_published_values():
    assert wilson(81, 263) == pytest.approx([0.2553, 0.3662], abs=5e-4)  # Newcombe 1998, table I
    assert wilson(0, 20) == pytest.approx([0.0, 0.1611], abs=5e-4)
    assert wilson(1, 29) == pytest.approx([0.0061, 0.1718], abs=5e-4)


def test_the_world_needs_no_torch():
    code = "import sys, agentkv.world; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
