"""The order of service against a model of the stated policy, and each of its rules on its own."""

from __future__ import annotations

import os
import random

import pytest
from fake_engine import engine, request
from policy_model import Job, PolicyModel

from agentkv.engine.core import Sequence


def play(seed: int) -> tuple[int, int]:
    """A random schedule in the engine and in the model, compared after each step; preemptions and late ones."""
    rng = random.Random(seed)
    units, rows, patience = rng.randrange(6, 60), rng.randrange(1, 6), rng.randrange(1, 12)
    step_tokens, now, late = rows + rng.randrange(10), 0.0, 0
    llm = engine(units, 1, max_rows=rows, step_tokens=step_tokens, patience=patience, reuse="chain", clock=lambda: now)
    model = PolicyModel(units, rows, step_tokens, patience)
    open_: dict[int, tuple[Sequence, Job]] = {}
    for _ in range(rng.randrange(20, 80)):
        now += 1
        while rng.random() < 0.4:
            prompt = rng.randrange(1, units)
            most = rng.randrange(1, min(12, units - prompt + 2))
            rank, tenant = rng.choice([0, 0, 0, 1, -2]), rng.choice("aaab")
            timeout = rng.choice([None, None, None, rng.randrange(1, 40)])
            seq = llm.add(request([0] * prompt, max_tokens=most, priority=rank, salt=tenant, timeout=timeout))
            open_[seq.seq_id] = seq, Job(seq.seq_id, rank, tenant, seq.deadline, prompt, most)
            model.add(open_[seq.seq_id][1])
        if open_ and rng.random() < 0.05:
            seq, job = open_.pop(rng.choice(list(open_)))
            llm.abort(seq)
            model.remove(job)
        ended = {job.number for job in model.step(now)}
        assert {output.seq.seq_id for output in llm.step() if output.finished} == ended
        for number in ended:
            late += open_[number][0].deadline <= now
            llm.abort(open_.pop(number)[0])
        assert [seq.seq_id for seq in llm.scheduler.running] == [job.number for job in model.running]
        for seq, job in open_.values():
            assert (seq.num_forwarded, seq.num_generated, seq.passed_over) == (job.held, job.made, job.passed)
        llm.check()
    return llm.scheduler.tally.preemptions, late


@pytest.mark.parametrize("block", range(4))
def test_the_engine_serves_as_the_policy_says(block: int) -> None:
    count = int(os.environ.get("AGENTKV_POLICIES", "40"))
    found = [play(seed) for seed in range(block * count, (block + 1) * count)]
    assert sum(preempted for preempted, _ in found) > count
    assert sum(late for _, late in found) > count // 10
