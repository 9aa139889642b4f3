"""The gate of an MLP: SwiGLU, or with another activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.kernels.native import compiled


def gate(x: Tensor, activation: Callable[[Tensor], Tensor] = functional.silu) -> Tensor:
    """The activation of the first half of x `[num_tokens, 2 * size]`, times the second.

    In one pass for silu on the CPU and in one launch on a GPU, else in torch.
    """
    multiply = compiled("gate", x) if activation is functional.silu and x.is_contiguous() else None
    if multiply is not None:
        y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
        multiply(x.data_ptr(), y.data_ptr(), *y.shape, torch.get_num_threads())
        return y
    if activation is functional.silu and x.is_cuda and x.is_contiguous():
        from agentkv.kernels import token_ops_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(x):
            return fused.swiglu(x)
    gated, up = x.chunk(2, dim=-1)
    return activation(gated) * up
