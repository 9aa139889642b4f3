"""Models of a given shape with random weights: what a step costs depends on the shape, not on the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentkv.engine import models
from agentkv.engine.config import read_config
from agentkv.engine.loader import LoadedModel

QWEN3_90M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 640,
    "intermediate_size": 1856,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
"""config.json of a Qwen3 of 12 layers and 4 KV heads of 64; 90.0M parameters."""


def random_model(raw: dict[str, Any] = QWEN3_90M, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> LoadedModel:
    """A model of that config.json on the CPU; weights are normal with deviation 0.02, norms are ones."""
    config = read_config(raw)
    generator = torch.Generator().manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = models.resolve(config.architecture)(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    model.requires_grad_(False).eval()
    model.prepare()
    return LoadedModel(model, config, Path("random"), torch.device("cpu"), dtype, f"random-{seed}")
