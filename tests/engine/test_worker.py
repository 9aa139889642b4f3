"""The engine's thread: steps that fail, that hang, and that come back; nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fake_engine import Oracle, engine, request

from agentkv.engine import worker as worker_module
from agentkv.engine.core import Batch, Status
from agentkv.engine.worker import EngineWorker, Ticket
from agentkv.errors import EngineFault

SOON = 20.0


class Gate:
    """Holds the engine's thread inside a step while it is shut."""

    def __init__(self, worker: EngineWorker) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        execute = worker.llm.runner.execute

        def held(batch: Batch) -> list[int | None]:
            self.entered.set()
            assert self.open.wait(SOON)
            return execute(batch)

        worker.llm.runner.execute = held  # type: ignore[method-assign]


@pytest.fixture
def worker() -> Iterator[EngineWorker]:
    made = EngineWorker(engine(step_timeout=0.2))
    yield made
    made.close()


def drained(ticket: Ticket) -> list[int]:
    """Ids until the ticket ends; raises Empty where that takes too long."""
    ids: list[int] = []
    while (output := ticket.outputs.get(timeout=SOON)) is not None:
        ids += output.token_ids
    return ids


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def test_a_step_that_hangs_releases_everybody_and_refuses_more(worker: EngineWorker) -> None:
    gate = Gate(worker)
    first = worker.submit(request([1, 2, 3], "a"))
    finished = drained(first)
    gate.open.clear()
    gate.entered.clear()
    stuck = worker.submit(request([0, 1], "b", max_tokens=3))
    assert gate.entered.wait(SOON)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            worker.call(lambda: None)
        except EngineFault as error:
            errors.append(error)

    waiting = threading.Thread(target=call)
    waiting.start()
    assert drained(stuck) == []
    waiting.join(SOON)
    assert isinstance(stuck.seq.fault, EngineFault)
    assert "step_timeout=0.2" in str(stuck.seq.fault)
    assert len(errors) == 1
    assert "step_timeout" in (worker.trouble or "")
    for late in (lambda: worker.call(lambda: None), lambda: worker.submit(request([1]))):
        with pytest.raises(EngineFault, match="step_timeout"):
            late()
    worker.abort(stuck)  # returns at once
    gate.open.set()  # it comes back after all
    until(lambda: worker.trouble is None)
    worker.call(worker.llm.check)
    assert worker.call(lambda: worker.llm.arena.used_bytes) == 0, "what had finished was rolled back, too"
    assert first.seq.status is Status.CLOSED
    again = worker.submit(request([1, 2, 3], "a"))
    assert drained(again) == finished == Oracle().generate([1, 2, 3], [], 0, 4)


def test_a_command_that_hangs_is_given_up_too(worker: EngineWorker) -> None:
    go = threading.Event()
    with pytest.raises(EngineFault, match="step_timeout"):
        worker.call(lambda: go.wait(SOON))
    go.set()
    until(lambda: worker.trouble is None)
    assert worker.call(lambda: 7) == 7


def test_closing_a_stuck_engine_does_not_wait_for_it(worker: EngineWorker) -> None:
    gate = Gate(worker)
    gate.open.clear()
    ticket = worker.submit(request([0, 1]))
    assert drained(ticket) == []
    worker.close()
    assert worker.trouble is not None
    with pytest.raises(EngineFault):
        worker.call(lambda: None)
    gate.open.set()


def test_readiness_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STALL_SECONDS", 0.1)
    worker = EngineWorker(engine())
    gate = Gate(worker)
    assert worker.trouble is None
    gate.open.clear()
    ticket = worker.submit(request([0, 1]))
    until(lambda: worker.trouble is not None)
    assert "no token for" in (worker.trouble or "")
    gate.open.set()
    drained(ticket)
    assert worker.trouble is None
    worker.close()
    assert worker.trouble == "the engine is closed"


def test_a_failing_step_ends_its_requests(worker: EngineWorker) -> None:
    worker.llm.runner.fail_execute = {worker.llm.runner.steps + 1}
    ticket = worker.submit(request([1, 2, 3]))
    assert drained(ticket) == []
    assert isinstance(ticket.seq.fault, EngineFault)
    assert worker.trouble is None
