"""Linear maps of a few tokens: every weight is read once, at the speed of memory (`linear` of native.cpp, `linear_triton`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.kernels.native import compiled

MOST_TOKENS = 16
"""With more tokens the library's product is faster."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[num_tokens, out_size]` of x `[num_tokens, in_size]`, weight `[out_size, in_size]` and bias `[out_size]`.

    Up to MOST_TOKENS tokens on the CPU, a token's result is the same bits whatever the other tokens are; on a GPU too where
    the shape is in its table (`linear_triton.TABLE`).
    """
    num_tokens = x.shape[0]
    if x.is_cuda and num_tokens <= MOST_TOKENS:
        from agentkv.kernels.linear_triton import stream, tile_for  # needs triton, which a CPU-only platform may lack

        tile = tile_for(x, weight)
        return functional.linear(x, weight, bias) if tile is None else stream(x, weight, bias, tile)
    multiply = compiled("linear", x, weight) if num_tokens <= MOST_TOKENS else None
    if multiply is None or x.stride(1) != 1 or not weight.is_contiguous():
        return functional.linear(x, weight, bias)
    y = torch.empty(num_tokens, weight.shape[0], dtype=x.dtype)
    added = None if bias is None else bias.data_ptr()
    threads = torch.get_num_threads()
    multiply(x.data_ptr(), x.stride(0), weight.data_ptr(), added, y.data_ptr(), num_tokens, *weight.shape, threads)
    return y
