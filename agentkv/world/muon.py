"""Muon: momentum whose update is made orthogonal by a Newton-Schulz iteration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonal(updates: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices in the direction of `updates` `[count, rows, columns]`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = updates.bfloat16() if updates.is_cuda else updates.float()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    made: Tensor = x.mT if tall else x
    return made.to(updates.dtype)


class Muon(torch.optim.Optimizer):
    """For matrices only; matrices of one shape are updated together."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with Nesterov momentum."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, members in shapes.items():
                self._update(members, group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5, group["momentum"])

    def _update(self, members: list[Tensor], lr: float, momentum: float) -> None:
        grads = [p.grad for p in members if p.grad is not None]
        buffers: list[Tensor] = []
        for p in members:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            buffers.append(state["momentum"])
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)
        updates = orthogonal(torch.stack(ahead))
        torch._foreach_add_(members, list(updates.unbind(0)), alpha=-lr)
