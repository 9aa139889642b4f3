"""A whole model reads prompts, chunk by chunk, as the engine forwards them; beside transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from agentkv import methods
from agentkv.bench.decode_step import MODEL
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.prefill_row import attention_flops
from agentkv.bench.reading import Reading
from agentkv.bench.shapes import draw_model, random_prompts
from agentkv.engine.layers import PackedLinear
from agentkv.engine.loader import LoadedModel

CHUNK, ROWS, LENGTH = 2048, 8, 32_768


def run_rows() -> Iterator[Row]:
    """Prefill of eight prompts of 32K."""
    yield Row(f"prefill, {MODEL}, 8x32K", "of the matmul rate", 0.55, _measure, gain=1.6)


def prompt_flops(loaded: LoadedModel, length: int) -> float:
    """Linear maps and causal attention of one prompt; what the mask hides, and logits, not counted."""
    inside = [module for layer in loaded.model.layers for module in layer.modules() if isinstance(module, PackedLinear)]
    c = loaded.config
    linear = 2.0 * length * sum(module.weight.numel() for module in inside)
    return linear + c.num_layers * attention_flops(length, 0, c.num_heads, c.head_dim)


def _measure(rig: Rig) -> Measured:
    """us: of each prompt, one after another, after one that does not count (`first_us`: cuDNN plans every size in it). The
    value is that of all together."""
    name, rows, length, chunk = ("tiny", 2, 48, 16) if rig.tiny else (MODEL, ROWS, LENGTH, CHUNK)
    (first, *us), flops = _ours(rig, name, rows, length, chunk)
    rig.free()
    peer = rig.whole_peer(name, rows, length)
    more = {"tokens_per_s": rows * length / sum(us) * 1e6, "tflop_per_s": flops / sum(us) / 1e6, "chunk": chunk}
    more["first_us"] = first
    gain = more["tokens_per_s"] / peer["prefill_tokens_per_s"] if "prefill_tokens_per_s" in peer else None
    return Measured(us, more["tflop_per_s"] / rig.matmul, rig.matmul, "TFLOP/s", peer, gain, more)


def _ours(rig: Rig, name: str, num_rows: int, length: int, chunk: int) -> tuple[list[float], float]:
    """(microseconds of the first prompt, which is read twice, and of each, operations of all)."""
    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32
    loaded = draw_model(name, rig.device, dtype)
    reading = Reading(loaded, methods.get("dense"), length, chunk)
    prompts = random_prompts(num_rows, length, loaded.config.vocab_size, seed=0)
    us = [reading.read(prompt).us for prompt in (prompts[0], *prompts)]
    return us, num_rows * prompt_flops(loaded, length)
