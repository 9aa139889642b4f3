"""Rotary embedding of heads, with their norm before it where the family has one."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kernels.native import compiled
from agentkv.kernels.rms_norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Halves of each head turned by the token's angles, after `rms_norm` where there is a weight.

    x: `[num_tokens, num_heads, head_dim]`. cos, sin: `[num_tokens, 1, head_dim / 2]`. weight: `[num_heads, head_dim]`. In one
    pass on the CPU and in one launch on a GPU, else in torch.
    """
    _, num_heads, dim = x.shape
    dense = x.stride()[1:] == (dim, 1) and cos.is_contiguous() and sin.is_contiguous()
    turn = compiled("turn", x, cos, sin, *(() if weight is None else (weight,))) if dense else None
    if turn is not None:
        y = torch.empty(x.shape, dtype=x.dtype)
        by_head = None if weight is None else weight.data_ptr()
        angles = cos.data_ptr(), sin.data_ptr()
        turn(x.data_ptr(), x.stride(0), by_head, *angles, y.data_ptr(), len(x), num_heads, dim, eps, torch.get_num_threads())
        return y
    if dense and x.is_cuda:
        from agentkv.kernels import token_ops_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(x, cos, sin, *(() if weight is None else (weight,))):
            return fused.turn(x, cos, sin, weight, eps)
    if weight is not None:
        x = rms_norm(x, weight, eps)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
