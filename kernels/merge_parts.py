"""Merge attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of the parts.

    outs: `[num_tokens, num_heads, head_dim]` each. lses: natural log-sum-exp of the scaled scores, `[num_tokens,
    num_heads]` each; -inf where a part has no key for that token (its `out` must be finite). Summed in the given order.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    if len(outs) == 2 and outs[0].is_cuda and lses[0].dtype == torch.float32:
        from agentkv.kernels.merge_parts_triton import merge_two  # needs triton, which a CPU-only platform may lack

        return merge_two((outs[0], outs[1]), (lses[0], lses[1]))
    stacked = torch.stack(list(lses))
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - total).nan_to_num(nan=0.0)
    merged = torch.zeros_like(outs[0], dtype=stacked.dtype)
    for out, weight in zip(outs, weights, strict=True):
        merged += out * weight.unsqueeze(-1)
    return merged.to(outs[0].dtype), total
