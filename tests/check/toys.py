"""Two small methods that keep the contract: one evicts, one selects. Their references are closed forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.form import Held
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Keep, Kept, Most, Plain, Read, SparseMethod
from agentkv.engine.view import DeviceBatch, Selection
from agentkv.types import Exactness


def read_at(plain: Plain, layer: int, positions: list[list[int]]) -> Read:
    """Those positions of each head, as they are."""
    k, v = ([each[layer][at, head] for head, at in enumerate(positions)] for each in (plain.k, plain.v))
    return Read(positions, k, v)


@dataclass(frozen=True)
class Edges(SparseMethod):
    """Keeps the first tokens sealed and the newest ones in the tail; what lies between goes at the end of a prompt."""

    family: ClassVar[str] = "eviction"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    budget: int = 64
    first: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.first < self.budget:
            raise ValueError(f"first={self.first}: 1 to budget - 1")

    def keep(self, held: Held) -> Keep | None:
        if not held.prompt_end or held.slots + held.tail <= self.budget:
            return None
        return Keep(held.tokens - (self.budget - self.first), self.first)

    def most(self, prompt: int, tokens: int) -> Most:
        return Most(min(tokens, self.budget + tokens - prompt), Keep(0, self.first), again=True)

    def seal(self, job: SealJob) -> Kept:
        shape = job.shape
        where = job.positions()
        indices = torch.arange(self.first, device=where.device).expand(shape.num_layers, shape.num_kv_heads, -1)
        counts = torch.full((shape.num_layers, shape.num_kv_heads), self.first, dtype=torch.int32, device=where.device)
        return Kept(indices, counts)

    def small(self, length: int) -> Mapping[str, Any]:
        return {"budget": length // 2, "first": 20}

    def reference(self, plain: Plain, layer: int) -> Read:
        length, heads = plain.k[layer].shape[:2]
        recent = length - plain.decoded - self.budget + self.first
        return read_at(plain, layer, [[p for p in range(length) if p < self.first or p >= recent]] * heads)


@dataclass(frozen=True)
class Newest(SparseMethod):
    """Holds everything; while it decodes it reads the newest tokens only."""

    family: ClassVar[str] = "dynamic"
    exactness: ClassVar[Exactness] = "lossy"

    budget: int = 64

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        if batch.prefill:
            return None
        held = batch.table_of(layer).lens
        count = held.clamp(max=self.budget)
        return Selection((held - count).unsqueeze(1) + torch.arange(self.budget, dtype=torch.int32, device=q.device), count)

    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        return min(self.budget, tokens)

    def reference(self, plain: Plain, layer: int) -> Read:
        length, heads = plain.k[layer].shape[:2]
        return read_at(plain, layer, [list(range(max(0, length - self.budget + 1), length))] * heads)
