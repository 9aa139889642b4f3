"""The decoder that all families share: one module order, with the lifecycle calls in it.

A family's file says how it differs (see `models/`). Nothing here knows the scheduler, a cache or a method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentkv.engine.sparse import Lifecycle
from agentkv.kernels.gated_linear import gated_linear
from agentkv.kernels.linear import linear
from agentkv.kernels.rms_norm import add_rms_norm, rms_norm
from agentkv.kernels.rotate import rotate
from agentkv.kernels.rotate_store import rotate_store

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
"""What an MLP's gate goes through, by the name that config.json gives it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary angles. kind: default, linear, llama3 or factors (what each frequency is divided by, `[head_dim / 2]`, as GGUF
    files give llama3's scaling); the fields from factor on are llama3's, factor also linear's."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_window: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Experts of an MLP. count of them, `active` for each token; inner_size of each. normed: the weights of a token's experts
    sum to 1. layers: those that have them; the others have a plain MLP."""

    count: int
    active: int
    inner_size: int
    normed: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Weights of linear maps in the checkpoint are e4m3, with a scale for each block of 128 x 128. plain: modules that are
    not, by their names there."""

    plain: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Has the linear map of that name in the checkpoint such weights?"""
        inside = f".{module}."
        return not any(f".{name}." in inside for name in self.plain)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder, free of any family's spelling.

    window: most logical tokens of a sequence. sliding: by layer, how many tokens a query sees, itself included, None where it
    sees all; () is None for every layer. local_rope: of the layers that slide, where it is not `rope`. attention_scale: of the
    scores; None is head_dim ** -0.5. experts: None where no layer has any. blocks: None where all weights are plain.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    window: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    attention_scale: float | None = None
    sliding: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    experts: ExpertConfig | None = None
    blocks: BlockFormat | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32 whatever the dtype, as the checkpoints were trained."""

    def __init__(self, *shape: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., size]`, normed."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, that normed) of `[num_tokens, size]`."""
        together = add_rms_norm(x, delta, self.weight, self.eps)
        if together is not None:
            return together
        total = x + delta
        return total, self.forward(total)


class PackedWeight(nn.Module):
    """Weights of linear maps of one input, one under the other: `[sum(sizes), in_size]`, or such a pack for each of several
    experts. sizes: output widths, in order. stored: parameters with a dtype of their own, whatever the model's is."""

    stored: ClassVar[Mapping[str, torch.dtype]] = {}

    def __init__(self, in_size: int, sizes: tuple[int, ...], *experts: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(*experts, sum(sizes), in_size))

    def rows(self, parameter: str) -> tuple[int, ...]:
        """Rows of each of the checkpoint's tensors that one of our parameters is packed from."""
        return self.sizes

    def plain(self) -> Tensor:
        """The weights as they are multiplied with."""
        return self.weight


class PackedLinear(PackedWeight):
    """Several linear maps of one input as one product."""

    def __init__(self, in_size: int, sizes: tuple[int, ...], bias: bool = False) -> None:
        super().__init__(in_size, sizes)
        self.bias = nn.Parameter(torch.empty(sum(sizes))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, sum(sizes)]` of x `[num_tokens, in_size]`."""
        return linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """The activation of the first of two maps of x, times the second, `[num_tokens, size]`."""
        return gated_linear(x, self.weight, self.bias, activation)


class Rotary:
    """Rotary embedding: halves of each head are turned by position * frequency. Angles are made in float32."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        frequency = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
        if config.kind == "linear":
            frequency = frequency / config.factor
        elif config.kind == "llama3":
            frequency = _llama3(frequency, config)
        elif config.kind == "factors":
            frequency = frequency / torch.tensor(config.factors, dtype=torch.float32, device="cpu")
        self.frequency = frequency

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin `[num_tokens, 1, head_dim / 2]` of int64 positions `[num_tokens]`."""
        self.frequency = self.frequency.to(positions.device)
        angle = positions.float().unsqueeze(1) * self.frequency
        return angle.cos().to(dtype).unsqueeze(1), angle.sin().to(dtype).unsqueeze(1)


def _llama3(frequency: Tensor, config: RopeConfig) -> Tensor:
    """Slow the waves that are long against the original window; blend between the two limits."""
    wavelength = 2 * math.pi / frequency
    longest = config.original_window / config.low_freq_factor
    shortest = config.original_window / config.high_freq_factor
    slowed = torch.where(wavelength > longest, frequency / config.factor, frequency)
    blend = (config.original_window / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * slowed / config.factor + blend * slowed
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, slowed)


class Attention(nn.Module):
    """Grouped-query attention with the lifecycle calls around it."""

    def __init__(self, config: ModelConfig, layer: int, qk_norm: bool, qkv_bias: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = PackedLinear(config.hidden_size, (q_size, kv_size, kv_size), qkv_bias or config.attention_bias)
        self.o_proj = PackedLinear(q_size, (config.hidden_size,), config.attention_bias and not qkv_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if qk_norm else None
        self.qk_weight: Tensor | None = None

    def prepare(self) -> None:
        """Lay the two norms' weights side by side, so that one pass norms queries and keys. After loading."""
        if self.q_norm is not None and self.k_norm is not None:
            q_weight = self.q_norm.weight.detach().expand(self.num_heads, -1)
            self.qk_weight = torch.cat((q_weight, self.k_norm.weight.detach().expand(self.num_kv_heads, -1)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, hooks: Lifecycle) -> Tensor:
        """Output `[num_tokens, hidden_size]` of normed hidden states x of the same shape."""
        hooks.project(self.layer, x)
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk_raw, v = qkv.tensor_split((self.num_heads + self.num_kv_heads,), dim=1)
        q_raw, k_raw = qk_raw.tensor_split((self.num_heads,), dim=1)
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        places = hooks.places(self.layer)
        if places is not None:
            q = rotate_store(qkv, self.num_heads, cos, sin, self.qk_weight, eps, places)
        else:
            q, k = rotate(qk_raw, cos, sin, self.qk_weight, eps).tensor_split((self.num_heads,), dim=1)
            hooks.store(self.layer, k_raw, k, v)
        out: Tensor = self.o_proj(hooks.attend(self.layer, q, q_raw, self.scale).flatten(1))
        return out


class MLP(nn.Module):
    """A gated pair of linear maps: SwiGLU, or with another activation of the gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(config.hidden_size, (config.inner_size, config.inner_size), config.mlp_bias)
        self.down_proj = PackedLinear(config.inner_size, (config.hidden_size,), config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Output `[num_tokens, hidden_size]` of normed hidden states x of the same shape."""
        out: Tensor = self.down_proj(self.gate_up_proj.gated(x, self.activation))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normed residual stream."""

    def __init__(self, config: ModelConfig, layer: int, qk_norm: bool, qkv_bias: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config, layer, qk_norm, qkv_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: nn.Module = MLP(config)

    def forward(self, hidden: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, hooks: Lifecycle) -> tuple[Tensor, Tensor]:
        """Two `[num_tokens, hidden_size]` whose sum is the residual stream after this layer: whoever norms it next adds them in
        the same pass. hidden: the stream before; normed: that behind `input_layernorm`."""
        attended = self.self_attn(normed, cos, sin, hooks)
        hidden, normed = self.post_attention_layernorm.add(hidden, attended)
        return hidden, self.mlp(normed)


class Decoder(nn.Module):
    """A causal language model. Module names are those of the published checkpoints, packed projections apart.

    Subclasses are families: qk_norm says whether queries and keys are normed by head; qkv_bias that queries, keys and values
    have a bias and the output none, whatever the config says; slides that layers may have a sliding window. defaults: what
    the family's config.json may leave out, in its own spelling. layer_class: the order of the modules inside a layer.
    """

    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    slides: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    packed: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (self.layer_class(config, layer, self.qk_norm, self.qkv_bias) for layer in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = None if config.tied else PackedLinear(config.hidden_size, (config.vocab_size,))
        self.rotary = Rotary(config.rope, config.head_dim)
        self.local_rotary = Rotary(config.local_rope, config.head_dim) if config.local_rope else None

    def prepare(self) -> None:
        """Derive what is computed from weights, once they are loaded."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.prepare()

    def forward(self, token_ids: Tensor, positions: Tensor, hooks: Lifecycle) -> Tensor:
        """Final hidden states `[num_tokens, hidden_size]` of token_ids and positions, int64 `[num_tokens]`."""
        hidden = self.embed(token_ids)
        far = self.rotary.angles(positions, hidden.dtype)
        near = self.local_rotary.angles(positions, hidden.dtype) if self.local_rotary else far
        sliding = self.config.sliding or (None,) * len(self.layers)
        norms: list[Any] = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed: Tensor = norms[0](hidden)
        for index, (layer, window) in enumerate(zip(self.layers, sliding, strict=True)):
            hidden, delta = layer(hidden, normed, *(near if window else far), hooks)
            hidden, normed = norms[index + 1].add(hidden, delta)
            hooks.layer_end(index, hidden)
        return normed

    def embed(self, token_ids: Tensor) -> Tensor:
        """What enters the first layer, `[num_tokens, hidden_size]`, of int64 `[num_tokens]`."""
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token `[num_tokens, vocab_size]`, at least float32."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        scores = linear(hidden, weight)
        return scores if scores.dtype == torch.float64 else scores.float()

    def source_names(self, name: str) -> tuple[str, ...]:
        """Checkpoint names of one of our parameters, in the order they are packed."""
        prefix = "" if name.startswith("lm_head") else "model."
        for packed, parts in self.packed.items():
            if f".{packed}." in name:
                return tuple(prefix + name.replace(packed, part) for part in parts)
        return (prefix + name,)
