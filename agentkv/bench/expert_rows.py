"""Experts and block-FP8 linear maps of the shape of Qwen3-30B-A3B, against the bytes of their weights or the matmul rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentkv.bench.device_times import graph_of, times
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.kernels.block_fp8 import block_linear, blocks
from agentkv.kernels.experts import Stacked, expert_mlp

EXPERTS, ACTIVE, HIDDEN, INNER = 128, 8, 2048, 768
MAPS = ((5120, 2048), (2048, 4096), (19456, 2560), (2560, 9728))
"""Outputs and inputs: of attention in this model, of the MLP in Qwen3-4B."""
_COLD = 160 << 20  # bytes of weights in a replay, so that none is found in the cache


def expert_rows() -> Iterator[Row]:
    """A decode step's tokens and a chunk's, weights in block FP8 and bfloat16; linear maps of few rows."""
    for kind in ("e4m3 weights", "bf16"):
        yield Row(f"experts of qwen3-30b-a3b, {kind}, 100 tokens", "of copy", None, _experts(kind, 100))
    many = _experts("e4m3 weights", 8192)
    yield Row("experts of qwen3-30b-a3b, e4m3 weights, 8,192 tokens", "of the matmul rate", None, many)
    yield Row("linear maps of e4m3 weights, 1 to 128 rows", "of copy, the least", None, _maps)


def drawn_blocks(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    """e4m3 weights of the shape, normal with deviation 64, and a scale for each block."""
    *lead, outs, ins = shape
    weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for part in torch.split(weight.view(-1), 64 << 20):
        part.copy_((torch.randn(part.shape, device=device) * 64).clamp_(-448, 448))
    return weight, torch.rand(*lead, blocks(outs), blocks(ins), device=device) * 1e-3


def _experts(kind: str, tokens: int) -> Callable[[Rig], Measured]:
    """Tokens go to experts drawn at random, which balances them as chance does. Few tokens: weights read over the copy rate;
    many: operations over the matmul rate. The router is not in it, grouping and the sum are."""

    def measure(rig: Rig) -> Measured:
        count, hidden, inner, num = (8, 128, 128, 12) if rig.tiny else (EXPERTS, HIDDEN, INNER, tokens)
        active = min(ACTIVE, count // 4)
        dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
        maps = [Stacked(*drawn_blocks(rig.device, count, *shape)) for shape in ((2 * inner, hidden), (hidden, inner))]
        if kind == "bf16":
            maps = [Stacked(each.weight.to(dtype)) for each in maps]
        chosen = torch.rand(num, count, device=rig.device).argsort(1)[:, :active].int().contiguous()
        weights = torch.rand(num, active, device=rig.device)
        x = torch.randn(num, hidden, device=rig.device).to(dtype)
        us = times(graph_of(lambda: expert_mlp(x, chosen, weights, maps[0], maps[1]), rig.device), rig.device, rig.repeats)
        read = int((chosen.flatten().long().bincount() > 0).sum()) * 3 * inner * hidden * maps[0].weight.element_size()
        flops = 2.0 * num * active * 3 * inner * hidden
        more: dict[str, Any] = {"tb_per_s": read / median(us) / 1e6, "tflop_per_s": flops / median(us) / 1e6}
        if tokens > 1000:
            return Measured(us, more["tflop_per_s"] / rig.matmul, rig.matmul, "TFLOP/s", more=more)
        return Measured(us, more["tb_per_s"] / rig.copy, rig.copy, "TB/s", more=more)

    return measure


def _maps(rig: Rig) -> Measured:
    """us: of each map with 8 rows. sweep: by map and rows, microseconds and the share of the copy rate."""
    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
    sweep: list[dict[str, Any]] = []
    for outs, ins in ((256, 128),) if rig.tiny else MAPS:
        copies = 1 if rig.tiny else max(3, _COLD // (outs * ins))
        drawn = [drawn_blocks(rig.device, outs, ins) for _ in range(copies)]
        for rows in (1, 8, 64, 128):
            x = torch.randn(rows, ins, device=rig.device).to(dtype)
            work = graph_of(partial(_all, x, drawn), rig.device)
            us = median(times(work, rig.device, rig.repeats)) / copies
            sweep.append({"map": f"{ins} to {outs}", "rows": rows, "us": us, "of_copy": outs * ins / us / 1e6 / rig.copy})
    least = min(each["of_copy"] for each in sweep)
    return Measured([each["us"] for each in sweep if each["rows"] == 8], least, rig.copy, "TB/s", more={"sweep": sweep})


def _all(x: Tensor, maps: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [block_linear(x, *each) for each in maps]
