"""Methods that choose what a decode step reads, beside transformers' model in float64, whose keys a policy hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from agentkv.engine.sparse import Plain, SparseMethod
from agentkv.engine.view import DeviceBatch, Selection
from agentkv.types import Interval, Sampling

Policy = Callable[[int, Tensor, Tensor, float], Sequence[Sequence[int]] | None]
"""(layer, q [num_heads, head_dim], k [num_kv_heads, n, head_dim], scale) -> by KV head which of n a step reads; None: all."""


class Turn(NamedTuple):
    """made: new tokens, logprobs: theirs. cached: tokens of the prompt that were held."""

    made: list[int]
    logprobs: list[float]
    cached: int


class Play:
    """An engine small enough to see: pages of eight slots unless asked."""

    def __init__(self, loaded: LoadedModel, method: SparseMethod, page_size: int = 8, **sizes: Any) -> None:
        config = EngineConfig(16 << 20, 400, page_size=page_size, max_rows=6, **({"step_tokens": 64} | sizes))
        self.runner = ModelRunner(loaded, config, method)
        self.llm = LLM(config, self.runner, reuse=method.reuse)

    def turns(
        self, prompts: list[list[int]], chain: str | None = None, count: int = 12, edits: tuple[Edit, ...] = ()
    ) -> list[Turn]:
        """Greedy answers to requests that run at once; those of a chain are committed to it."""
        sampling = Sampling(max_tokens=count, logprobs=True)
        seqs = [self.llm.add(Request(list(ids), sampling, chain_id=chain, edits=edits)) for ids in prompts]
        logprobs: dict[int, list[float]] = {seq.seq_id: [] for seq in seqs}
        while self.llm.has_work:
            for output in self.llm.step():
                logprobs[output.seq.seq_id] += [score.logprob for score in output.scores]
            self.llm.check()
        turns = []
        for seq in seqs:
            assert seq.fault is None, seq.fault.__cause__ or seq.fault
            made = list(seq.token_ids[seq.num_prompt_tokens :])
            self.llm.commit(seq, made)
            turns.append(Turn(made, logprobs[seq.seq_id], seq.num_cached_tokens))
        return turns

    def turn(self, ids: list[int], chain: str | None = None, count: int = 12, edits: tuple[Edit, ...] = ()) -> Turn:
        (found,) = self.turns([ids], chain, count, edits)
        return found


class Twin:
    """transformers' model over an uncut cache. gone: positions that were pruned."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        AttentionInterface.register("selecting", self._attend)
        AttentionMaskInterface.register("selecting", sdpa_mask)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="selecting").eval()
        self.policy, self.cache, self.gone = policy, DynamicCache(), set[int]()
        self.decoding = False

    def prune(self, spans: Sequence[Interval]) -> None:
        self.gone |= {at for start, end in spans for at in range(start, end)}

    @torch.no_grad()
    def turn(self, tokens: list[int], count: int = 12) -> Turn:
        """Forward new tokens of a prompt, then decode. The last token made is not forwarded."""
        made: list[int] = []
        logprobs: list[float] = []
        for _ in range(count):
            self.decoding = bool(made)
            out = self.model(input_ids=torch.tensor([made[-1:] or tokens]), past_key_values=self.cache).logits[0, -1]
            scores = torch.log_softmax(out, 0)
            made.append(int(scores.argmax()))
            logprobs.append(float(scores[made[-1]]))
        return Turn(made, logprobs, 0)

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        new, length, num_kv_heads = q.shape[2], k.shape[2], k.shape[1]
        seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        seen = (seen & torch.tensor([at not in self.gone for at in range(length)])).expand(num_kv_heads, -1, -1).clone()
        if self.decoding:
            alive = [at for at in range(length) if at not in self.gone]
            chosen = self.policy(module.layer_idx, q[0, :, 0], k[0][:, alive], scaling)
            for head, read in enumerate(chosen or ()):
                seen[head] = False
                seen[head, :, [alive[index] for index in read]] = True
        outs = []
        for head in range(q.shape[1]):
            kv_head = head * num_kv_heads // q.shape[1]
            scores = (q[0, head] @ k[0, kv_head].T * scaling).masked_fill(~seen[kv_head], -torch.inf)
            outs.append(torch.softmax(scores, 1) @ v[0, kv_head])
        return torch.stack(outs, 1).unsqueeze(0), None


def same(ours: Turn, theirs: Turn, close: float = 1e-9) -> None:
    assert ours.made == theirs.made
    assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) < close


@dataclass
class Seen:
    """By layer: q, k and v of a prompt's tokens, of the first decoded token, and what that one reads, by KV head, where it
    selects."""

    prompt: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    own: dict[int, list[Tensor]] = field(default_factory=dict)
    read: dict[int, list[list[int]]] = field(default_factory=dict)

    def plain(self, scale: float, page_size: int) -> Plain:
        q, k, v = ([torch.cat([chunk[i] for chunk in self.prompt[layer]]) for layer in sorted(self.prompt)] for i in range(3))
        query = [self.own[layer][0][0] for layer in sorted(self.own)]
        own = [(self.own[layer][1][0], self.own[layer][2][0]) for layer in sorted(self.own)]
        return Plain(q, k, v, query, [], [], scale, own, page_size=page_size)


def spying(kind: type[SparseMethod]) -> type[Any]:
    """The method, noting in `seen` what goes through its hooks."""

    @dataclass(frozen=True)
    class Spying(kind):  # type: ignore[valid-type, misc]
        seen: Seen = field(default_factory=Seen, compare=False)

        def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
            if batch.prefill:
                self.seen.prompt.setdefault(layer, []).append([k, k, v])
            else:
                self.seen.own.setdefault(layer, [k, k, v])
            super().store(layer, k_raw, k, v, batch)

        def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
            chosen: Selection | None = super().select(layer, q, q_raw, batch)
            (self.seen.prompt[layer][-1] if batch.prefill else self.seen.own[layer])[0] = q
            if chosen is not None and layer not in self.seen.read:
                self.seen.read[layer] = _slots(chosen, batch, layer)
            return chosen

    return Spying


def _slots(chosen: Selection, batch: DeviceBatch, layer: int) -> list[list[int]]:
    """By KV head the slots of a batch's only row."""
    table, num_kv_heads = batch.table_of(layer), batch.pages(layer).shape[1]
    lines = chosen.slots[0].view(-1, chosen.slots.shape[-1]).expand(num_kv_heads, -1).tolist()
    lens = chosen.lens[0].view(-1).expand(num_kv_heads).tolist()
    read = [line[:count] for line, count in zip(lines, lens, strict=True)]
    if chosen.pages:
        size, held = table.page_size, table.host_lens[0]
        read = [[at for page in line for at in range(page * size, min(page * size + size, held))] for line in read]
    return read
