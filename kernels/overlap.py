"""Kernels that begin while the one before them ends: programmatic dependent launch, of Hopper GPUs and later ones.

A kernel launched so takes its place on the device as soon as all programs of the one before it have begun and there is room,
and waits there until that one has ended: neither its launch nor what it does before it waits costs time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Stands before all that reads or writes what other kernels may write or read: the kernel behind may take its place, and
    this one goes on when those before it have ended."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlapping(device: torch.device) -> dict[str, bool]:
    """Arguments of the launch of a kernel that has OVERLAP and calls `follow`."""
    return {"OVERLAP": True, "launch_pdl": True} if _can_overlap(device) else {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
