"""State that a method declares travels with its slots: a toy method checks in every step that each slot still has its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from agentkv.engine.core import SLOT, Edit, EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import ModelShape, SparseMethod, StateSpec
from agentkv.engine.view import DeviceBatch
from agentkv.types import Sampling

PROMPT = [5, 17, 80, 3, 44, 44, 9, 61, 2, 30, 31, 7, 12, 90, 1, 66, 23]


@dataclass(frozen=True)
class Marker(SparseMethod):
    """Writes each token's position, and twice and three times that, into its slot, and reads all of them back."""

    seen: dict[int, list[int]] = field(default_factory=dict)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return (StateSpec("mark", "slot", "int32", "append", (3, SLOT)), StateSpec("wide", "slot", "float64", "append"))

    def on_step_begin(self, batch: DeviceBatch) -> None:
        for name, factors in (("mark", [1, 2, 3]), ("wide", 0.5)):
            pages, places = batch.state(name)
            factor = torch.tensor(factors)
            marks = batch.positions.view(-1, *[1] * factor.dim()) * factor
            _by_slot(pages)[places.entries, places.offsets] = marks.to(pages.dtype)

    def on_step_end(self, batch: DeviceBatch) -> None:
        for span in batch.rows:
            marks = self._read("mark", batch, span.row)
            positions = marks[:, 0].tolist()
            assert (marks == marks[:, :1] * torch.tensor([1, 2, 3])).all()
            assert self._read("wide", batch, span.row).tolist() == [0.5 * position for position in positions]
            self.seen[span.seq_id] = positions

    def _read(self, name: str, batch: DeviceBatch, row: int) -> Tensor:
        pages, places = batch.state(name)
        table = places.table
        length = table.host_lens[table.host_rows.index(row)]
        slots = torch.arange(length)
        return _by_slot(pages)[table.entries[row, slots // table.page_size].long(), slots % table.page_size]


def _by_slot(units: Tensor) -> Tensor:
    """With the slots, which come last, behind the units."""
    return units.movedim(-1, 1)


def engine_of(loaded: Any, method: SparseMethod, step_tokens: int = 16) -> LLM:
    config = EngineConfig(2 << 20, 200, page_size=4, max_rows=4, step_tokens=step_tokens, warm_memory=1 << 20)
    return LLM(config, ModelRunner(loaded, config, method))


def turn(llm: LLM, ids: list[int], chain: str, edits: tuple[Edit, ...] = (), commit: bool = True) -> list[int]:
    """Forward a turn; what is left of the history must be what the method found in its slots."""
    seq = llm.add(Request(ids, Sampling(max_tokens=6), chain_id=chain, edits=edits))
    while llm.has_work:
        llm.step()
        llm.check()
    assert seq.fault is None, seq.fault.__cause__
    gone = [interval for edit in edits for interval in edit.removed]
    kept = [p for p in range(len(seq.token_ids) - 1) if not any(start <= p < end for start, end in gone)]
    assert llm.runner.controller.methods[0].seen[seq.seq_id] == kept
    if commit:
        llm.commit(seq, seq.token_ids[len(ids) :])
    else:
        llm.abort(seq)
    llm.check()
    return list(seq.token_ids)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("step_tokens", [4, 16])
def test_it_follows_its_slots_everywhere(model: Any, family: str, step_tokens: int) -> None:
    """Chunks, prune, fork, rollback, abort, the warm tier, and the prefix cache."""
    llm = engine_of(model(family, "float32"), Marker(), step_tokens)
    ids = turn(llm, PROMPT, "a")
    counted = llm.stats().bytes["chains"]
    assert counted >= len(ids) // 4 * 4 * (3 * 4 + 8)  # the state is among the bytes that are held
    llm.prune("a", [(3, 9), (14, 16)])
    edits = (Edit(len(ids), ((3, 9), (14, 16))),)
    llm.fork("a", "b", len(ids))
    turn(llm, [*ids, 40, 8], "a", edits)
    turn(llm, [*ids, 77], "b", edits, commit=False)
    turn(llm, [*ids, 11, 12, 13], "b", edits)
    llm.rollback("a", len(ids))
    turn(llm, [*ids, 50], "a", edits, commit=False)
    llm.suspend("a")
    assert llm.stats().warm_bytes
    turn(llm, [*ids, 60], "a", edits)
    assert llm.stats().restores == 1
    turn(llm, [*PROMPT, 4], "c")  # shares the prefix
