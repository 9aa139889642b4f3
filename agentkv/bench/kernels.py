"""`agentkv bench kernels`: kernels on a GPU against the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from agentkv.bench.conditions import machine
from agentkv.bench.gpu_rows import Rig, decode_of
from agentkv.bench.paged_shapes import SHAPES, Shape
from agentkv.errors import BadRequest

__all__ = ["SHAPES", "Shape", "run_kernels"]


def run_kernels(*, repeats: int = 20, tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Paged decode attention in bf16, pages of 16 in random order, its merge included, replayed from a graph of several layers.

    Returns the conditions, the measured copy rate (bytes read and written, TB/s) and a row a shape: every repeat in
    microseconds a layer, the median, TB/s of the KV that is read, the share of the copy rate, the target, and whether it is
    met. BadRequest without an NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise BadRequest("bench kernels measures a GPU, and torch sees none here", hint="Run it on a machine with one")
    rig = Rig(torch.device("cuda"), repeats, peers=False)
    rig.measure_ceilings()
    rows = []
    for shape in SHAPES:
        found = decode_of(shape)(rig)
        middle, speed = median(found.us), found.more["tb_per_s"]
        row = {"name": shape.name, "us": found.us, "median_us": middle, "tb_per_s": speed, "share": found.value}
        row |= {"target": shape.share, "met": found.value >= shape.share}
        rows.append(row)
        if tell is not None:
            tell(f"{shape.name:20} {middle:8.1f} us {speed:6.2f} TB/s {found.value:6.1%} of copy, wanted {shape.share:.0%}")
    return {**machine(rig.device), "copy_tb_per_s": rig.copy, "decode_attention": rows}
