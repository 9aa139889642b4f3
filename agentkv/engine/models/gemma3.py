"""Gemma 3, the text model: scaled embeddings, norms before and after each half of a layer, sliding windows in most layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from agentkv.engine.layers import Decoder, DecoderLayer, ModelConfig, RMSNorm
from agentkv.engine.sparse import Lifecycle


class Gemma3Layer(DecoderLayer):
    """Attention and MLP, each normed before and after, so that the residual stream takes in normed states only."""

    def __init__(self, config: ModelConfig, layer: int, qk_norm: bool, qkv_bias: bool = False) -> None:
        super().__init__(config, layer, qk_norm, qkv_bias)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, hidden: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, hooks: Lifecycle) -> tuple[Tensor, Tensor]:
        """What the residual stream after this layer is the sum of, see DecoderLayer."""
        attended = self.post_attention_layernorm(self.self_attn(normed, cos, sin, hooks))
        hidden, normed = self.pre_feedforward_layernorm.add(hidden, attended)
        return hidden, self.post_feedforward_layernorm(self.mlp(normed))


class Gemma3(Decoder):
    """Gemma3ForCausalLM: the checkpoints without pictures (270M and 1B), and the text half of others saved under that name."""

    qk_norm = True
    slides = True
    layer_class = Gemma3Layer
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }

    def prepare(self) -> None:
        """Checkpoints hold a norm's weight less one, and the product with it is rounded once, from float32. After loading."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight = nn.Parameter(1 + module.weight.float(), requires_grad=False)
        super().prepare()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings times the root of their size, which is rounded as the weights are."""
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.embed_tokens.weight.dtype, device="cpu")
        return super().embed(token_ids) * scale.item()
