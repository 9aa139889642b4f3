"""Methods that choose, once a prompt has been read, by what its last queries attend to (arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, Most, Needs, SparseMethod
from agentkv.kernels.observed_scores import Observed, observed_columns, observed_scores
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob

_AT_ONCE = 128 << 20
"""Bytes of what query heads gave to keys that are looked at together."""
_WIDEST = 1025  # scores around one; a pool takes time by its width
_MOST = 1024  # queries that are kept of each row, in all layers


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
        if not 1 <= self.window <= _MOST:
            raise ValueError(f"window={self.window}: give 1 to {_MOST}")
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
        """The window and the answer. A later turn's choice stands beside the earlier one, which counts as held then."""
        if prompt <= self.capacity:
            return Most(tokens, Keep(0, 0))
        return Most(self.window + tokens - prompt, self.share(prompt))

    def seal(self, job: SealJob) -> Kept:
        """The best of each layer by what the last queries attend to."""
        seal, shape, rounds = job.work.seal, job.shape, []
        assert seal is not None
        for observed in self._observed(job, seal.floor):
            layers = observed.split(shape.num_kv_heads)
            rounds.append(observed.best(seal.slots, torch.cat([self.counts(layer, seal.slots) for layer in layers])))
        indices, counts = (torch.cat(each) for each in zip(*rounds, strict=True))
        return Kept(indices.view(shape.num_layers, shape.num_kv_heads, -1), counts.view(shape.num_layers, -1))

    def _observed(self, job: SealJob, floor: int) -> Iterator[Observed]:
        """By heads of all layers in order: of several layers together where the job says what they were given, or of one."""
        shape, runs = job.shape, job.work.runs
        how: dict[str, Any] = {name: getattr(self, name) for name in ("kernel", "pool", "reduce", "reduce_first")}
        step = max(1, _AT_ONCE // (4 * shape.num_heads * max(1, sum(end - start for start, end in runs))))
        for first in range(0, shape.num_layers, step):
            layers = range(first, min(first + step, shape.num_layers))
            given = job.observed(layers)
            if given is not None:
                older = sum(max(0, min(end, floor) - start) for start, end in runs)
                yield observed_columns(given.view(len(layers) * shape.num_kv_heads, -1, given.shape[2]), older, **how)
                continue
            for layer in layers:
                found = job.candidates(layer)
                older_ones = found.valid & (found.positions < floor)
                held = None if found.whole else found.valid
                yield observed_scores(job.queries(layer), found.k, held, older_ones, shape.scale, **how)

    def identity(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"capacity": length}

    def small(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"capacity": length // 2, "window": 8}
