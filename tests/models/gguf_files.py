"""Writes a transformers model as a GGUF file, names from the gguf package's own table and the llama permutation by hand; and
reads one the way transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}

GEMMA: dict[str, Any] = SHAPE | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}
del GEMMA["num_hidden_layers"]
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}


def tiny(family: str) -> Any:
    """A random model of a family, in float32; every vector is random too."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

    config: Any = {
        "llama": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
        "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "llama-linear": lambda: LlamaConfig(
            **SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
        ),
        "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
        "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
        "gemma3": lambda: Gemma3TextConfig(**GEMMA, num_hidden_layers=7, rope_parameters=GEMMA_ROPES),
    }[family]()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            mean = 1.0 if "norm" in name and family != "gemma3" else 0.0  # Gemma's are stored less one
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
    return model.eval()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half, then row i of its second half: what a llama file holds."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for index in range(size // 2):
            out[head * size + 2 * index] = weight[head * size + index]
            out[head * size + 2 * index + 1] = weight[head * size + size // 2 + index]
    return out


def straighten(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleave`, through it."""
    rows = interleave(np.arange(weight.shape[0]), heads)
    return weight[np.argsort(rows)]


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    *,
    tokenizer: Callable[[Any], None] | None = None,
    change: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Write the file; the state dict of the same model with its matrices quantised and dequantised is returned.

    change: metadata under the architecture's prefix that replaces or, where None, removes a key. tensors: the same for tensors.
    """
    config = model.config
    name = config.model_type.removesuffix("_text")
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = gguf.GGUFWriter(str(path), name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if rope["rope_type"] == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if name == "gemma3":
        metadata |= {"attention.sliding_window": config.sliding_window}
    for key, value in (metadata | dict(change or {})).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        if value is not None:
            add[type(value)](f"{name}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    state, written = _tensors(model, kind)
    if rope["rope_type"] == "llama3":
        written["rope_freqs.weight"] = (_rope_factors(config), Kind.F32)
    for key, array in (tensors or {}).items():
        written.pop(key, None)
        if array is not None:
            written[key] = (array, Kind.F64 if array.dtype == np.float64 else Kind.F32)
    for key, (data, stored) in written.items():
        writer.add_tensor(key, data, raw_dtype=stored if stored not in (Kind.F32, Kind.F64) else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def _tensors(model: Any, kind: Kind) -> tuple[dict[str, torch.Tensor], dict[str, tuple[np.ndarray, Kind]]]:
    config = model.config
    name = config.model_type.removesuffix("_text")
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state: dict[str, torch.Tensor] = {}
    written: dict[str, tuple[np.ndarray, Kind]] = {}
    more = 1.0 if name == "gemma3" else 0.0  # its files hold what a norm multiplies with
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else 0
        turn = bool(heads) and config.model_type == "llama"
        plain = tensor.detach().numpy() + np.float32(more if name.endswith("norm.weight") else 0.0)
        array = interleave(plain, heads) if turn else plain
        stored = kind if array.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(array, stored)
        back = gguf.quants.dequantize(data, stored).reshape(array.shape)
        back = back - np.float32(more if name.endswith("norm.weight") else 0.0)
        state[name] = torch.from_numpy(np.array(straighten(back, heads) if turn else back))
        written[str(names.get_name(name, (".weight", ".bias")))] = (data, stored)
    return state, written


def _rope_factors(config: Any) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = config.hidden_size // config.num_attention_heads
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    return (plain / scaled).numpy()


def read_by_transformers(path: Path, config: Any = None) -> Any:
    """transformers' own dequantised reading of a file, in float32 (its `from_pretrained` asks for accelerate).

    config: None takes what transformers makes of the metadata, which leaves out biases and Qwen3's head size.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = config or AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    assert model.state_dict().keys() - tensors.keys() <= {"lm_head.weight"}
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()
