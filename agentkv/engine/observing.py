"""Methods that choose, once a prompt has been read, by what its last queries attend to (arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, Most, Needs, SparseMethod
from agentkv.kernels.observed_scores import Observed, observed_scores
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob

_WIDEST = 1025  # scores around one; a pool takes time by its width


@dataclass(frozen=True)
class Observing(SparseMethod):
    """The window's tokens stay, and of those before it the best by the attention that the window's queries give them.

    In a chain each turn chooses anew, from what the last one kept and all that came since. A turn with fewer new tokens than
    the window is observed by those alone; the window's tokens stay all the same. Answers are kept until the next turn. A method
    may say how many each head keeps (`counts`), and what is reserved for that (`share`); it gives the options their defaults.

    capacity: tokens that a head keeps, the window included. window: last tokens of the prompt, which stay. kernel, pool: each
    score becomes the mean or maximum of so many around it. reduce: over the query heads of a KV head. reduce_first: before the
    pool; False: after it, each query head pooled.
    """

    capacity: int
    window: int
    kernel: int
    pool: Literal["avg", "max"]
    reduce: Literal["mean", "max"]
    reduce_first: bool

    family: ClassVar[str] = "eviction"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: give 1 or more")
        if self.capacity <= self.window:
            raise ValueError(f"capacity={self.capacity}: give more than window={self.window}, which it includes")
        if not 1 <= self.kernel <= _WIDEST or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}: give an odd number of 1 to {_WIDEST}")
        self.check_words(pool=("avg", "max"), reduce=("mean", "max"))

    def check_words(self, **known: tuple[str, str]) -> None:
        """ValueError where an option is none of its words."""
        for name, words in known.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name}={getattr(self, name)!r}: give {words[0]!r} or {words[1]!r}")

    @property
    def needs(self) -> Needs:
        """The queries that observe."""
        return Needs(query_window=self.window)

    def share(self, floor: int) -> Keep:
        """What is kept at most of the tokens before a floor. Default: as many in each head."""
        return Keep(floor, self.capacity - self.window)

    def counts(self, observed: Observed, slots: int) -> Tensor:
        """Tokens before the window that each head keeps, int32 `[num_kv_heads]`. slots: the most there may be."""
        return torch.full_like(observed.lens, slots)

    def keep(self, held: Held) -> Keep | None:
        """Once a prompt is longer than the capacity, all but its window is sealed."""
        if not held.prompt_end or held.tokens <= self.capacity:
            return None
        share = self.share(max(held.floor, held.tokens - self.window))
        return replace(share, slots=min(share.slots, held.slots + held.tail))

    def most(self, prompt: int, tokens: int) -> Most:
        """The window and the answer."""
        if prompt <= self.capacity:
            return Most(tokens, Keep(0, 0))
        return Most(self.window + tokens - prompt, self.share(prompt))

    def seal(self, job: SealJob) -> Kept:
        """The best of each layer by what the last queries attend to."""
        seal, scale, layers = job.work.seal, job.shape.scale, []
        how: dict[str, Any] = {name: getattr(self, name) for name in ("kernel", "pool", "reduce", "reduce_first")}
        assert seal is not None
        for layer in range(job.shape.num_layers):
            found = job.candidates(layer)
            older = found.valid & (found.positions < seal.floor)
            held = None if found.whole else found.valid
            observed = observed_scores(job.queries(layer), found.k, held, older, scale, **how)
            layers.append(observed.best(seal.slots, self.counts(observed, seal.slots)))
        indices, counts = zip(*layers, strict=True)
        return Kept(torch.stack(indices), torch.stack(counts))

    def identity(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"capacity": length}

    def small(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"capacity": length // 2, "window": 8}
