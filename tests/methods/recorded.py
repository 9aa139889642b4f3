"""transformers' model of a folder, whose attention keeps the tensors it is called with: queries, keys and values after RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


@dataclass(frozen=True)
class Seen:
    """One layer's tensors: q [num_new_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


def _recording(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
    module.seen = Seen(*(tensor[0].transpose(0, 1).clone() for tensor in (query, key, value)))
    return sdpa_attention_forward(module, query, key, value, *rest, **more)


AttentionInterface.register("recording", _recording)
AttentionMaskInterface.register("recording", sdpa_mask)


class Recorded:
    """A prompt's tensors, and those of more tokens behind it."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="recording").eval()

    @torch.inference_mode()
    def prompt(self, tokens: list[int]) -> list[Seen]:
        """By layer, of a prompt alone."""
        return self._forward(tokens, DynamicCache())

    @torch.inference_mode()
    def replay(self, tokens: list[int], replays: list[list[int]]) -> list[list[Seen]]:
        """By replay, by layer: q of the replayed ids, k and v of the prompt and the ids; no replay sees another."""
        found = []
        for ids in replays:
            cache = DynamicCache()
            self._forward(tokens, cache)
            found.append(self._forward(ids, cache))
        return found

    def _forward(self, tokens: list[int], cache: DynamicCache) -> list[Seen]:
        self.model.model(input_ids=torch.tensor([tokens]), past_key_values=cache)
        return [block.self_attn.seen for block in self.model.model.layers]
