"""What a model's layers make of a text: queries and keys; and text of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import Lifecycle, SparseMethod
from agentkv.kernels.chunk_attention import causal_attention
from agentkv.types import Sampling

_PAGE = 16


@torch.inference_mode()
def trace(loaded: LoadedModel, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """By layer q `[num_tokens, num_heads, head_dim]` and k `[num_tokens, num_kv_heads, head_dim]` of a text, rotated; attention
    is full."""
    tokens = torch.tensor(ids, device=loaded.device)
    watch = _Traces()
    loaded.model(tokens, torch.arange(len(ids), device=loaded.device), watch)
    return watch.seen


def draw(loaded: LoadedModel, count: int, seed: int = 0) -> list[int]:
    """`count` tokens that the model draws at temperature 1 behind a first one by the seed. EngineFault as in any request."""
    token_bytes = sum(group.token_bytes for group in loaded.groups(_PAGE))
    config = EngineConfig((count + 8 * _PAGE) * token_bytes + (8 << 20), count + _PAGE, page_size=_PAGE, max_rows=1)
    llm = LLM(config, ModelRunner(loaded, config, SparseMethod()))
    first = seed % loaded.config.vocab_size
    seq = llm.add(Request([first], Sampling(max_tokens=count - 1, temperature=1.0, seed=seed)))
    while llm.has_work:
        llm.step()
    if seq.fault is not None:
        raise seq.fault
    return list(seq.token_ids)


class _Traces(Lifecycle):
    """Full attention over one text that notes what it is made of."""

    def __init__(self) -> None:
        super().__init__(())
        self.seen: list[tuple[Tensor, Tensor]] = []

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor) -> None:
        """Until `attend`."""
        self._k, self._v = k, v

    def attend(self, layer: int, q: Tensor, q_raw: Tensor, scale: float) -> Tensor:
        """Every token sees all before it."""
        self.seen.append((q, self._k))
        return causal_attention(q, self._k.transpose(0, 1), self._v.transpose(0, 1), scale)[0]
