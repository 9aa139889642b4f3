"""Numbers from the host to a device and back, without making the host wait for the copy."""

# mypy: disable-error-code="no-untyped-call"
# (torch's events)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Fetched:
    """A copy of a tensor on its way to the host; the tensor may be written over as soon as this was made."""

    def __init__(self, given: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not given.is_cuda:
            self._host = given.clone()
        else:
            self._host = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
            self._host.copy_(given, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(given.device))

    def tolist(self) -> list[Any]:
        """What it holds, when it is there."""
        if self._event is not None:
            self._event.synchronize()
        found: list[Any] = self._host.tolist()
        return found
