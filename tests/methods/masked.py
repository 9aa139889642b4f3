"""transformers' model of a folder, whose attention sees, layer by layer and head by head, only the keys that a test names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import sdpa_mask

Sight = Callable[[int, int, int], set[int]]
"""(layer, KV head, position of the query) -> positions that it sees; those behind it are hidden anyway."""


@dataclass(frozen=True)
class Tensors:
    """One layer's: q [num_new_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim], after RoPE; scale: of
    the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def _masked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    module.tensors = Tensors(q.clone(), k.clone(), v.clone(), scaling)
    length, group = len(k), q.shape[1] // k.shape[1]
    places = torch.arange(length - len(q), length)
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        hidden = torch.arange(length) > places[:, None]
        if module.sight is not None:
            for line, at in zip(hidden, places.tolist(), strict=True):
                allowed = module.sight(module.layer_idx, head // group, at)
                line[[position for position in range(length) if position not in allowed]] = True
        scores = (q[:, head] @ k[:, head // group].T * scaling).masked_fill(hidden, -torch.inf)
        out[:, head] = torch.softmax(scores, 1) @ v[:, head // group]
    return out.unsqueeze(0), None


AttentionInterface.register("masked", _masked)
AttentionMaskInterface.register("masked", sdpa_mask)


class Masked:
    """One sequence: what is forwarded stays, and is seen by what comes later if it is named."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="masked").eval()
        self.cache = DynamicCache()

    @torch.inference_mode()
    def forward(self, tokens: list[int], sight: Sight | None = None) -> Tensor:
        """Log-probabilities behind the last token `[vocab_size]`; sight None: everything before each token."""
        for block in self.model.model.layers:
            block.self_attn.sight = sight
        out = self.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache)
        return out.logits[0, -1].double().log_softmax(-1)

    @property
    def tensors(self) -> list[Tensors]:
        """By layer, of the last forward."""
        return [block.self_attn.tensors for block in self.model.model.layers]

    def answer(self, first: Tensor, forced: list[int], sight: Sight | None = None) -> list[float]:
        """Log-probability of each forced token, of which each but the last is forwarded alone; first: of the first one."""
        found, behind = [], first
        for index, token in enumerate(forced):
            found.append(behind[token].item())
            assert behind[token] >= behind.max() - 1e-6, "not the likeliest token"
            if index + 1 < len(forced):
                behind = self.forward([token], sight)
        assert not any(math.isnan(each) for each in found)
        return found
