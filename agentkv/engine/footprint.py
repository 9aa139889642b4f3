"""What a token of a long session takes under a method, for a model of a common shape."""

from __future__ import annotations

from pathlib import Path

import torch

from agentkv.engine import models
from agentkv.engine.core import WHOLE, EngineConfig, Group
from agentkv.engine.form import Held
from agentkv.engine.forms import Served, serve
from agentkv.engine.layers import ModelConfig, RopeConfig
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import BadRequest

SHAPE = "36 layers, 32 heads, 8 KV heads of 128 dims, bfloat16, a prompt of 32,768 tokens"
"""The model of `example_model` (the shape of Qwen3-4B), and the session."""
TOKENS, PAGE = 32768, 16


def example_model() -> LoadedModel:
    """A model of SHAPE without weights."""
    config = ModelConfig("Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8, 128, 1e-6, RopeConfig(1e6), 40960, True)
    with torch.device("meta"):
        model = models.resolve(config.architecture)(config)
    return LoadedModel(model, config, Path(), torch.device("meta"), torch.bfloat16, "example")


def bytes_per_token(method: SparseMethod, loaded: LoadedModel) -> int | None:
    """Arena bytes for each token of a session whose prompt was just read, K, V and state together; None where the model is not
    served."""
    try:
        groups, (served,) = serve(loaded, EngineConfig(1 << 40, TOKENS, page_size=PAGE), [method])
    except BadRequest:
        return None
    return round(_session_bytes(groups, served) / TOKENS)


def _session_bytes(groups: tuple[Group, ...], served: Served) -> int:
    form = served.form
    seal = form.seal(Held(TOKENS, 0, TOKENS, 0, True)) if form.seal is not None else None
    tail = TOKENS - (seal.floor if seal is not None else 0)
    counts = {group: 1 if groups[group].page_size == WHOLE else -(-tail // groups[group].page_size) for group in form.groups}
    if seal is not None:
        counts |= dict(zip(form.sealed, seal.units, strict=True))
    return sum(groups[group].stripe_bytes * count for group, count in counts.items())
