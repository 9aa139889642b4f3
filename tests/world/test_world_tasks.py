"""Tasks, expert, simulator and world: what the families promise, and equality with real commands."""

import re

import pytest

from agentkv.world import expert, render, trajectory
from agentkv.world.dialect import DIALECTS
from agentkv.world.env import World
from agentkv.world.simulator import Simulator
from agentkv.world.task import BY_SEED, EVALUATION_SEEDS, FAMILIES, family_of, make_task
from agentkv.world.trajectory import View

CASES = [(seed, family) for family in FAMILIES for seed in range(10)]


def replay(seed: int, family: str | None = None, name: str = "native") -> None:
    """The expert with many planted mistakes: each simulated answer equals the real one."""
    task = make_task(seed, family, max_bytes=4096, dialect=DIALECTS[name])
    with World(task, DIALECTS[name]) as world:
        episode = trajectory.play(task, DIALECTS[name], mistakes=0.3, place=world.place)
        shown = [body for command, body in episode.shown if command]
        for past, body in zip(episode.history, shown, strict=True):
            assert world.bash(past.command) == body, past.command
            assert world.history[-1] == past
        assert world.verdict()
        real = {str(p.relative_to(world.root)): p.read_text() for p in world.root.rglob("*") if p.is_file()}
    assert real == episode.files


@pytest.mark.parametrize("seed", range(60))
def test_simulator_equals_the_real_commands(seed):
    replay(seed)


