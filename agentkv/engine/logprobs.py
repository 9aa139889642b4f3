"""Log-probabilities of drawn tokens and of the likeliest, for the rows that ask, from the model's logits as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import RowWork, TokenScore
from agentkv.kernels.send import Fetched, send


class Scored:
    """Log-probabilities on their way to the host. lines: one for each work, None where there are none."""

    def __init__(self, works: Sequence[RowWork] = (), lines: Fetched | None = None) -> None:
        self._works, self._lines = works, lines

    def tell(self) -> None:
        """Set `score` of each work, when they are there."""
        lines = [] if self._lines is None else self._lines.tolist()
        for work, line in zip(self._works, lines, strict=True):
            half = (len(line) + 1) // 2
            top = zip((int(token) for token in line[half:]), line[1:half], strict=True)
            work.score = TokenScore(line[0], tuple(top)[: work.sampling.top_logprobs])


NOBODY = Scored()
"""Where no row asks."""


def score(logits: Tensor, tokens: Tensor, works: Sequence[RowWork]) -> Scored:
    """Log-probabilities for each work that asks for them. logits `[num_rows, vocab_size]`, tokens `[num_rows]`, one work each.

    Temperature 1, no penalties, no biases, no limits. Equal logits stand in order of token id.
    """
    asking = [index for index, work in enumerate(works) if work.sampling.logprobs]
    if not asking:
        return NOBODY
    rows = send(asking, logits.device)
    logprobs = logits[rows].double().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[rows].clamp(min=0).unsqueeze(1))  # -1: nothing was allowed
    count = max(works[index].sampling.top_logprobs for index in asking)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True) if count else (own[:, :0], own[:, :0])
    told = torch.cat([own, values[:, :count], ids[:, :count].double()], dim=1)  # one transfer
    return Scored([works[index] for index in asking], Fetched(told))
