"""An MLP of experts: a router sends each token to a few of many gated MLPs, whose results are weighted and summed."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from agentkv.engine.layers import ACTIVATIONS, ModelConfig, PackedWeight
from agentkv.kernels.experts import Stacked, expert_mlp, route
from agentkv.kernels.linear import linear


class StackedLinear(PackedWeight):
    """Linear maps of each of `count` experts. weight: `[count, sum(sizes), in_size]`."""

    def __init__(self, count: int, in_size: int, sizes: tuple[int, ...]) -> None:
        super().__init__(in_size, sizes, count)
        self.count = count
        self.register_parameter("weight_scale_inv", None)

    def rows(self, parameter: str) -> tuple[int, ...]:
        """See `PackedWeight.rows`: expert by expert."""
        return self.sizes * self.count

    @property
    def maps(self) -> Stacked:
        """The weights, with their scales if they have any."""
        return Stacked(self.weight, cast(Tensor | None, self.weight_scale_inv))


class Router(nn.Module):
    """Scores of the experts, `[num_tokens, count]`."""

    def __init__(self, in_size: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, in_size))

    def forward(self, x: Tensor) -> Tensor:
        """Of normed hidden states x `[num_tokens, in_size]`."""
        return linear(x, self.weight)


class Experts(nn.Module):
    """The weights of all experts of a layer."""

    def __init__(self, count: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_up_proj = StackedLinear(count, hidden_size, (inner_size, inner_size))
        self.down_proj = StackedLinear(count, inner_size, (hidden_size,))


class ExpertMLP(nn.Module):
    """Router and experts in the place of a layer's MLP. BadModel's checks are done: `config.experts` is there."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.shape = config.experts
        self.gate = Router(config.hidden_size, self.shape.count)
        self.experts = Experts(self.shape.count, config.hidden_size, self.shape.inner_size)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Output `[num_tokens, hidden_size]` of normed hidden states x of the same shape."""
        chosen, weights = route(self.gate(x), self.shape.active, self.shape.normed)
        experts = self.experts
        return expert_mlp(x, chosen, weights, experts.gate_up_proj.maps, experts.down_proj.maps, self.activation)
