"""How the tokens of a step spread over the experts of a model, and which experts' weights a step reads at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentkv.engine.experts import ExpertMLP
from agentkv.engine.loader import LoadedModel
from agentkv.kernels.experts import route


def expert_loads(loaded: LoadedModel, work: Callable[[], Any]) -> Tensor:
    """Rows that each expert of each layer that has some was given while `work` ran, `[num_layers, count]` on the CPU."""
    mlps = [module for module in loaded.model.modules() if isinstance(module, ExpertMLP)]
    loads = [torch.zeros(mlp.shape.count, dtype=torch.int64, device=loaded.device) for mlp in mlps]

    def count(mlp: ExpertMLP, into: Tensor) -> Callable[..., None]:
        def hook(gate: object, given: object, logits: Tensor) -> None:
            chosen, _ = route(logits, mlp.shape.active, mlp.shape.normed)
            into.add_(chosen.flatten().long().bincount(minlength=mlp.shape.count))

        return hook

    hooks = [mlp.gate.register_forward_hook(count(mlp, into)) for mlp, into in zip(mlps, loads, strict=True)]
    try:
        work()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(loads).cpu()


def idle_bytes(loaded: LoadedModel, loads: Tensor) -> int:
    """Bytes of the weights of experts that had no row."""
    mlps = [module for module in loaded.model.modules() if isinstance(module, ExpertMLP)]
    idle = (loads == 0).sum(1).tolist()
    parts = ([each.numel() * each.element_size() for each in mlp.experts.parameters()] for mlp in mlps)
    return sum(sum(sizes) // mlp.shape.count * count for mlp, sizes, count in zip(mlps, parts, idle, strict=True))


def spread(loads: Tensor) -> dict[str, float]:
    """Over layers: the busiest expert's rows against the mean of a layer, and the share of experts without any."""
    rows = loads.double()
    return {"busiest_over_mean": float((rows.amax(1) / rows.mean(1)).mean()), "idle": float((loads == 0).double().mean())}
