"""Linear maps of a few tokens on the CPU: every weight is read once, at the speed of memory (`linear` of native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.kernels.native import compiled

MOST_TOKENS = 16
"""With more tokens the library's product is faster."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[num_tokens, out_size]` of x `[num_tokens, in_size]`, weight `[out_size, in_size]` and bias `[out_size]`.

    Up to MOST_TOKENS tokens on the CPU, a token's result is the same bits whatever the other tokens are.
    """
    num_tokens = x.shape[0]
    multiply = compiled("linear", x, weight) if num_tokens <= MOST_TOKENS else None
    if multiply is None or x.stride(1) != 1 or not weight.is_contiguous():
        return functional.linear(x, weight, bias)
    y = torch.empty(num_tokens, weight.shape[0], dtype=x.dtype)
    added = None if bias is None else bias.data_ptr()
    threads = torch.get_num_threads()
    multiply(x.data_ptr(), x.stride(0), weight.data_ptr(), added, y.data_ptr(), num_tokens, *weight.shape, threads)
    return y
