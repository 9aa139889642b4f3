"""Requests that come together and begin with the same tokens: the first reads them, the others find them."""

from __future__ import annotations

import pytest
from fake_engine import Oracle, engine, request, run

from agentkv.engine.core import Edit, Sequence, Status
from agentkv.engine.demands import LEAST_HEAD
from agentkv.engine.llm import LLM

HEAD = [(7 * i * i + i) % 5 for i in range(LEAST_HEAD + 90)]
LONG = HEAD[: LEAST_HEAD + 40]


def started(**options: object) -> LLM:
    return engine(3000, 4, max_rows=6, step_tokens=64, **options)


def told(llm: LLM, seqs: list[Sequence]) -> None:
    """They say what each would say alone."""
    run(llm)
    for seq in seqs:
        assert seq.fault is None
        assert seq.token_ids[seq.num_prompt_tokens :] == Oracle().generate(seq.request.token_ids, (), seq.seed, seq.max_tokens)


def test_a_head_is_read_once() -> None:
    llm = started()
    seqs = [llm.add(request([*LONG, i], seed=i)) for i in range(4)]
    llm.step()
    assert [seq.status for seq in seqs] == [Status.RUNNING, *[Status.WAITING] * 3]
    told(llm, seqs)
    shared = len(LONG) // 4 * 4
    assert [seq.num_cached_tokens for seq in seqs] == [0, shared, shared, shared]
    assert sum(seq.num_prefilled_tokens for seq in seqs) == len(LONG) + 1 + 3 * (len(LONG) + 1 - shared)


@pytest.mark.parametrize("ends", ["abort", "fault"])
def test_whoever_waits_goes_on_without_the_one_that_was_reading(ends: str) -> None:
    llm = started()
    seqs = [llm.add(request([*LONG, i], seed=i)) for i in range(3)]
    llm.step()
    if ends == "abort":
        llm.abort(seqs[0])
    else:
        llm.runner.fail_execute = {llm.runner.steps + 1}
        llm.step()
    assert seqs[0].status is Status.CLOSED
    told(llm, seqs[1:])
    assert seqs[0].head is None


def test_who_does_not_wait() -> None:
    """Another tenant, a short head, a small part of a long prompt, one that goes before, one with a prune, one with a chain."""
    llm = started()
    first = llm.add(request([*LONG, *[1] * 10]))
    others = [
        llm.add(request([*LONG, 2], salt="b")),
        llm.add(request([*LONG[: LEAST_HEAD - 1], 4, 4, 4])),
        llm.add(request([*LONG, 2], priority=1)),
        llm.add(request([*LONG, 2], edits=[Edit(40, ((3, 9),))])),
    ]
    assert [seq.head for seq in others] == [None] * 4
    waits = llm.add(request([*LONG, 3]))
    assert waits.head is first
    run(llm)
    talk = llm.add(request([*HEAD, 1], "talk"))
    run(llm)
    llm.commit(talk, talk.token_ids[talk.num_prompt_tokens :])
    again = llm.add(request([*HEAD, 4, *[2] * 2000]))
    assert again.head is None  # what it shares is in the cache
    assert llm.add(request([*talk.token_ids, 4], "talk")).head is None
    assert llm.add(request([*HEAD, 4, *[2] * 1500])).head is again
    windowed = started(windows=(None, 5))
    assert [windowed.add(request([*LONG, i])).head for i in range(2)] == [None, None]
    run(llm)


def test_who_would_go_first_is_not_held_by_one_that_has_no_room() -> None:
    """Only one that runs is waited for: a head that waits itself holds up nobody."""
    llm = engine(300, 4, max_rows=6, step_tokens=64)
    seqs = [llm.add(request([*LONG, *[i] * 100], seed=i, max_tokens=40)) for i in range(3)]
    told(llm, seqs)
