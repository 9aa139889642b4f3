"""Qwen3: queries and keys are normed by head before they are rotated."""

from __future__ import annotations

from agentkv.engine.layers import Decoder


class Qwen3(Decoder):
    """Qwen3ForCausalLM: the Qwen3 checkpoints without experts, and the bundled micro."""

    qk_norm = True
    slides = True
    defaults = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
