"""Models to measure speed with: random weights of a named shape, written as a Hugging Face directory or drawn on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentkv.engine import models
from agentkv.engine.config import read_config
from agentkv.engine.layers import PackedWeight
from agentkv.engine.loader import LoadedModel
from agentkv.errors import BadRequest

_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
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
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    },
    "qwen3-30b-a3b": _EXPERTS,
    "qwen3-30b-a3b-fp8": {**_EXPERTS, "quantization_config": _BLOCKS},
    "tiny-experts-fp8": {
        **_EXPERTS,
        "vocab_size": 97,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "max_position_embeddings": 4096,
        "quantization_config": _BLOCKS,
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
of 128. llama-3.1-8b: 8.03 billion, 32 layers. qwen3-30b-a3b: 30.5 billion, 48 layers, 4 KV heads, 8 of 128 experts of 768 inner
units for each token; in bf16, or with the layers' linear maps in block FP8. tiny: for tests of benchmarks."""


_CODES = 64.0  # the size of drawn e4m3 codes
_AT_ONCE = 64 << 20  # numbers drawn before they are cast


def write_model(name: str, folder: Path) -> Path:
    """The shape's config.json and float32 weights (normal, 0.02; norms 1; the same every time) in `folder`. BadRequest where
    the shape is for `draw_model` alone."""
    config = SHAPES[name]
    if config["model_type"] != "qwen3":
        raise BadRequest(f"{name} is drawn on a device, not written", hint="Take a model's directory, or qwen3-90m or qwen3-4b")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
               for key, shape in _parameters(config).items()}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw_model(name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The shape with weights drawn on the device (normal, 0.02; norms 1; the same every time on one kind of device). Scales of
    e4m3 weights differ by block. Routers are drawn like the rest, which balances experts about as chance does."""
    config = read_config(SHAPES[name])
    model = models.build(config)
    generator = torch.Generator(device).manual_seed(0)
    for path, parameter in list(model.named_parameters()):
        owner, leaf = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        stored = owner.stored.get(leaf) if isinstance(owner, PackedWeight) else None
        value = torch.empty(parameter.shape, dtype=stored or dtype, device=device)
        _draw(value, leaf, generator)
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
    model.eval()
    model.prepare()
    return LoadedModel(model, config, Path(name), device, dtype, f"drawn {name}")


def _draw(value: Tensor, leaf: str, generator: torch.Generator) -> None:
    """Fill one parameter."""
    if value.dtype == torch.float8_e4m3fn:
        for part in torch.split(value.view(-1), _AT_ONCE):
            part.copy_(torch.empty(part.shape, device=value.device).normal_(0.0, _CODES, generator=generator).clamp_(-448, 448))
    elif leaf == "weight_scale_inv":
        value.uniform_(0.015 / _CODES, 0.025 / _CODES, generator=generator)
    elif value.dim() == 1:
        value.fill_(1.0)
    else:
        value.normal_(0.0, 0.02, generator=generator)


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
