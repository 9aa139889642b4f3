"""One budget for the heads of a layer: who attends widely keeps more (arXiv 2407.11550)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.engine.observing import Observing
from agentkv.engine.sparse import Keep, Plain, Read
from agentkv.kernels.observed_scores import Observed
from agentkv.kernels.reference import observe
from agentkv.kernels.top_positions import top_positions


@dataclass(frozen=True)
class AdaKV(Observing):
    """The heads of a layer share what each would keep of the tokens before the window: the best of all heads together stay.

    Beside the options of `Observing`, whose capacity is the average of the heads, and whose reduce_first is as in the paper's
    code: safeguard: share of the capacity that each head is sure of. allocation: "floor": int(capacity * safeguard) of a head's
    best stay, the window among them, the heads compete for the rest, and the total is exact (as in NVIDIA's kvpress); "blend":
    the count that a head wins alone, averaged with the even one by the safeguard and rounded (as in the paper's code).
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["avg", "max"] = "max"
    reduce: Literal["mean", "max"] = "mean"
    reduce_first: bool = True
    safeguard: float = 0.2
    allocation: Literal["floor", "blend"] = "floor"

    paper: ClassVar[str | None] = "arXiv 2407.11550"
    counts_on_host: ClassVar[bool] = False
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.safeguard <= 1:
            raise ValueError(f"safeguard={self.safeguard}: give 0 to 1")
        self.check_words(allocation=("floor", "blend"))

    @property
    def _share(self) -> int:
        """Tokens before the window that a head keeps on average."""
        return self.capacity - self.window

    def share(self, floor: int) -> Keep:
        """A head may win all; rounding may add one to the mean."""
        return Keep(floor, floor, mean=self._share + (self.allocation == "blend"))

    def counts(self, observed: Observed, slots: int) -> Tensor:
        """What each head wins."""
        scores, lens = observed.scores, observed.lens
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

    def reference(self, plain: Plain, layer: int) -> Read:
        """Scores one by one, sorted in Python."""
        k, v = plain.k[layer], plain.v[layer]
        every = range(len(k) - plain.decoded)
        how = (self.window, self.kernel, self.pool, self.reduce, self.reduce_first)
        scores = observe(plain.q[layer][: len(every)], k[: len(every)], plain.scale, *how)
        older, mean = every[: -self.window], self.capacity - self.window
        ranks = [[at for _, at in sorted((-score, at) for at, score in enumerate(mine))] for mine in scores]
        sure = max(1, int(self.capacity * self.safeguard)) - self.window if self.safeguard and self.allocation == "floor" else 0
        safe = [set(rank[: max(0, sure)]) for rank in ranks]
        rest = [(-scores[head][at], head, at) for head in range(len(scores)) for at in older if at not in safe[head]]
        won = [head for _, head, _ in sorted(rest)[: len(scores) * mean - sum(map(len, safe))]]
        positions = []
        for head, rank in enumerate(ranks):
            count = len(safe[head]) + won.count(head)
            if self.allocation == "blend":
                count = round(count * (1 - self.safeguard) + int(mean * self.safeguard))
            chosen = {*rank[:count], *every[-self.window :]}
            kept = [at for at in every if at in chosen or len(every) <= self.capacity]
            positions.append([*kept, *range(len(every), len(k))])
        return Read(positions, *([x[seen, head] for head, seen in enumerate(positions)] for x in (k, v)))
