"""Models that methods are checked on: tiny random ones, the bundled micro, or a directory."""

from __future__ import annotations

from pathlib import Path

import torch

from agentkv.engine import models
from agentkv.engine.devices import usable_device
from agentkv.engine.layers import ModelConfig, RopeConfig
from agentkv.engine.loader import LoadedModel, load_model

MICRO = Path(__file__).resolve().parent.parent / "data" / "micro"
TINY = ("Qwen3ForCausalLM", "LlamaForCausalLM")


def tiny(architecture: str, device: str = "cpu", sliding: tuple[int | None, ...] = (None, None, None)) -> LoadedModel:
    """Layers of two KV heads of 32 dims for four heads, random weights in float64 (a GPU: float32).

    sliding: by layer, the window of tokens that it sees, None for all. Weights are wide enough that a token which is read, or
    is not, changes the next one.
    """
    config = ModelConfig(
        architecture=architecture,
        vocab_size=128,
        hidden_size=64,
        inner_size=96,
        num_layers=len(sliding),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_eps=1e-6,
        rope=RopeConfig(1000.0),
        window=512,
        tied=False,
        sliding=sliding if any(sliding) else (),
    )
    dtype = dtype_on(device)
    draw = torch.Generator().manual_seed(7)
    model = models.resolve(architecture)(config).to(dtype).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.2, generator=draw)
        else:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=draw)
    model = model.to(device)
    model.prepare()
    return LoadedModel(model, config, Path(), torch.device(device), dtype, f"tiny {architecture}")


def opened(name: str, device: str = "cpu") -> tuple[LoadedModel, ...]:
    """The models of a name: `tiny` is two, `micro` the bundled one, else a directory or GGUF file. BadModel, BadRequest."""
    device = usable_device(device)
    if name == "tiny":
        return tuple(tiny(architecture, device) for architecture in TINY)
    return (load_model(MICRO if name == "micro" else name, device=device, dtype=dtype_on(device)),)


def dtype_on(device: str) -> torch.dtype:
    """What the checks run in: on the CPU wide enough to compare by 1e-9."""
    return torch.float64 if device == "cpu" else torch.float32
