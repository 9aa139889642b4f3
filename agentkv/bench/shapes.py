"""Models to measure speed with: random weights of a named shape, written as a Hugging Face directory or drawn on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentkv.engine import models
from agentkv.engine.config import read_config
from agentkv.engine.loader import LoadedModel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-90m": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 19200,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    },
}
"""Name -> config.json. qwen3-90m: 90.3M parameters, 12 layers, 4 KV heads of 64. qwen3-4b: 4.02 billion, 36 layers, 8 KV heads
of 128. tiny: for tests of benchmarks."""


def write_model(name: str, folder: Path) -> Path:
    """The shape's config.json and float32 weights (normal, 0.02; norms 1; the same every time) in `folder`."""
    config = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
               for key, shape in _parameters(config).items()}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw_model(name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The shape with weights drawn on the device (normal, 0.02; norms 1; the same every time on one kind of device)."""
    config = read_config(SHAPES[name])
    with torch.device("meta"):
        model = models.resolve(config.architecture)(config)
    model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    model.requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    model.prepare()
    return LoadedModel(model, config, Path(name), device, dtype, f"drawn {name}")


def _parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of a Qwen3 model with tied embeddings."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    inside: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{module}.weight": shape for module, shape in inside.items()}
    return shapes


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids, the same for the same seed."""
    drawn: Tensor = torch.randint(0, vocab_size, (count, length), generator=torch.Generator().manual_seed(seed))
    prompts: list[list[int]] = drawn.tolist()
    return prompts
