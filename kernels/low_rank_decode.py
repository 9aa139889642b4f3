"""Attention over keys and values kept as low-rank latents of groups of heads, in plain torch (arXiv 2407.21118).

A key is rebuilt as latent @ factor, normed where the family norms keys, and turned at its own position: rotation stands
between query and factor, so the key side cannot be folded. Values are summed as latents and rebuilt once, behind the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.kernels.running_softmax import RunningSoftmax, row_spans, row_tiles, tile_bias, visible


@dataclass(frozen=True, slots=True)
class LowRankPages:
    """One layer. k, v: latents before rotation `[num_granules, page_size, num_groups, rank]`, rows may overlap, ranks may
    differ; KV heads are shared out to groups in order. k_factor, v_factor: `[num_kv_heads, rank, head_dim]`. k_bias, v_bias:
    `[num_kv_heads, head_dim]`, of projections that have one. k_norm: RMS norm of keys, `[num_kv_heads, head_dim]`, with eps.
    frequency: float32 `[rotated / 2]`, radians a position; channels past `rotated` are not turned.
    """

    k: Tensor
    v: Tensor
    k_factor: Tensor
    v_factor: Tensor
    frequency: Tensor
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        heads, groups = self.k_factor.shape[0], self.k.shape[2]
        if heads % groups or self.v.shape[2] != groups or self.v_factor.shape[0] != heads:
            raise ValueError(f"{heads} KV heads are not shared out to {groups} groups of keys and {self.v.shape[2]} of values")
        if self.k.shape[3] != self.k_factor.shape[1] or self.v.shape[3] != self.v_factor.shape[1]:
            raise ValueError(
                f"latents of rank {self.k.shape[3]} and {self.v.shape[3]}, factors of {self.k_factor.shape[1]} and "
                f"{self.v_factor.shape[1]}"
            )
        if 2 * len(self.frequency) > self.k_factor.shape[2]:
            raise ValueError(f"{len(self.frequency)} frequencies for {self.k_factor.shape[2]} channels")


def low_rank_bytes_per_token(rank_k: int, rank_v: int, num_groups: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of one token's latents in one layer."""
    return (rank_k + rank_v) * num_groups * dtype.itemsize


def rebuild_keys(payload: LowRankPages, latents: Tensor, positions: Tensor) -> Tensor:
    """Turned keys `[num_kv_heads, num_slots, head_dim]` of latents `[num_slots, num_groups, rank_k]`, in their dtype.

    positions: int64 `[num_slots]`. Angles are made in float32, as the models make them.
    """
    k = _spread(latents, len(payload.k_factor)) @ payload.k_factor.to(latents.dtype)
    if payload.k_bias is not None:
        k = k + payload.k_bias.to(k.dtype).unsqueeze(1)
    if payload.k_norm is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + payload.eps) * payload.k_norm.to(k.dtype).unsqueeze(1)
    angle = positions.float().unsqueeze(1) * payload.frequency
    cos, sin, half = angle.cos().to(k.dtype), angle.sin().to(k.dtype), len(payload.frequency)
    first, second, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def rebuild_values(payload: LowRankPages, latents: Tensor) -> Tensor:
    """Values `[num_kv_heads, num_slots, head_dim]` of latents `[num_slots, num_groups, rank_v]`, in their dtype."""
    v = _spread(latents, len(payload.v_factor)) @ payload.v_factor.to(latents.dtype)
    return v if payload.v_bias is None else v + payload.v_bias.to(v.dtype).unsqueeze(1)


def gather_low_rank(
    payload: LowRankPages, entries: Tensor, length: int, positions: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Turned K and V `[num_kv_heads, length, head_dim]` of a row's first slots. entries: int32, the row of the table.

    positions: int64 `[>= length]` of the slots, None where slot s is at s.
    """
    pages = entries[: -(-length // payload.k.shape[1])].to(torch.int64)
    k, v = (part[pages].flatten(0, 1)[:length].to(dtype) for part in (payload.k, payload.v))
    places = torch.arange(length, device=k.device) if positions is None else positions[:length]
    return rebuild_keys(payload, k, places), rebuild_values(payload, v)


def low_rank_decode(
    q: Tensor,
    payload: LowRankPages,
    entries: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    *,
    positions: Tensor | None = None,
    counts: Sequence[int] | None = None,
    starts: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of a few turned query tokens a row over latents; see `dequant_decode` for what is not said here.

    q: `[num_tokens, num_heads, head_dim]`. positions: int64 `[num_rows, max_len]`, of each slot; None where slot s is at s.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_kv_heads, picked = len(payload.k_factor), entries[rows]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for row, span in enumerate(row_spans(len(rows), len(q), counts)):
        state = RunningSoftmax(q[span].to(wide) * scale, num_kv_heads, payload.v_factor.shape[1])
        first = None if starts is None else starts[span]
        for granules, slots in row_tiles(picked[row], payload.k.shape[1]):
            k, v = (part[granules].flatten(0, 1).to(wide) for part in (payload.k, payload.v))
            places = slots if positions is None else positions[row][slots.clamp(max=positions.shape[1] - 1)]
            extra = tile_bias(bias, row, slots)
            seen = visible(slots, lens[row], span.stop - span.start, causal, first, extra)
            state.add(rebuild_keys(payload, k, places), _spread(v, num_kv_heads), seen, extra)
        latent, lse[span] = state.result()
        out[span] = absorb_values(payload, latent, lse[span])
    return out, lse


def absorb_values(payload: LowRankPages, latent: Tensor, lse: Tensor) -> Tensor:
    """out `[num_tokens, num_heads, head_dim]` of summed value latents `[num_tokens, num_heads, rank_v]`, in their dtype.

    lse: `[num_tokens, num_heads]`; where it is -inf out is 0, whatever the bias.
    """
    heads = len(payload.v_factor)
    by_head = torch.unflatten(latent, 1, (heads, -1))
    out = torch.einsum("thgr,hrd->thgd", by_head, payload.v_factor.to(latent.dtype))
    if payload.v_bias is not None:
        out = out + payload.v_bias.to(out.dtype).unsqueeze(1)
    return out.flatten(1, 2).masked_fill((lse == -torch.inf).unsqueeze(-1), 0)


def _spread(latents: Tensor, num_kv_heads: int) -> Tensor:
    """`[num_kv_heads, num_slots, rank]`: each head's group's latents. latents: `[num_slots, num_groups, rank]`."""
    return latents.transpose(0, 1).repeat_interleave(num_kv_heads // latents.shape[1], 0)
