"""Qwen3 with experts: in all or some of the layers, a router and many small MLPs in the place of one."""

from __future__ import annotations

from typing import Any, ClassVar

from agentkv.engine.experts import ExpertMLP
from agentkv.engine.layers import DecoderLayer, ModelConfig
from agentkv.engine.models.qwen3 import Qwen3


class Qwen3MoeLayer(DecoderLayer):
    """A layer of Qwen3, with experts where the config has them."""

    def __init__(self, config: ModelConfig, layer: int, qk_norm: bool, qkv_bias: bool = False) -> None:
        super().__init__(config, layer, qk_norm, qkv_bias)
        if config.experts is not None and layer in config.experts.layers:
            self.mlp = ExpertMLP(config)


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM: Qwen3-30B-A3B and 235B-A22B, their Instruct, Thinking and Coder kin, in bf16 or block FP8."""

    layer_class = Qwen3MoeLayer
    defaults: ClassVar[dict[str, Any]] = {
        **Qwen3.defaults,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    }

    def source_names(self, name: str) -> tuple[str, ...]:
        """Checkpoint names of one of our parameters; of experts', one expert after the other."""
        names = super().source_names(name)
        if ".experts." not in name or self.config.experts is None:
            return names
        each = (f".experts.{number}." for number in range(self.config.experts.count))
        return tuple(source.replace(".experts.", expert) for expert in each for source in names)
