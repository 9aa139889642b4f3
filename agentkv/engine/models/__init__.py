"""Model families by the architecture that config.json names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from agentkv.engine.layers import Decoder, ModelConfig

ARCHITECTURES: dict[str, str] = {
    "Gemma3ForCausalLM": "agentkv.engine.models.gemma3:Gemma3",
    "LlamaForCausalLM": "agentkv.engine.models.llama:Llama",
    "Qwen2ForCausalLM": "agentkv.engine.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "agentkv.engine.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "agentkv.engine.models.qwen3_moe:Qwen3Moe",
}
"""Architecture -> "module:Class"."""


def resolve(architecture: str) -> type[Decoder]:
    """The class of an architecture; KeyError where it is not served."""
    module, _, attribute = ARCHITECTURES[architecture].partition(":")
    found: type[Decoder] = getattr(import_module(module), attribute)
    return found


def build(config: ModelConfig) -> Decoder:
    """The decoder of a config, on the device "meta", its linear maps in the checkpoint's format. BadModel where they cannot be
    packed in it."""
    from agentkv.engine.block_fp8 import use_blocks  # modules that need this package's layers

    with torch.device("meta"):
        model = resolve(config.architecture)(config)
        if config.blocks is not None:
            use_blocks(model, config.blocks)
    return model
