"""Turns of the engine in float64 with a method, and transformers' model whose attention a policy looks at and hides from."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import sdpa_mask

from agentkv.engine.core import Edit, EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Kept, SparseMethod
from agentkv.types import Sampling


def engine_of(loaded: LoadedModel, method: SparseMethod, **sizes: Any) -> LLM:
    """An engine small enough to see, with pages of eight tokens."""
    config = EngineConfig(**{"memory": 8 << 20, "window": 400, "page_size": 8, "max_rows": 4, "step_tokens": 64} | sizes)
    return LLM(config, ModelRunner(loaded, config, method), reuse=method.reuse)


class Turn(NamedTuple):
    """ids: of the whole history. made: the new ones. logprobs: of those. prefilled: tokens that were forwarded as chunks."""

    ids: list[int]
    made: list[int]
    logprobs: list[float]
    prefilled: int


def turn(llm: LLM, ids: list[int], chain: str | None = None, count: int = 8, edits: tuple[Edit, ...] = ()) -> Turn:
    """Continue a history by greedy tokens, and commit it."""
    seq = llm.add(Request(list(ids), Sampling(max_tokens=count, logprobs=True), chain_id=chain, edits=edits))
    logprobs: list[float] = []
    while llm.has_work:
        for output in llm.step():
            logprobs += [score.logprob for score in output.scores]
        llm.check()
    assert seq.fault is None, seq.fault.__cause__ or seq.fault
    made = seq.token_ids[len(ids) :]
    llm.commit(seq, made)
    return Turn(list(seq.token_ids), made, logprobs, seq.num_prefilled_tokens)


def together(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """New tokens of several requests that run at once."""
    seqs = [llm.add(Request(list(prompt), Sampling(max_tokens=count))) for prompt in prompts]
    while llm.has_work:
        llm.step()
        llm.check()
    assert all(seq.fault is None for seq in seqs), [seq.fault for seq in seqs]
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]


@dataclass(frozen=True)
class Noted:
    """What one seal kept: by layer and head the logical positions, and the scores `[num_layers, num_kv_heads, candidates]`."""

    positions: list[list[list[int]]]
    scores: Tensor


def noting(cls: type[SparseMethod]) -> type[Any]:
    """The method, noting in `noted` what its seals keep."""

    @dataclass(frozen=True)
    class Noting(cls):  # type: ignore[valid-type, misc]
        noted: list[Noted] = field(default_factory=list, compare=False)

        def seal(self, job: SealJob) -> Kept:
            kept: Kept = super().seal(job)
            found = []
            for layer, (indices, counts) in enumerate(zip(kept.indices, kept.counts, strict=True)):
                rows = zip(job.candidates(layer).positions, indices, counts, strict=True)
                found.append([row[index[:count]].tolist() for row, index, count in rows])
            self.noted.append(Noted(found, job.items("score").clone()))
            return kept

    return Noting


class Watched:
    """transformers' model in float64 over an uncut cache. hidden[layer]: bool [num_kv_heads, num_tokens], keys that nobody sees
    any more; received[layer]: attention by key, summed over queries and the query heads of a KV head; seen[layer]: q of the
    newest tokens [num_new_tokens, num_heads, head_dim], and k of all [num_tokens, num_kv_heads, head_dim]."""

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register("watched", self._attend)
        AttentionMaskInterface.register("watched", sdpa_mask)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="watched").eval()
        config = self.model.config
        shape = (config.num_key_value_heads, 0)
        self.cache = DynamicCache()
        self.hidden = [torch.zeros(shape, dtype=torch.bool) for _ in range(config.num_hidden_layers)]
        self.received = [torch.zeros(shape, dtype=torch.float64) for _ in range(config.num_hidden_layers)]
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Of the last of more tokens."""
        found: Tensor = self.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache).logits[0, -1]
        return found

    def greedy(self, tokens: list[int], count: int, after: Callable[[Watched], None]) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities; `after` every forward pass the policy hides what it likes."""
        made: list[int] = []
        logprobs = []
        for _ in range(count):
            scores = torch.log_softmax(self.logits(made[-1:] or tokens), 0)
            after(self)
            made.append(int(scores.argmax()))
            logprobs.append(float(scores[made[-1]]))
        return made, logprobs

    def aside(self, tokens: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """What is seen when more tokens are forwarded, which are forgotten again."""
        kept = deepcopy(self.cache), list(self.hidden), list(self.received)
        self.logits(tokens)
        found = dict(self.seen)
        self.cache, self.hidden, self.received = kept
        return found

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        layer, new = module.layer_idx, q.shape[2]
        num_kv_heads, length = k.shape[1:3]
        self.hidden[layer] = torch.nn.functional.pad(self.hidden[layer], (0, length - self.hidden[layer].shape[1]))
        received = torch.nn.functional.pad(self.received[layer], (0, length - self.received[layer].shape[1]))
        self.seen[layer] = q[0].transpose(0, 1), k[0].transpose(0, 1)
        unseen = torch.arange(length) > torch.arange(length - new, length)[:, None]
        outs = []
        for head in range(q.shape[1]):
            kv_head = head * num_kv_heads // q.shape[1]
            scores = q[0, head] @ k[0, kv_head].T * scaling
            given = torch.softmax(scores.masked_fill(unseen | self.hidden[layer][kv_head], -torch.inf), 1)
            received[kv_head] += given.sum(0)
            outs.append(given @ v[0, kv_head])
        self.received[layer] = received
        return torch.stack(outs, 1).unsqueeze(0), None
