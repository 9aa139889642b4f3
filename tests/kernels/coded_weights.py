"""Drawn e4m3 weights with a scale for each block of 128 x 128, and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, float32, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(*shape: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 weights of the shape, float32 scales by block, the float64 matrices they stand for). Scales differ by a lot."""
    *lead, outs, ins = shape
    weight = (drawn(*shape, seed=seed) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = drawn(*lead, -(-outs // 128), -(-ins // 128), seed=seed + 1).abs() / 60 + 1e-3
    row, column = torch.arange(outs) // 128, torch.arange(ins) // 128
    return weight, scale, weight.double() * scale.double()[..., row[:, None], column[None, :]]


def error(got: Tensor, want: Tensor) -> float:
    """Of all together, against the size of what is wanted."""
    assert got.shape == want.shape
    return float((got.double().cpu() - want).norm() / want.norm())
