"""Integers from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def staged(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 `[len(values)]` in host memory from which copies to the device do not make the host wait. Torch keeps the memory
    until they are done."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")


def send(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 `[len(values)]` on the device; the host does not wait for the copy."""
    return staged(values, device).to(device, non_blocking=True)
