"""Log-probabilities of drawn tokens and of the likeliest, for the rows that ask, from the model's logits as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import RowWork, TokenScore
from agentkv.kernels.send import send


def score(logits: Tensor, tokens: Tensor, works: Sequence[RowWork]) -> None:
    """Set `score` of each work that asks for it. logits `[num_rows, vocab_size]`, tokens `[num_rows]`, one work each.

    Temperature 1, no penalties, no biases, no limits. Equal logits stand in order of token id.
    """
    asking = [index for index, work in enumerate(works) if work.sampling.logprobs]
    if not asking:
        return
    rows = send(asking, logits.device)
    logprobs = logits[rows].double().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[rows].clamp(min=0).unsqueeze(1))  # -1: nothing was allowed
    count = max(works[index].sampling.top_logprobs for index in asking)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True) if count else (own[:, :0], own[:, :0])
    told = torch.cat([own, values[:, :count], ids[:, :count].double()], dim=1).tolist()  # one transfer
    for index, line in zip(asking, told, strict=True):
        work, half = works[index], (len(line) + 1) // 2
        top = zip((int(token) for token in line[half:]), line[1:half], strict=True)
        work.score = TokenScore(line[0], tuple(top)[: work.sampling.top_logprobs])
