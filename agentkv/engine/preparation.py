"""What a method may learn of a loaded model beforehand, to write it to a file that it reads when it serves that model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentkv.engine.forms import model_shape
from agentkv.engine.layers import Attention
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import Lifecycle
from agentkv.engine.traces import draw, trace
from agentkv.kernels.chunk_attention import causal_attention


class Projection(NamedTuple):
    """How keys or values are made of hidden states. weight: `[num_kv_heads * head_dim, hidden_size]`; bias and norm, the weight
    of the norm behind it, `[num_kv_heads, head_dim]` or None."""

    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None


class Preparation:
    """One loaded model. shape: what methods know of it; window: its most tokens. frequency: float32 `[head_dim / 2]`, by how
    much a position turns; eps: of its norms."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.shape = model_shape(loaded, page_size=1)
        self.frequency = loaded.model.rotary.frequency.cpu()
        self.eps = loaded.config.norm_eps
        self.window = loaded.window

    def key(self, layer: int) -> Projection:
        """Of keys, before they are turned."""
        attention = self._attention(layer)
        norm = attention.k_norm
        return self._projection(layer, 1, None if norm is None else norm.weight.expand(attention.num_kv_heads, -1))

    def value(self, layer: int) -> Projection:
        """Of values."""
        return self._projection(layer, 2, None)

    @torch.inference_mode()
    def moments(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """By layer the sum of x x^T over the normed hidden states x that keys and values are made from, float64
        `[hidden_size, hidden_size]` on the CPU, of texts as token ids."""
        watch = _Moments(self.shape.num_layers, self.shape.hidden_size, self._loaded.device)
        for ids in texts:
            tokens = torch.tensor(ids, device=self._loaded.device)
            self._loaded.model(tokens, torch.arange(len(ids), device=tokens.device), watch)
        return [total.cpu() for total in watch.totals]

    def traces(self, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """By layer q `[num_tokens, num_heads, head_dim]` and k `[num_tokens, num_kv_heads, head_dim]` of a text, rotated."""
        return trace(self._loaded, ids)

    def sample(self, count: int) -> list[int]:
        """A text of so many tokens that the model draws itself, the same each time."""
        return draw(self._loaded, count)

    def _attention(self, layer: int) -> Attention:
        found: Attention = self._loaded.model.layers[layer].self_attn  # type: ignore[assignment]
        return found

    def _projection(self, layer: int, part: int, norm: Tensor | None) -> Projection:
        packed, dims = self._attention(layer).qkv_proj, (self.shape.num_kv_heads, self.shape.head_dim)
        weight = torch.split_with_sizes(packed.plain().detach(), packed.sizes)[part].cpu()
        bias = (
            None if packed.bias is None else torch.split_with_sizes(packed.bias.detach(), packed.sizes)[part].view(dims).cpu()
        )
        return Projection(weight, bias, None if norm is None else norm.detach().cpu())


class _Moments(Lifecycle):
    """Full attention over one text at a time, and what it sees on the way."""

    def __init__(self, num_layers: int, hidden_size: int, device: torch.device) -> None:
        super().__init__(())
        self.totals = [torch.zeros(hidden_size, hidden_size, dtype=torch.float64, device=device) for _ in range(num_layers)]

    def project(self, layer: int, x: Tensor) -> None:
        """Add the text's."""
        self.totals[layer] += x.T.double() @ x.double()

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor) -> None:
        """Until `attend`."""
        self._k, self._v = k, v

    def attend(self, layer: int, q: Tensor, q_raw: Tensor, scale: float) -> Tensor:
        """Every token sees all before it."""
        return causal_attention(q, self._k.transpose(0, 1), self._v.transpose(0, 1), scale)[0]


@dataclass(frozen=True)
class Observers:
    """Layers of one model that say what others read, ascending. model: its fingerprint."""

    model: str
    layers: tuple[int, ...]


def check_observers(layers: Sequence[Any]) -> tuple[int, ...]:
    """Layers as they are. ValueError where they are no whole numbers from 0 on, ascending, each once."""
    whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in layers)
    if not whole or list(layers) != sorted(set(layers)):
        raise ValueError(f"observers={layers}: layers from 0 on, ascending")
    return tuple(layers)


def write_observers(path: Path, observers: Observers, found: dict[str, Any]) -> None:
    """JSON. found: what else is known of them. ValueError where the file cannot be written."""
    said = {"model": observers.model, "observers": list(observers.layers), **found}
    try:
        path.write_text(json.dumps(said) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None


def read_observers(path: str) -> Observers:
    """ValueError where it is no such file, or names no layers."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        model, layers = found["model"], found["observers"]
        if not isinstance(model, str) or not isinstance(layers, list) or not layers:
            raise ValueError(f"it names observers {layers!r} of a model {model!r}")
        return Observers(model, check_observers(layers))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "make one with `agentkv methods prepare`"
        raise ValueError(f"prepared={path!r}: no file of observers ({error!r:.200}); {hint}") from None
