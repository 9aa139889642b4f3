"""One budget for the heads of a layer: who attends widely keeps more (arXiv 2407.11550)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, Most, Needs, Plain, Read, SparseMethod
from agentkv.kernels.observed_scores import observed_scores
from agentkv.kernels.reference import observe
from agentkv.kernels.top_positions import top_positions
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob


@dataclass(frozen=True)
class AdaKV(SparseMethod):
    """The heads of a layer share what each would keep of the tokens before the window: the best of all heads together stay.

    Tokens are scored by the last queries of the prompt (arXiv 2404.14469), once the prompt has been read; in a chain each turn
    chooses anew, from what the last one kept and all that came since. A turn with fewer new tokens than the window is observed
    by those alone; the window's tokens stay all the same.

    capacity: tokens that a head keeps on average, the window included. window, kernel, pool, reduce: of the scores. safeguard:
    share of the capacity that each head is sure of. allocation: "floor": int(capacity * safeguard) of a head's best stay, the
    window among them, the heads compete for the rest, and the total is exact (as in NVIDIA's kvpress); "blend": the count that
    a head wins alone, averaged with the even one by the safeguard and rounded (as in the paper's code). reduce_first: reduce
    before the pool, as the paper's code does.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["avg", "max"] = "max"
    safeguard: float = 0.2
    allocation: Literal["floor", "blend"] = "floor"
    reduce: Literal["mean", "max"] = "mean"
    reduce_first: bool = True

    family: ClassVar[str] = "eviction"
    paper: ClassVar[str | None] = "arXiv 2407.11550"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    counts_on_host: ClassVar[bool] = False
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "head"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: give 1 or more")
        if self.capacity <= self.window:
            raise ValueError(f"capacity={self.capacity}: give more than window={self.window}, which it includes")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}: give an odd number of 1 or more")
        if not 0 <= self.safeguard <= 1:
            raise ValueError(f"safeguard={self.safeguard}: give 0 to 1")
        for name, known in (("pool", ("avg", "max")), ("reduce", ("mean", "max")), ("allocation", ("floor", "blend"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: give {known[0]!r} or {known[1]!r}")

    @property
    def needs(self) -> Needs:
        """The queries that observe."""
        return Needs(query_window=self.window)

    @property
    def _share(self) -> int:
        """Tokens before the window that a head keeps on average."""
        return self.capacity - self.window

    @property
    def _mean(self) -> int:
        """The most of them: rounding may add one."""
        return self._share + (self.allocation == "blend")

    def keep(self, held: Held) -> Keep | None:
        """Once a prompt is longer than the capacity, all but its window is sealed."""
        if not held.prompt_end or held.tokens <= self.capacity:
            return None
        floor = max(held.floor, held.tokens - self.window)
        return Keep(floor, min(floor, held.slots + held.tail), mean=self._mean)

    def most(self, prompt: int, tokens: int) -> Most:
        """The window and the answer; a later turn's choice stands beside the earlier one for a moment."""
        if prompt <= self.capacity:
            return Most(tokens, Keep(0, 0))
        return Most(self.window + tokens - prompt, Keep(prompt, prompt, mean=self._mean), again=True)

    def seal(self, job: SealJob) -> Kept:
        """The best of each layer by what the last queries attend to."""
        seal, scale, layers = job.work.seal, job.shape.scale, []
        how: dict[str, Any] = {name: getattr(self, name) for name in ("kernel", "pool", "reduce", "reduce_first")}
        assert seal is not None
        for layer in range(job.shape.num_layers):
            found = job.candidates(layer)
            older = found.valid & (found.positions < seal.floor)
            observed = observed_scores(job.queries(layer), found.k, found.valid, older, scale, **how)
            layers.append(observed.best(seal.slots, self._counts(observed.scores, observed.lens)))
        indices, counts = zip(*layers, strict=True)
        return Kept(torch.stack(indices), torch.stack(counts))

    def _counts(self, scores: Tensor, lens: Tensor) -> Tensor:
        """Tokens that each head may keep, int32 `[num_kv_heads]`. scores `[num_kv_heads, n]`, of the first `lens` columns."""
        heads, length = scores.shape
        sure = max(1, int(self.capacity * self.safeguard)) - self.window
        if self.allocation == "floor" and self.safeguard > 0 and sure > 0:
            best = top_positions(scores, sure, lens=lens).to(torch.int64)
            scores = functional.pad(scores, (0, 1)).scatter(1, best, torch.inf)[:, :length]
        winners = top_positions(scores.flatten(), heads * self._share).to(torch.int64) // length
        wins = torch.zeros(heads + 1, dtype=torch.int32, device=scores.device)
        wins = wins.index_add(0, winners, torch.ones_like(winners, dtype=torch.int32))[:heads]
        if self.allocation == "floor":
            return wins
        return (wins.double() * (1 - self.safeguard) + int(self._share * self.safeguard)).round().to(torch.int32)

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
        every, older = range(len(k)), range(max(0, len(k) - self.window))
        ranks = [[at for _, at in sorted((-score, at) for at, score in enumerate(mine))] for mine in scores]
        sure = max(1, int(self.capacity * self.safeguard)) - self.window if self.safeguard and self.allocation == "floor" else 0
        safe = [set(rank[: max(0, sure)]) for rank in ranks]
        rest = [(-scores[head][at], head, at) for head in range(len(scores)) for at in older if at not in safe[head]]
        won = [head for _, head, _ in sorted(rest)[: len(scores) * self._share - sum(map(len, safe))]]
        positions = []
        for head, rank in enumerate(ranks):
            count = len(safe[head]) + won.count(head)
            if self.allocation == "blend":
                count = round(count * (1 - self.safeguard) + int(self._share * self.safeguard))
            chosen = {*rank[:count], *every[-self.window :]}
            positions.append([at for at in every if at in chosen or len(k) <= self.capacity])
        return Read(positions, *([x[seen, head] for head, seen in enumerate(positions)] for x in (k, v)))
