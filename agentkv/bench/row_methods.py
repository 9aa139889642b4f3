"""The methods that whole-model rows compare, each as its defaults are."""

from __future__ import annotations

from dataclasses import replace

import torch

from agentkv import methods
from agentkv.bench.decode_step import row_model
from agentkv.bench.gpu_rows import Rig
from agentkv.engine.preparation import Preparation
from agentkv.engine.sparse import SparseMethod
from agentkv.kernels.low_rank_factors import Prepared
from agentkv.methods.palu import Palu

TINY = {
    "quest": "quest:budget=32", "omnikv": "omnikv:budget=40,observers=(0,)", "snapkv": "snapkv:capacity=64,window=16",
    "kivi": "kivi:group=16,residual=32", "fp8_kv": "fp8_kv", "streamingllm": "streamingllm:recent=60",
    "adakv": "adakv:capacity=64,window=16", "kvzip": "kvzip:chunk=64", "h2o": "h2o:heavy=16,recent=16",
    "palu": "palu",
}  # fmt: skip
"""The methods, and how each is set for the tiny model. On a GPU each has its own defaults."""
PALU_GROUP = 4
"""KV heads, or all of a model that has fewer: what it prepares by itself."""


def row_method(rig: Rig, name: str) -> SparseMethod:
    """A method of `TINY`, prepared if it must be."""
    found = methods.parse(TINY[name] if rig.tiny else name)
    return replace(found, prepared=_drawn_factors(rig)) if isinstance(found, Palu) else found


def _drawn_factors(rig: Rig) -> Prepared:
    """Factors in the shapes that palu prepares of the row's model, drawn as its weights are. Once a run."""
    if "factors" not in rig.kept:
        c = Preparation(row_model(rig))
        shape, heads = c.shape, min(PALU_GROUP, c.shape.num_kv_heads)
        groups, rank = shape.num_kv_heads // heads, min(heads * shape.head_dim, shape.hidden_size)
        tensors = {"frequency": c.frequency}
        for side in "kv":
            tensors[f"{side}.down"] = torch.randn(shape.num_layers, groups, rank, shape.hidden_size) * shape.hidden_size**-0.5
            tensors[f"{side}.up"] = torch.randn(shape.num_layers, shape.num_kv_heads, rank, shape.head_dim) * rank**-0.5
        if shape.key_norm:
            tensors["k.norm"] = torch.ones(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        rig.kept["factors"] = Prepared("", tensors, "drawn", shape.fingerprint, heads * shape.head_dim, groups, rank, c.eps)
    found: Prepared = rig.kept["factors"]
    return found
