"""Copy some tokens' vectors to given places."""

from __future__ import annotations

import torch
from torch import Tensor


def place_rows(target: Tensor, rows: Tensor, places: Tensor, source: Tensor, tokens: Tensor) -> None:
    """`target[rows[i], places[i]] = source[tokens[i]]`.

    target: `[max_rows, size, num_heads, head_dim]`, its last two dims contiguous. source: `[num_tokens, num_heads, head_dim]`
    of the same dtype, last dim contiguous. rows, places, tokens: int64 `[n]`; no place is there twice.
    """
    if target.is_cuda and target.dtype != torch.float64:
        from agentkv.kernels.place_rows_triton import write_rows

        write_rows(target, rows, places, source, tokens)
        return
    target[rows, places] = source[tokens]
