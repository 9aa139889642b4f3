"""What the end of a prompt looks at, chosen once, head by head (arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, Most, Needs, Plain, Read, SparseMethod
from agentkv.kernels.observed_scores import observed_scores
from agentkv.kernels.reference import observe
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob


@dataclass(frozen=True)
class SnapKV(SparseMethod):
    """When a prompt has been read, each KV head keeps the tokens that its last queries attend to most, and those last tokens.

    In a chain each turn chooses anew, from what the last one kept and all that came since. A turn with fewer new tokens than
    the window is observed by those alone; the window's tokens stay all the same. Answers are kept until the next turn.

    capacity: tokens that a head keeps, the window included. window: last tokens of the prompt, which stay. kernel, pool: each
    score becomes the mean or maximum of so many around it. reduce: over the query heads of a KV head (the paper's code stores
    every query head). reduce_first: before the pool, as the code of arXiv 2407.11550 does; False: after it, each query head
    pooled as in the paper's code.
    """

    capacity: int = 2048
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    reduce: Literal["mean", "max"] = "mean"
    reduce_first: bool = False

    family: ClassVar[str] = "eviction"
    paper: ClassVar[str | None] = "arXiv 2404.14469"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: give 1 or more")
        if self.capacity <= self.window:
            raise ValueError(f"capacity={self.capacity}: give more than window={self.window}, which it includes")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}: give an odd number of 1 or more")
        if self.pool not in ("avg", "max"):
            raise ValueError(f"pool={self.pool!r}: give 'avg' or 'max'")
        if self.reduce not in ("mean", "max"):
            raise ValueError(f"reduce={self.reduce!r}: give 'mean' or 'max'")

    @property
    def needs(self) -> Needs:
        """The queries that observe."""
        return Needs(query_window=self.window)

    def keep(self, held: Held) -> Keep | None:
        """Once a prompt is longer than the capacity, all but its window is sealed."""
        if not held.prompt_end or held.tokens <= self.capacity:
            return None
        return Keep(max(held.floor, held.tokens - self.window), min(self.capacity - self.window, held.slots + held.tail))

    def most(self, prompt: int, tokens: int) -> Most:
        """The window and the answer; a later turn's choice stands beside the earlier one for a moment."""
        if prompt <= self.capacity:
            return Most(tokens, Keep(0, 0))
        return Most(self.window + tokens - prompt, Keep(prompt, self.capacity - self.window), again=True)

    def seal(self, job: SealJob) -> Kept:
        """The best of each head by what the last queries attend to."""
        seal, layers = job.work.seal, []
        assert seal is not None
        for layer in range(job.shape.num_layers):
            found = job.candidates(layer)
            older = found.valid & (found.positions < seal.floor)
            observed = observed_scores(
                job.queries(layer),
                found.k,
                found.valid,
                older,
                job.shape.scale,
                kernel=self.kernel,
                pool=self.pool,
                reduce=self.reduce,
                reduce_first=self.reduce_first,
            )
            layers.append(observed.best(seal.slots, torch.full_like(observed.lens, seal.slots)))
        indices, counts = zip(*layers, strict=True)
        return Kept(torch.stack(indices), torch.stack(counts))

    def identity(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"capacity": length}

    def small(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"capacity": length // 2, "window": 8}

    def reference(self, plain: Plain, layer: int) -> Read:
        """Scores one by one, sorted in Python."""
        k, v = plain.k[layer], plain.v[layer]
        scores = observe(plain.q[layer], k, plain.scale, self.window, self.kernel, self.pool, self.reduce, self.reduce_first)
        every, positions = range(len(k)), []
        for by_token in scores:
            best = [at for _, at in sorted((-score, at) for at, score in enumerate(by_token))]
            chosen = {*best[: self.capacity - self.window], *every[-self.window :]}
            positions.append([at for at in every if at in chosen or len(k) <= self.capacity])
        return Read(positions, *([x[seen, head] for head, seen in enumerate(positions)] for x in (k, v)))
