"""Root-mean-square norm over the last dim, in float32 whatever the dtype, as the checkpoints were trained."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kernels.native import compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., size]` divided by its root mean square, times weight (broadcast): a product in the weight's dtype.

    In one pass on the CPU, else in torch.
    """
    norm = compiled("norm", x, weight) if x.dim() == 2 and weight.dim() == 1 and x.stride(1) == 1 else None
    if norm is not None:
        y = torch.empty(x.shape, dtype=x.dtype)
        norm(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), *x.shape, eps, torch.get_num_threads())
        return y
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)
