"""Root-mean-square norm over the last dim, in float32 whatever the dtype, as the checkpoints were trained."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kernels.native import compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., size]` divided by its root mean square, times weight (broadcast): a product in the weight's dtype.

    In one pass on the CPU and in one launch on a GPU, else in torch.
    """
    norm = compiled("norm", x, weight) if x.dim() == 2 and weight.dim() == 1 and x.stride(1) == 1 else None
    if norm is not None:
        y = torch.empty(x.shape, dtype=x.dtype)
        norm(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), *x.shape, eps, torch.get_num_threads())
        return y
    if _one_launch(x, weight):
        from agentkv.kernels.token_ops_triton import norm as launch

        return launch(x, weight, eps)[1]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """(x + delta, the norm of that) of x and delta `[num_tokens, size]` in one launch on a GPU; None where that cannot be."""
    if not _one_launch(x, weight) or delta.dtype != x.dtype or delta.stride(-1) != 1:
        return None
    from agentkv.kernels.token_ops_triton import norm as launch

    return launch(x, weight, eps, delta)


def _one_launch(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cuda or x.dim() != 2 or weight.dim() != 1 or x.stride(1) != 1:
        return False
    from agentkv.kernels.token_ops_triton import WIDEST, serves  # needs triton, which a CPU-only platform may lack

    return serves(x, weight) and x.shape[1] <= WIDEST
