"""The gate of an MLP and the linear map before it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from agentkv.kernels.gate import gate
from agentkv.kernels.linear import MOST_TOKENS, linear


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Callable[[Tensor], Tensor] = functional.silu
) -> Tensor:
    """`gate` of what `linear` makes of x `[num_tokens, in_size]`, `[num_tokens, out_size / 2]`.

    For silu and a few tokens on a GPU in one launch, with the same roundings, where the shape is in `linear_triton.TABLE`.
    """
    if x.is_cuda and activation is functional.silu and len(x) <= MOST_TOKENS:
        from agentkv.kernels.linear_triton import stream, tile_for  # needs triton, which a CPU-only platform may lack

        tile = tile_for(x, weight, gated=True)
        if tile is not None:
            return stream(x, weight, bias, tile, gated=True)
    return gate(linear(x, weight, bias), activation)
