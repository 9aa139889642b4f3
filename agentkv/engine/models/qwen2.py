"""Qwen2: queries, keys and values have a bias, the output projection has none."""

from __future__ import annotations

from agentkv.engine.layers import Decoder


class Qwen2(Decoder):
    """Qwen2ForCausalLM: Qwen2 and Qwen2.5, Coder too, and checkpoints distilled into them."""

    qkv_bias = True
    slides = True
    defaults = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
