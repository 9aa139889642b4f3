"""Experts of an MLP: which ones a token goes to, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.kernels.block_fp8 import dequantize_blocks
from agentkv.kernels.gate import gate
from agentkv.kernels.linear import linear


class Stacked(NamedTuple):
    """Linear maps of all experts. weight: `[num_experts, out_size, in_size]`; scale: of e4m3 weights, by expert and block of
    128 x 128, None for plain ones."""

    weight: Tensor
    scale: Tensor | None = None

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's plain weight `[out_size, in_size]`."""
        weight = self.weight[expert]
        return weight if self.scale is None else dequantize_blocks(weight, self.scale[expert], dtype)


def route(logits: Tensor, active: int, normed: bool) -> tuple[Tensor, Tensor]:
    """(experts int32, weights float32), each `[num_tokens, active]`: of logits `[num_tokens, num_experts]` the softmax in
    float32, its largest values in falling order. normed: they are divided by their sum. Of equal ones the GPU takes the first.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from agentkv.kernels import experts_triton as fused  # needs triton, which a CPU-only platform may lack

        return fused.route(logits, active, normed)
    weights, chosen = torch.topk(logits.softmax(-1, dtype=torch.float32), active)
    return chosen.to(torch.int32), weights / weights.sum(-1, keepdim=True) if normed else weights


def expert_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Stacked,
    down: Stacked,
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Tensor:
    """`[num_tokens, in_size]`: the chosen experts' gated MLPs of x `[num_tokens, in_size]`, weighted and summed over slots.

    chosen and weights as `route` gives them. gate_up: `[num_experts, 2 * inner, in_size]`, gates before ups; down:
    `[num_experts, in_size, inner]`. On a GPU nothing waits for the host, and each expert's weights are read once while its rows
    fit a tile; on a CPU up to 16 tokens give the same bits whatever the others are.
    """
    num_tokens, active = chosen.shape
    if activation is functional.silu and x.is_cuda and num_tokens:
        from agentkv.kernels import experts_triton as fused  # needs triton, which a CPU-only platform may lack

        if fused.serves(x, x.shape[1], down.weight.shape[2]):
            order, starts = fused.group(chosen, gate_up.weight.shape[0])
            inner = fused.gate_up(x, order, starts, *gate_up)
            return fused.down(inner, order, starts, weights, *down).sum(1)
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    slots = torch.empty(num_tokens * active, x.shape[1], dtype=x.dtype, device=x.device)
    counts = flat.bincount(minlength=gate_up.weight.shape[0]).tolist()
    for expert, rows in enumerate(torch.split_with_sizes(order, counts)):
        if len(rows):
            inner = gate(linear(x[rows // active], gate_up.of(expert, x.dtype)), activation)
            slots[rows] = linear(inner, down.of(expert, x.dtype))
    return (slots.view(num_tokens, active, x.shape[1]) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
