"""Numbers from the host to a device, without making the host wait for the copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def staged(values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[len(values)]` in host memory from which copies do not wait. Torch keeps the memory until they are done."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def send(values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[len(values)]` on the device."""
    return staged(values, device, dtype).to(device, non_blocking=True)


def carry(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
