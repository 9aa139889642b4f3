"""The methods that whole-model rows compare, each as its defaults are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from agentkv import methods
from agentkv.bench.decode_step import row_model
from agentkv.bench.gpu_rows import Rig
from agentkv.engine.preparation import Preparation
from agentkv.engine.sparse import SparseMethod
from agentkv.kernels.low_rank_factors import Prepared

TINY = {
    "quest": "quest:budget=32", "omnikv": "omnikv:budget=40,observers=(0,)", "snapkv": "snapkv:capacity=64,window=16",
    "kivi": "kivi:group=16,residual=32", "fp8_kv": "fp8_kv", "streamingllm": "streamingllm:recent=60",
    "adakv": "adakv:capacity=64,window=16", "kvzip": "kvzip:chunk=64", "h2o": "h2o:heavy=16,recent=16",
    "palu": "palu",
}  # fmt: skip
"""The methods, and how each is set for the tiny model. On a GPU each has its own defaults."""
FACTORS = {"palu": 4}
"""Methods that read prepared factors, and of how many KV heads each group of theirs is at most."""


def row_text(rig: Rig, name: str) -> str:
    """A method of `TINY` as people write it."""
    return TINY[name] if rig.tiny else name


def row_method(rig: Rig, name: str) -> SparseMethod:
    """The same, prepared if it must be."""
    found = methods.parse(row_text(rig, name))
    if name not in FACTORS:
        return found
    more: dict[str, Any] = {"prepared": _drawn_factors(rig, FACTORS[name])}
    return replace(found, **more)


def _drawn_factors(rig: Rig, group: int) -> Prepared:
    """Factors in the shapes that are prepared of the row's model, drawn as its weights are. Once a run."""
    if "factors" not in rig.kept:
        c = Preparation(row_model(rig))
        shape, draw = c.shape, torch.Generator().manual_seed(0)
        heads = next(count for count in range(group, 0, -1) if shape.num_kv_heads % count == 0)
        groups, rank = shape.num_kv_heads // heads, min(heads * shape.head_dim, shape.hidden_size)
        tensors = {"frequency": c.frequency}
        for side in "kv":
            down, up = (shape.num_layers, groups, rank), (shape.num_layers, shape.num_kv_heads, rank)
            tensors[f"{side}.down"] = torch.randn(*down, shape.hidden_size, generator=draw) * shape.hidden_size**-0.5
            tensors[f"{side}.up"] = torch.randn(*up, shape.head_dim, generator=draw) * rank**-0.5
        if shape.key_norm:
            tensors["k.norm"] = torch.ones(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        rig.kept["factors"] = Prepared("", tensors, "drawn", shape.fingerprint, heads * shape.head_dim, groups, rank, c.eps)
    found: Prepared = rig.kept["factors"]
    return found
