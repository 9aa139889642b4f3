"""A seal that fails costs its own sequence; whoever runs beside it, and what idle sessions hold, stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from agentkv.check.models import TINY, tiny
from agentkv.check.scene import Scene
from agentkv.engine.core import Edit
from agentkv.engine.form import Held
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Keep, Kept, Most, SparseMethod
from agentkv.errors import EngineFault

UNLUCKY = 50
"""Tokens of a prompt whose seals fail."""


@dataclass(frozen=True)
class Stumbles(SparseMethod):
    """Keeps the first 8 tokens sealed and the newest 8 at least; some seals raise."""

    timed: bool = False

    evicts: ClassVar[bool] = True
    exactness: ClassVar[Any] = "lossy"
    reuse: ClassVar[Any] = "chain"
    seals_into: ClassVar[Any] = "stripe"

    def keep(self, held: Held) -> Keep | None:
        due = held.tail > 12 if self.timed else held.prompt_end
        return Keep(held.tokens - 8, 8) if due and held.tokens > 16 else None

    def most(self, prompt: int, tokens: int) -> Most:
        return Most(min(tokens, 16 if self.timed else 8 + tokens - prompt), Keep(0, 8), again=True)

    def seal(self, job: SealJob) -> Kept:
        if UNLUCKY <= job.work.held.tokens < UNLUCKY + 20:
            raise OverflowError("int too big to convert")
        shape = job.shape.num_layers, job.shape.num_kv_heads
        return Kept(torch.arange(8).expand(*shape, 8), torch.full(shape, 8, dtype=torch.int32))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny(TINY[0])


def ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("timed", [False, True], ids=["at a prompt's end", "between decode steps"])
def test_others_go_on(loaded: LoadedModel, timed: bool) -> None:
    method = Stumbles(timed)
    alone = [Scene(loaded, [SparseMethod(), method]) for _ in range(2)]
    wanted = [scene.finish(scene.start(ids(30, 3), form=form, new=12))[0] for form, scene in enumerate(alone)]

    scene = Scene(loaded, [SparseMethod(), method])
    idle = scene.finish(scene.start(ids(40), "idle"))[0]
    beside = [scene.start(ids(30, 3), f"beside {form}", form=form, new=12) for form in (0, 1)]
    unlucky = scene.start(ids(UNLUCKY, 2), "unlucky", form=1, new=30)
    told = []
    while scene.llm.has_work:
        told += [output.seq for output in scene.llm.step() if output.finished and output.seq.fault is not None]
        scene.llm.check()
    assert told == [unlucky]
    assert isinstance(unlucky.fault, EngineFault)
    assert "a seal failed: OverflowError: int too big to convert" in str(unlucky.fault)
    found = scene.finish(*beside)
    assert [each.ids for each in found] == [each.ids for each in wanted]
    assert scene.finish(scene.start([*ids(40), *idle.ids, 5], "idle"))[0].cached == 40 + len(idle.ids) - 1
    scene.clear(["idle", "beside 0", "beside 1", "unlucky"])
    scene.llm.check()
    assert scene.used == 0


def test_a_chain_stands_at_its_last_boundary(loaded: LoadedModel) -> None:
    scene = Scene(loaded, [Stumbles()])
    first = scene.turn(ids(30, 3), "c")
    whole = [*ids(30, 3), *first.ids]
    unlucky = scene.start([*whole, *ids(UNLUCKY - len(whole), 4)], "c")
    while scene.llm.has_work:
        scene.llm.step()
    assert isinstance(unlucky.fault, EngineFault)
    again = scene.turn([*whole, 7], "c")
    assert again.cached == len(whole) - 1


def test_a_prune_that_fails_in_a_step_ends_its_own_sequence(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(loaded, [SparseMethod(), Stumbles()])
    edits = (Edit(26, ((2, 6),)),)
    inner: Callable[..., int] = scene.runner.seal

    def fails(work: Any) -> int:
        if work.seal is None:
            raise RuntimeError("no")
        return inner(work)

    monkeypatch.setattr(scene.runner, "seal", fails)
    scene.finish(scene.start(ids(25, 3), "c", form=1, new=1))
    beside = scene.start(ids(30, 5), new=12)
    scene.steps(2)
    unlucky = scene.start([*ids(25, 3), *ids(9, 4)], "c", form=1, edits=edits)
    while scene.llm.has_work:
        scene.llm.step()
    assert isinstance(unlucky.fault, EngineFault)
    assert beside.fault is None
    assert beside.num_generated == 12
