"""Turns of our engine, and transformers' model whose attention reads keys and values as a test says they were kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    Qwen3Config,
)
from transformers.masking_utils import sdpa_mask

from agentkv import methods
from agentkv.engine.core import Edit, EngineConfig, Request, Sequence
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling

LAYERS, HEADS, DIM, HIDDEN = 3, 2, 16, 48


def make(folder: Path, family: str) -> Path:
    """A random model with grouped queries: qwen3 norms queries and keys, llama has biases."""
    shared: dict[str, Any] = {
        "vocab_size": 272, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": LAYERS,
        "num_attention_heads": 6, "num_key_value_heads": HEADS, "head_dim": DIM, "max_position_embeddings": 2048,
        "initializer_range": 0.25, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(7)
    config = Qwen3Config(**shared) if family == "qwen3" else LlamaConfig(**shared, attention_bias=True)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a mix-up
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder)
    return folder


def prompt(count: int, seed: int = 1) -> list[int]:
    """Random ids."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Turn:
    """tokens: drawn, logprobs: theirs. prefilled: tokens forwarded for the prompt. bytes_held: by group of the runner, once the
    prompt had been read and the first token drawn; at_end: when all were."""

    tokens: list[int]
    logprobs: list[float]
    prefilled: int
    bytes_held: list[int]
    at_end: list[int]


class Engine:
    """One engine with one method; step_tokens: most tokens of a chunk."""

    def __init__(
        self, folder: Path, name: str, *, dtype: str = "float64", step_tokens: int = 4096, page_size: int = 16,
        warm: int = 0, memory: int = 64 << 20, **options: Any,
    ) -> None:  # fmt: skip
        self.loaded = load_model(folder, dtype=dtype)
        config = EngineConfig(memory, 1500, page_size=page_size, max_rows=4, step_tokens=step_tokens, warm_memory=warm)
        self.method = methods.get(name, **options)
        self.runner = ModelRunner(self.loaded, config, self.method)
        self.runner.pages.arena.fill_(0xFF)
        self.llm = LLM(config, self.runner, reuse=self.method.reuse)

    def turn(self, ids: list[int], chain: str | None = "c", count: int = 6, edits: tuple[Edit, ...] = ()) -> Turn:
        """Continue a chain by a prompt (the whole logical history), commit it, and say what came of it."""
        llm = self.llm
        sampling = Sampling(max_tokens=count, temperature=0, logprobs=True)
        seq = llm.add(Request(ids, sampling, chain_id=chain, edits=edits))
        before, logprobs, held, at_end = None, [], None, []
        while llm.has_work:
            for out in llm.step():
                logprobs += [score.logprob for score in out.scores if out.seq is seq]
            llm.check()
            batch = llm.scheduler.batch
            if before is None:
                before = next((work.position for work in batch.rows if work.seq_id == seq.seq_id), None)
            if len(seq.token_ids) > len(ids):
                at_end = self._bytes(seq)
                held = held or at_end
        if seq.fault is not None:
            raise seq.fault
        assert held is not None
        assert before is not None
        made = seq.token_ids[len(ids) :]
        llm.commit(seq, made)
        return Turn(made, logprobs, len(ids) - before, held, at_end)

    def _bytes(self, seq: Sequence) -> list[int]:
        assert seq.state is not None
        return [len(holding.units) * holding.pool.cls.unit_bytes for holding in seq.state.holdings]


Reading = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, k, v) `[num_kv_heads, num_tokens, head_dim]` after rotation -> the same as they are read."""


def _coded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    module.exact = key[0].clone(), value[0].clone()
    k, v = module.reading(module.layer_idx, key[0], value[0])
    group, count = query.shape[1] // key.shape[1], key.shape[2]
    places = torch.arange(count - query.shape[2], count)
    hidden = torch.arange(count) > places[:, None]
    hidden[:, sorted(module.gone)] = True
    scores = query[0] @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
    out = torch.softmax(scores.masked_fill(hidden, -torch.inf), 2) @ v.repeat_interleave(group, 0)
    return out.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register("coded", _coded)
AttentionMaskInterface.register("coded", sdpa_mask)


class Twin:
    """One sequence in transformers' model. gone: positions that were pruned. reading: what attention reads."""

    def __init__(self, folder: Path, reading: Reading | None = None, dtype: torch.dtype = torch.float64) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="coded").eval()
        self.cache = DynamicCache()
        self.gone: set[int] = set()
        self.forwarded = 0
        self.reading = reading or (lambda layer, k, v: (k, v))

    @property
    def attention(self) -> list[Any]:
        """By layer."""
        return [block.self_attn for block in self.model.model.layers]

    @torch.inference_mode()
    def forward(self, tokens: list[int]) -> Tensor:
        """Log-probabilities behind the last token."""
        for each in self.attention:
            each.reading, each.gone = self.reading, self.gone
        self.forwarded += len(tokens)
        out = self.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache)
        return out.logits[0, -1].double().log_softmax(-1)

    def answer(self, ids: list[int], turn: Turn, before_each: Callable[[], None] = lambda: None) -> float:
        """Forward what is new of a prompt, then the turn's tokens one by one; the widest gap of their log-probabilities.
        before_each: called before each token of the answer is forwarded, the prompt having been read."""
        scores, gaps = self.forward(ids[self.forwarded :]), []
        for index, (token, logprob) in enumerate(zip(turn.tokens, turn.logprobs, strict=True)):
            gaps.append(abs(scores[token].item() - logprob))
            if index + 1 < len(turn.tokens):
                before_each()
                scores = self.forward([token])
        return max(gaps)
