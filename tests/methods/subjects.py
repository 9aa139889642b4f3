"""Models and prompts that both the oracles and the engine can read."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import agentkv

MICRO = Path(agentkv.__file__).parent / "data" / "micro"


def tiny(folder: Path, family: str) -> None:
    """A random GQA model with micro's tokenizer; the Llama's has no chat template."""
    shared: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    torch.manual_seed(5)
    config = Qwen3Config(**shared, tie_word_embeddings=True) if family == "qwen3" else LlamaConfig(**shared)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    names = ["tokenizer.json", "tokenizer_config.json"] + ["chat_template.jinja"] * (family == "qwen3")
    for name in names:
        shutil.copy(MICRO / name, folder)


def text(lines: int) -> str:
    """Lines of a name and a value each, as in micro's records; nine bytes a line."""
    draw = random.Random(3)
    return "".join(f"{''.join(draw.choices('abcdefghijklm', k=3))} {draw.randrange(1000, 10000)}\n" for _ in range(lines))
