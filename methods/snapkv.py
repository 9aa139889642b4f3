"""What the end of a prompt looks at, chosen once, head by head (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from agentkv.engine.observing import Observing
from agentkv.engine.sparse import Plain, Read
from agentkv.kernels.reference import observe


@dataclass(frozen=True)
class SnapKV(Observing):
    """When a prompt has been read, each KV head keeps the tokens that its last queries attend to most, and those last tokens.

    The options are those of `Observing`. The paper's code stores every query head (here `reduce` over them), and pools each
    query head first; reduce_first is the code of arXiv 2407.11550.
    """

    capacity: int = 2048
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    reduce: Literal["mean", "max"] = "mean"
    reduce_first: bool = False

    paper: ClassVar[str | None] = "arXiv 2404.14469"
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    def reference(self, plain: Plain, layer: int) -> Read:
        """Scores one by one, sorted in Python."""
        k, v = plain.k[layer], plain.v[layer]
        every, positions = range(len(k) - plain.decoded), []
        how = (self.window, self.kernel, self.pool, self.reduce, self.reduce_first)
        scores = observe(plain.q[layer][: len(every)], k[: len(every)], plain.scale, *how)
        for by_token in scores:
            best = [at for _, at in sorted((-score, at) for at, score in enumerate(by_token))]
            chosen = {*best[: self.capacity - self.window], *every[-self.window :]}
            kept = [at for at in every if at in chosen or len(every) <= self.capacity]
            positions.append([*kept, *range(len(every), len(k))])
        return Read(positions, *([x[seen, head] for head, seen in enumerate(positions)] for x in (k, v)))
