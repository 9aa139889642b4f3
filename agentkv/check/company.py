"""Sessions beside one another: nobody's answer, KV or memory depends on the others."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.check.outcome import require
from agentkv.check.scene import PAGE, Case, Scene, difference, same
from agentkv.check.snapshot import changes, snapshot
from agentkv.engine.core import GRANULE, KVGroup
from agentkv.engine.sparse import SparseMethod


def batched(case: Case) -> str:
    """Three prompts of different lengths in one batch, each as it is alone."""
    scene = case.scene()
    prompts = [case.ids(1), case.ids(6, LONGER), case.ids(7, SHORTER)]
    answers = scene.finish(*(scene.start(ids) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        alone = case.scene().turn(ids)
        require(same(alone, answer), f"{len(ids)} tokens beside two other prompts: {difference(alone, answer)}")
    return "three in one batch"


LONGER, SHORTER = 8 * PAGE + 1, 5 * PAGE
"""Lengths on either side of a page's edge."""


def several(case: Case) -> str:
    """Beside full attention in one engine, both as they are alone."""
    plain = Case(SparseMethod(), case.loaded)
    scene = Scene(case.loaded, [SparseMethod(), case.method])
    ids = case.ids(1)
    full, mine = scene.finish(scene.start(ids, "full"), scene.start(ids, "mine", form=1))
    (alone,), (full_alone,) = case.plain(1), plain.plain(1)
    require(same(alone, mine), f"beside full attention, {difference(alone, mine)}")
    require(same(full_alone, full), f"full attention beside it: {difference(full_alone, full)}")
    return "beside full attention"


def shared(case: Case) -> str:
    """What two sessions share is not written by either: its bytes are the same before and after the other's turn."""
    scene, ids = case.scene(), case.ids(1)
    first = scene.turn(ids, "a")
    scene.llm.fork("a", "b", len(ids) + len(first.ids))
    before = _held(scene)
    scene.turn(case.more(ids, first, 3), "b")
    for name, bytes_before, bytes_after in zip(before, before.values(), _held(scene).values(), strict=True):
        require(torch.equal(bytes_before, bytes_after), f"{name}: a shared unit was written by the other session's turn")
    return f"{len(before)} units as they were"


def _held(scene: Scene) -> dict[str, Tensor]:
    """Bytes of what chain a holds. Of a last page that others may write behind its tokens, those of its tokens."""
    state, pages, found = scene.state("a"), scene.runner.pages, {}
    for index, (group, holding) in enumerate(zip(scene.runner.groups, state.holdings, strict=True)):
        written = holding.length - holding.start
        for number, unit in enumerate(holding.units):
            name = f"{'keys and values' if isinstance(group, KVGroup) else group.name}, unit {number}"
            left = written - number * group.page_size
            if holding.pool.sealed or holding.pool.whole or left >= group.page_size:
                start = unit * GRANULE
                found[name] = pages.arena[start : start + group.stripe_bytes].clone()
            elif isinstance(group, KVGroup):
                layers = (pages.layer(layer)[unit, :, :, :left] for layer in group.layers)
                found[name] = torch.stack(list(layers)).clone()
            elif group.by_slot:
                items = pages.state(index)[unit].movedim(group.shape.index(-1), 0)
                found[name] = items[:left].clone()
                if group.beside:
                    items = pages.beside(index)[unit].movedim(group.beside.index(-1), 0)
                    found[f"{name}, beside"] = items[:left].clone()
    return found


def hidden(case: Case) -> str:
    """Two lives change nothing that the method, its class or its module holds: all state is declared."""
    _live(case, 8)
    before = snapshot(case.method)
    _live(case, 9)
    changed = changes(before, snapshot(case.method))
    require(not changed, f"{', '.join(changed)} changed while sessions ran: state that is not declared")
    return f"{len(before)} attributes as they were"


def _live(case: Case, number: int) -> None:
    scene, ids = case.scene(), case.ids(number, LONGER + number)
    first = scene.turn(ids, "a")
    scene.turn(case.more(ids, first, number), "a")