@pytest.mark.parametrize("name", list(DIALECTS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_simulator_equals_the_real_commands_in_every_dialect(family, name):
    for seed in range(3):
        replay(seed, family, name)


@pytest.mark.slow
def test_simulator_equals_the_real_commands_on_500_seeds():
    for seed in range(1000, 1500):
        replay(seed, list(FAMILIES)[seed % len(FAMILIES)], list(DIALECTS)[seed // 6 % len(DIALECTS)])


@pytest.mark.parametrize(("seed", "family"), CASES)
def test_a_task_is_what_its_family_promises(seed, family):
    task = make_task(seed, family)
    episode = trajectory.play(task)
    size = len(trajectory.encode(episode.events).ids)
    assert 1600 <= size <= 8192
    assert size == pytest.approx(task.metadata["bytes"], rel=0.22)
    assert 4 <= len(episode.history) <= 12
    assert all(event.text.isascii() and '"' not in event.text and "\\" not in event.text for event in episode.events)
    assert sum(len("".join(step.copies)) for step in task.rounds[0].steps) <= 40
    assert all(len(step.command) <= 120 for step in task.rounds[0].steps)
    assert task == make_task(seed, family)


@pytest.mark.parametrize(("seed", "family"), CASES)
def test_facts_stand_where_the_task_says(seed, family):
    """The oracle is a plain search in the results that the expert saw."""
    task = make_task(seed, family)
    results = trajectory.play(task).results()
    for question, answer, index in task.followups:
        if index is None:
            assert answer == task.answer
            continue
        name = re.fullmatch(r"code of (\w{3})\?", question)[1]
        lines = results[index].split("\n")
        assert f"{name} {answer}" in lines
        told = [line for body in results for line in body.split("\n") if line.startswith(f"{name} ")]
        assert told[-1] == f"{name} {answer}"
        assert len(told) == (2 if family == "update" and index == 2 else 1)
        others = [line[:3] for line in lines if re.fullmatch(r"\w{3} \d{4}", line)]
        assert sum(sum(a != b for a, b in zip(other, name, strict=True)) == 1 for other in others) >= 5


@pytest.mark.parametrize(("seed", "family"), CASES)
def test_the_expert_never_speaks_before_it_can_know(seed, family):
    """Every copied value or name stands in the request or an earlier result, not later."""
    task = make_task(seed, family)
    seen = ""
    for event in trajectory.play(task).events:
        for copied in event.copies:
            assert copied in seen, event.text
        seen += event.text + "\n"


def test_seeds_of_evaluation_and_training_are_apart():
    with pytest.raises(ValueError, match="evaluation only"):
        make_task(EVALUATION_SEEDS - 1, training=True)
    with pytest.raises(ValueError, match="training"):
        make_task(EVALUATION_SEEDS)
    make_task(EVALUATION_SEEDS, training=True)


@pytest.mark.parametrize(
    "bad",
    [{"seed": -1}, {"seed": 1, "family": "join2"}, {"seed": 1, "max_bytes": 1000}, {"seed": 1, "max_bytes": 1 << 20}],
)
def test_bad_input_is_refused(bad):
    with pytest.raises(ValueError, match=r"."):
        make_task(**bad)


def test_families_are_balanced():
    assert [family_of(seed) for seed in (7, 8, 9)] == ["once", "repair", "chase"]
    assert {make_task(seed).family for seed in range(3)} == set(BY_SEED)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_verdict_needs_the_real_work(family):
    task = make_task(4, family)
    with World(task) as world:
        assert not world.verdict()
        world.bash("echo 1234 > answer.txt")
        assert not world.verdict()
        world.bash(f"echo {task.answer} > answer.txt")
        assert world.verdict() == (family != "repair")
        folder = world.root
    assert not folder.exists()


def test_a_repair_that_changes_more_is_not_solved():
    task = make_task(4, "repair")
    with World(task) as world:
        for step in task.rounds[0].steps:
            world.bash(step.command)
        assert world.verdict()
        other = next(line for line in (world.root / "m.py").read_text().split("\n") if line.startswith("lim_"))
        world.bash(f"sed -i 's/^{other}$/{other}0/' m.py")
        assert not world.verdict()


def test_a_changed_test_program_is_not_solved():
    task = make_task(4, "repair")
    with World(task) as world:
        world.bash("echo import sys > t.py")
        world.bash(f"echo {task.answer} > answer.txt")
        assert not world.verdict()


def test_followups_are_checked():
    task = make_task(1)
    with World(task) as world:
        question, answer, _ = task.followups[0]
        assert world.check_followup(question, f" {answer}\n")
        assert not world.check_followup(question, "0000")
        with pytest.raises(ValueError, match="no follow-up"):
            world.check_followup("what?", answer)


def test_expert_tries_again_after_an_error():
    round_ = make_task(0).rounds[0]
    first = round_.steps[0]
    assert expert.next_step(round_, []) == first
    assert expert.next_step(round_, [expert.Past("cat nope", 1)]) == first
    assert expert.next_step(round_, [expert.Past(first.command, first.code)]) == round_.steps[1]
    assert expert.next_step(round_, [expert.Past(s.command, s.code) for s in round_.steps]) is None


def test_weights():
    task = make_task(1)
    episode = trajectory.play(task, mistakes=0.5)
    out = trajectory.encode(episode.events)
    wrong = sum(len(e.text) for e in episode.events if e.wrong)
    assert wrong > 0
    assert set(out.weights) == {0.0, render.BACKGROUND, 1.0, 4.0}
    copied = sum(weight == 4.0 for weight in out.weights)
    assert copied == sum(len(c) for e in episode.events for c in e.copies)
    assert out.weights.count(0.0) > wrong


def test_the_value_of_a_repair_is_not_in_its_test():
    for seed in range(2, 60, 3):
        task = make_task(seed)
        assert task.answer not in task.files["m.py"] or task.answer not in task.files["t.py"]
        assert not re.search(rf"\b{task.answer}\b", task.files["t.py"])


def test_once_can_be_read_one_time_only():
    task = make_task(1)
    twin = Simulator(task.files, task.programs)
    output, code = twin.run("sh once.sh")
    assert code == 0
    assert len(output.split("\n")) == 65
    assert twin.run("sh once.sh")[1] != 0
    assert not any(re.search(rf"\b{task.answer}\b", text) for path, text in twin.files.items())


def test_join_needs_both_tables():
    """The host stands only in the first one-time result, its port only in the second."""
    for seed in range(12):
        task = make_task(seed, "join")
        results = trajectory.play(task).results()
        wanted, host, port = task.answer.split()
        assert f"{wanted} {host}" in results[0].split("\n")
        assert [f"{host} {port}" in body.split("\n") for body in results].count(True) == 1
        assert f"{host} {port}" not in results[0]
        assert f"want {wanted}" in results[-2].split("\n")
        assert all(wanted not in body for body in results[1:-2])


def test_update_counts_the_last_value():
    for seed in range(12):
        task = make_task(seed, "update")
        results = trajectory.play(task).results()
        name, code = task.answer.split()
        first, _, last = (dict(line.split(" ") for line in results[i].split("\n") if line) for i in range(3))
        assert last[name] == code
        assert set(first) == set(last)
        assert sum(first[key] != last[key] for key in first) > len(first) / 2


def test_again_can_be_read_again_and_is_when_it_is_gone():
    for seed in range(8):
        task = make_task(seed, "again")
        plain = [past.command for past in trajectory.play(task).history]
        assert plain.count("sh list.sh") == 1
        lag = task.metadata["lag"]
        for view, times in ((View(lag), 2), (View(0), 2), (View(lag + 1), 1), (View(0, edges=10_000), 1)):
            episode = trajectory.play(task, view=view)
            assert [past.command for past in episode.history].count("sh list.sh") == times
            assert episode.files["answer.txt"].strip() == task.answer
