"""The most attention that replayed queries pay to the tokens that they repeat (arXiv 2505.23416)."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kernels.chunk_attention import causal_attention
from agentkv.kernels.received_mass import received_mass
from agentkv.kernels.span_attention import span_attention


def replay_mass(q: Tensor, chunk: Tensor, sinks: Tensor, own: Tensor, scale: float, *, lens: Tensor | None = None) -> Tensor:
    """By key of the chunk the largest probability over all queries and the query heads of its group. The softmax is over three
    sets of keys: the first tokens of the sequence, the chunk, and what was replayed up to the query itself.

    q: `[num_queries, num_heads, head_dim]`, the last of the replayed tokens. chunk, sinks, own: keys
    `[num_kv_heads, n, head_dim]`; own: of all replayed tokens so far. lens: int32 `[num_kv_heads]`, sinks that a head holds.

    Returns float32 (float64 for float64) `[num_kv_heads, n]`.
    """
    count = chunk.shape[1]
    seen = torch.cat([chunk, sinks], 1)
    if lens is None:
        lens = torch.full((len(chunk),), sinks.shape[1], dtype=torch.int32, device=q.device)
    _, outside = span_attention(q, seen, seen, lens + count, scale)
    _, inside = causal_attention(q, own, own, scale, lse=True)
    assert inside is not None
    ends = torch.full((len(q),), count, dtype=torch.int32, device=q.device)
    return received_mass(q, chunk, torch.logaddexp(outside, inside), ends, scale, reduce="max")
