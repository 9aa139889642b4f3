"""`micro` as a plain torch module for training, and its export as a Hugging Face folder.

The architecture is Qwen3's (grouped queries, norm of queries and keys, SwiGLU, tied
embeddings); parameter names are those of the published checkpoints, so export is a copy.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentkv.world import tokens


@dataclass(frozen=True)
class MicroConfig:
    """Sizes of the model; the defaults are the shipped ones (12.7M parameters)."""

    layers: int = 8
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 1024
    vocab: int = tokens.VOCAB
    theta: float = 1e6
    eps: float = 1e-6
    context: int = tokens.CONTEXT


def visible(gone: Tensor) -> Tensor:
    """`[batch, 1, queries, keys]` bool: query q sees key k while `k <= q < gone[k]`; `gone` `[batch, length]` int."""
    at = torch.arange(gone.shape[1], device=gone.device)
    return ((at <= at[:, None]) & (at[:, None] < gone[:, None]))[:, None]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rope(positions: Tensor, config: MicroConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[batch, 1, length, head_dim]` in fp32 of `positions` `[batch, length]`."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    inverse = config.theta ** (-half / config.head_dim)
    angle = positions.float()[:, None, :, None] * inverse
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by the angle of its position."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries and normed queries and keys."""

    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.config = config
        width = config.heads * config.head_dim
        narrow = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, width, bias=False)
        self.k_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(width, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """Attention over `x` `[batch, length, hidden]`; `seen` `[batch, 1, length, length]` replaces the causal mask."""
        batch, length, _ = x.shape
        c = self.config
        q = self.q_norm(self.q_proj(x).view(batch, length, c.heads, c.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, c.kv_heads, c.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Repeated heads let every backend of the library take the call.
        repeat = c.heads // c.kv_heads
        k = k.repeat_interleave(repeat, dim=1)
        v = v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, multiply, project back."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """Attention and MLP, each added to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, seen)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Micro(nn.Module):
    """The whole model: ids and positions `[batch, length]` to final hidden states."""

    def __init__(self, config: MicroConfig = MicroConfig()) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.reset()

    def reset(self) -> None:
        """Small normal weights; outputs into the residual stream start at zero."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.ones_(p)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif name.startswith("embed_tokens"):
                nn.init.normal_(p, std=0.02)  # tied: small, so that first scores are near zero
            else:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def forward(self, ids: Tensor, positions: Tensor, seen: Tensor | None = None) -> Tensor:
        """Final hidden states `[batch, length, hidden]`; `seen` is a mask as `visible` makes it."""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = rope(positions, self.config)
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        return cast(Tensor, self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token from hidden states (the embedding is tied)."""
        return F.linear(hidden, self.embed_tokens.weight)


def hf_config(config: MicroConfig) -> dict[str, Any]:
    """`config.json` of the exported folder."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "eos_token_id": tokens.IM_END,
        "pad_token_id": tokens.IM_END,
        "torch_dtype": "bfloat16",
    }


def _write(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def template_file() -> Path:
    """The chat template that ships with the bundled model."""
    return Path(__file__).resolve().parents[1] / "data" / "micro" / "chat_template.jinja"


def export(model: Micro, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `model` as a Hugging Face folder: two weight shards, config, tokenizer, template."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": p.detach().to("cpu", dtype).contiguous() for name, p in model.named_parameters()}
    half = sum(t.numel() for t in state.values()) / 2
    shards: list[dict[str, Tensor]] = [{}, {}]
    seen = 0
    for name, tensor in state.items():
        shards[int(seen >= half)][name] = tensor
        seen += tensor.numel()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
    size = sum(t.numel() * t.element_size() for t in state.values())
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    _write(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": where},
    )
    _write(folder / "config.json", hf_config(model.config))
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": tokens.IM_END, "pad_token_id": tokens.IM_END},
    )
    tokens.save_tokenizer(folder)
    if (folder / "chat_template.jinja").resolve() != template_file():
        shutil.copyfile(template_file(), folder / "chat_template.jinja")


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Micro:
    """Read an exported folder back into the training module."""
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Micro(
        MicroConfig(
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            inner=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            theta=raw["rope_theta"],
            context=raw["max_position_embeddings"],
        )
    )
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    model.load_state_dict({key.removeprefix("model."): value for key, value in state.items()})
    return model.to(device, dtype)


def describe(config: MicroConfig) -> dict[str, Any]:
    """The sizes as a plain dictionary (for checkpoints and logs)."""
    return asdict(config)
