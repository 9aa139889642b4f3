"""Steps launched before the tokens of the step before them are known: the tokens and accounts of an engine that waits."""

from __future__ import annotations

import os
import random

import pytest
from fake_engine import Oracle, engine, request, run
from test_properties import WINDOWS, EngineLife, act


class AheadLife(EngineLife):
    """Lives as elsewhere. A step may tell of a fault in a launch before it, and may launch nothing."""

    ahead = True
    followed = 0

    def one_step(self) -> bool:
        runner, flying = self.llm.runner, self.llm._flight is not None
        before, made = runner.steps, False
        for output in self.llm.step():
            made = True
            self.take(output, set(range(before - 1, runner.steps + 1)))
        self.llm.check()
        AheadLife.followed += self.llm._flight is not None
        progress = made or flying or runner.steps > before
        if self.llm.has_work and not progress:
            assert self.llm.scheduler.finished, "work is queued and nothing runs"
        return progress


@pytest.mark.parametrize("lookup", [0, 6])
def test_long_lives(lookup: int) -> None:
    AheadLife.seen.clear()
    AheadLife.followed = 0
    for seed in range(int(os.environ.get("AGENTKV_LIVES", "40"))):
        rng, life = random.Random(seed), AheadLife()
        life.lookup = lookup
        life.warm_pages = rng.choice([0, 20])
        try:
            sizes = rng.randrange(3, 40), rng.choice([2, 3, 4]), rng.randrange(1, 5), rng.randrange(4, 12), rng.randrange(3)
            life.start(*sizes, rng.choice(["radix", "chain"]), WINDOWS[seed % len(WINDOWS)], rng.randrange(6))
            for _ in range(120):
                act(life, rng)
            life.teardown()
        except Exception as error:
            raise AssertionError(f"life {seed}") from error
    assert AheadLife.followed > 20
    assert AheadLife.seen["faults"] > 3
    assert AheadLife.seen["preempted"] > 3


def test_rows_that_end_early_leave_no_trace() -> None:
    """Stop ids end rows that a step was launched ahead for; their chains go on, and their rows serve others."""
    draw = random.Random(5)
    for windows in WINDOWS:
        llm, oracle = engine(400, 4, max_rows=6, step_tokens=12, windows=windows), Oracle(windows=windows)
        llm.runner.ahead = True
        histories: dict[str, list[int]] = {}
        for turn in range(40):
            names = draw.sample(["a", "b", "c", "d", "e"], draw.randrange(1, 5))
            asked = {}
            for name in names:
                ids = [*histories.get(name, []), *(draw.randrange(5) for _ in range(draw.randrange(1, 5)))][-200:]
                stop, seed = frozenset({draw.randrange(5)}), draw.randrange(9)
                if len(ids) > 90:
                    llm.drop(name)
                    ids = ids[-3:]
                asked[name] = llm.add(request(ids, name, max_tokens=12, seed=seed, stop_ids=stop)), ids, seed, stop
            run(llm)
            for name, (seq, ids, seed, stop) in asked.items():
                assert seq.fault is None
                made = seq.token_ids[seq.num_prompt_tokens :]
                assert made == oracle.generate(ids, (), seed, 12, stop), f"turn {turn}"
                llm.commit(seq, made)
                llm.check()
                histories[name] = seq.token_ids


def test_the_step_behind_is_launched_first() -> None:
    llm = engine(40, 4, max_rows=3, step_tokens=12)
    llm.runner.ahead = True
    order: list[str] = []
    launch = llm.runner.launch

    def launching(batch, after=None):  # type: ignore[no-untyped-def]
        order.append(f"launch {len(order)}")
        done = launch(batch, after)
        wait = done.wait

        def waiting() -> list[int | None]:
            order.append("wait")
            return wait()

        done.wait = waiting
        return done

    llm.runner.launch = launching
    for name in "ab":
        llm.add(request([1, 2, 3], name, max_tokens=6))
    run(llm)
    kinds = [each.split()[0] for each in order]
    prompts, last = ["launch", "wait"], ["wait"]
    assert kinds == [*prompts, "launch", *["launch", "wait"] * 4, *last]
