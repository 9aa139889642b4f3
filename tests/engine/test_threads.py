"""The engine's threads on their cores: which are bound, that no other thread of the process ever is, and when none are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from fake_engine import engine

from agentkv.engine import threads
from agentkv.engine.threads import EngineThreads, pin_plan
from agentkv.engine.worker import EngineWorker
from agentkv.kernels.native import native

TASKS = Path("/proc/self/task")
needs_cores = pytest.mark.skipif(
    not TASKS.exists() or len(threads.allowed_cores()) < 2 or not native().functions,
    reason="Linux, two cores, compiled kernels",
)


def masks() -> dict[int, set[int]]:
    """Cores of each thread of this process, as the kernel has them."""
    found = {}
    for task in TASKS.iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cores that are the process's own, and no OpenMP settings; torch's number of threads is put back."""
    for name in threads.thread_environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AGENTKV_PIN", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def work(worker: EngineWorker) -> int:
    """Something that OpenMP's helpers take part in; the engine thread's number of torch threads, and its id."""
    worker.call(lambda: torch.ones(400, 400) @ torch.ones(400, 400))
    assert worker.call(torch.get_num_threads) == 2
    return worker.call(threading.get_native_id)


def mask_of(worker: EngineWorker) -> set[int]:
    """Cores of the engine's thread after some work."""
    own = work(worker)
    return masks()[own]


@needs_cores
def test_only_the_engines_threads_are_bound_and_only_while_it_lives(alone: None) -> None:
    before, cores = masks(), threads.allowed_cores()
    worker = EngineWorker(engine(), EngineThreads(2))
    own = work(worker)
    now = masks()
    assert {task: now[task] for task in before if task in now} == {task: before[task] for task in before if task in now}
    assert now[own] == {cores[0]}
    helpers = [task for task, mask in now.items() if task not in before and mask == {cores[1]}]
    assert len(helpers) == 1
    second = EngineWorker(engine(), EngineThreads(2))  # not bound: the cores are taken
    assert mask_of(second) == set(cores)
    worker.close()
    end = time.monotonic() + 10
    while {own, *helpers} & masks().keys():
        assert time.monotonic() < end, "the bound threads outlive their engine"
        time.sleep(0.01)
    second.close()
    third = EngineWorker(engine(), EngineThreads(2))
    assert mask_of(third) == {cores[0]}
    third.close()


@needs_cores
def test_switched_off_nothing_is_bound(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_PIN", "0")
    worker = EngineWorker(engine(), EngineThreads(2))
    assert mask_of(worker) == set(threads.allowed_cores())
    worker.close()


@pytest.mark.parametrize(
    ("machine", "allowed", "quota", "settings", "count", "cores"),
    [
        (8, range(8), None, {}, 8, ()),  # nobody said that they are ours
        (8, range(4, 8), None, {}, 4, (4, 5, 6, 7)),
        (8, range(4, 8), None, {}, 2, (4, 5)),
        (8, range(4, 8), None, {}, 5, ()),
        (8, range(4, 8), 4.0, {}, 4, (4, 5, 6, 7)),
        (8, range(4, 8), 3.5, {}, 4, ()),
        (8, range(8), None, {"AGENTKV_PIN": "1"}, 3, (0, 1, 2)),
        (8, range(4, 8), None, {"AGENTKV_PIN": "0"}, 4, ()),
        (8, range(4, 8), None, {"OMP_PROC_BIND": "true"}, 4, ()),
        (8, range(4, 8), None, {"GOMP_CPU_AFFINITY": "4-7"}, 4, ()),
    ],
)
def test_when_threads_are_bound(
    monkeypatch: pytest.MonkeyPatch,
    machine: int,
    allowed: range,
    quota: float | None,
    settings: dict[str, str],
    count: int,
    cores: tuple[int, ...],
) -> None:
    for name in (*threads.thread_environment(), "AGENTKV_PIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(threads, "allowed_cores", lambda: tuple(allowed))
    monkeypatch.setattr(threads, "core_quota", lambda: quota)
    found, why = pin_plan(count)
    assert found == cores
    assert why.startswith("on: " if cores else "off: ")
