"""Llama: the plain decoder. Its long-context rope scaling is in `layers.Rotary`, since other families use it too."""

from __future__ import annotations

from agentkv.engine.layers import Decoder


class Llama(Decoder):
    """LlamaForCausalLM: Llama 2 and 3, SmolLM2, TinyLlama and other checkpoints of that name."""

    qk_norm = False
