"""The first tokens, on which attention rests, and the newest ones (arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, Most, Plain, Read, SparseMethod
from agentkv.engine.tables import RowTable
from agentkv.engine.view import AttentionView, DeviceBatch, Selection
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob

_SLACK = 16
"""Tokens that the tail may have beyond the recent ones before it is trimmed."""


@dataclass(frozen=True)
class StreamingLLM(SparseMethod):
    """Token i reads j < sinks and j > i - recent while answers are made; prompts read all that is held.

    Keys keep the angles of their logical positions. A pruned token still counts as one of the recent ones.

    sinks: first tokens that stay. recent: newest tokens that are read, the one that reads included. positions: of the keys;
    "cache", counted inside the cache as in the paper, is not built.
    """

    sinks: int = 4
    recent: int = 1020
    positions: str = "logical"

    family: ClassVar[str] = "eviction"
    paper: ClassVar[str | None] = "arXiv 2309.17453"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: give 0 or more")
        if self.recent < 1:
            raise ValueError(f"recent={self.recent}: give 1 or more")
        if self.positions != "logical":
            raise ValueError(f"positions={self.positions!r}: only 'logical' is built, keys are not turned anew in the cache")

    def keep(self, held: Held) -> Keep | None:
        """The first tokens are sealed as soon as they are there; behind them the tail is trimmed from time to time."""
        floor = max(held.floor, min(self.sinks, held.tokens))
        if held.prompt_end or held.tail > self.recent + _SLACK:
            floor = max(floor, held.tokens - self.recent)
        if floor == held.floor:
            return None
        slots = held.slots if held.floor >= self.sinks else min(self.sinks, held.slots + held.tail)
        return Keep(floor, slots, appends=True)

    def most(self, prompt: int, tokens: int) -> Most:
        """A tail that is trimmed before the next token enters it."""
        return Most(min(tokens, self.recent + _SLACK + 1), Keep(self.sinks, min(self.sinks, tokens)), again=True)

    def seal(self, job: SealJob) -> Kept:
        """The first tokens of whatever is left: the same in all layers and heads."""
        found = job.candidates(0)
        first = found.valid & (found.positions < self.sinks)
        order = torch.sort((~first).to(torch.uint8), dim=1, stable=True).indices[:, : self.sinks]
        layers = job.shape.num_layers
        return Kept(order.expand(layers, -1, -1), first.sum(1, dtype=torch.int32).expand(layers, -1))

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """Of the tail only the newest slots, where answers are made."""
        *sealed, tail = super().view(layer, selection, batch).parts
        if not batch.prefill and isinstance(tail.table, RowTable):
            tail = replace(tail, table=tail.table.newest(self.recent))
        return AttentionView((*sealed, tail))

    def identity(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"recent": length}

    def small(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"recent": length // 2 - self.sinks}

    def reference(self, plain: Plain, layer: int) -> Read:
        """See the class: the token behind a prompt is at position n."""
        k, v = plain.k[layer], plain.v[layer]
        seen = [j for j in range(len(k)) if j < self.sinks or j > len(k) - self.recent]
        heads = range(k.shape[1])
        return Read([seen] * len(heads), [k[seen, head] for head in heads], [v[seen, head] for head in heads])
