"""Tokens that the model needs to repeat its context stay, whatever is asked later (arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.core import SLOT
from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, ModelShape, Most, Needs, Plain, Read, SparseMethod, StateSpec
from agentkv.engine.view import DeviceBatch, HeadTable, PagedKV, RowMass
from agentkv.kernels.chunk_attention import gather_kv
from agentkv.kernels.gather_slots import gather_heads
from agentkv.kernels.received_mass import received_mass
from agentkv.kernels.reference import probabilities
from agentkv.kernels.replay_mass import replay_mass
from agentkv.kernels.top_positions import top_positions
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob

_SHORTEST, _LONGEST = 8, 1024
"""Tokens of a chunk, each of which is a pass of the model; and of a part of the instruction."""


@dataclass(frozen=True)
class KVzip(SparseMethod):
    """After a prompt its tokens are forwarded again, `chunk` by chunk behind an instruction to repeat them. A token's score is
    the most attention that it gets there from a query of a KV head's group. Tokens of the prompt alone are scored and go; a
    later prompt's seal also weighs what the answer before it added, and what is sealed keeps its scores. Ties: lower index.

    keep_ratio: the share that stays, over all layers and heads. scope: who competes: all heads of the "model" (the paper),
    those of a "layer", or "token": the same tokens stay in all, by their highest score. softmax: over the first `sinks` keys,
    the chunk and the replay ("chunk", the paper's code), or over "all" that the queries see. sinks: first tokens, which always
    stay; system: first tokens that are not replayed, so their score is 0 (the paper: both are the length of the system
    prompt). prefix, prefix_later, suffix: token ids of the instruction for the first chunk, for the others (which ends with
    the last `lead_in` tokens of the chunk before), and of what opens the model's answer; a method knows no tokenizer.
    """

    keep_ratio: float = 0.3
    chunk: int = 2048
    sinks: int = 4
    system: int = 0
    scope: Literal["model", "layer", "token"] = "model"
    softmax: Literal["chunk", "all"] = "chunk"
    prefix: tuple[int, ...] = ()
    prefix_later: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    lead_in: int = 8

    family: ClassVar[str] = "eviction"
    paper: ClassVar[str | None] = "arXiv 2505.23416"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    counts_on_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise ValueError(f"keep_ratio={self.keep_ratio}: above 0, at most 1")
        for name, least in (("chunk", _SHORTEST), ("sinks", 0), ("system", 0), ("lead_in", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: tokens, at least {least}")
        if self.lead_in > self.chunk:
            raise ValueError(f"lead_in={self.lead_in}: tokens of a chunk={self.chunk}, no more")
        if self.scope not in ("model", "layer", "token"):
            raise ValueError(f"scope={self.scope!r}: model, layer or token")
        if self.softmax not in ("chunk", "all"):
            raise ValueError(f"softmax={self.softmax!r}: chunk or all")
        for name in ("prefix", "prefix_later", "suffix"):
            ids = tuple(getattr(self, name))
            if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in ids) or len(ids) > _LONGEST:
                raise ValueError(f"{name}: token ids, at most {_LONGEST}, not {ids!s:.80}")
            object.__setattr__(self, name, ids)

    @property
    def seals_into(self) -> Literal["stripe", "head"]:  # type: ignore[override]  # by an option here
        """Heads keep different numbers of tokens, unless all keep the same tokens."""
        return "stripe" if self.scope == "token" else "head"

    @property
    def needs(self) -> Needs:
        """What attention divided by, where the scores are of the same softmax."""
        return Needs(lse=self.softmax == "all")

    def unserved(self, model: ModelShape) -> str | None:
        """The instruction's ids must be among the model's tokens."""
        most = max((*self.prefix, *self.prefix_later, *self.suffix), default=-1)
        return f"token id {most} is none of its {model.vocab_size}" if most >= model.vocab_size else super().unserved(model)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """The scores."""
        return (StateSpec("score", "slot", "float32", "mutable", (model.num_layers, model.num_kv_heads, SLOT), "both"),)

    def keep(self, held: Held) -> Keep | None:
        """At each prompt's end."""
        if not held.prompt_end or self.keep_ratio == 1:
            return None
        slots = held.slots + held.tail
        return self._kept(held.tokens, slots, min(slots, self._share(held.tokens)))

    def most(self, prompt: int, tokens: int) -> Most:
        """What `keep` leaves, and the answer."""
        if self.keep_ratio == 1:
            return Most(tokens, Keep(0, 0))
        return Most(tokens - prompt, self._kept(prompt, prompt, self._share(prompt)))

    def replay_most(self, prompt: int) -> int:
        """The longer instruction and a chunk."""
        asked = max(len(self.prefix), len(self.prefix_later) + min(self.lead_in, prompt))
        return 0 if self.keep_ratio == 1 else asked + len(self.suffix) + min(prompt, self.chunk)

    def replay(self, held: Held, token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """One run for each chunk of what has no score yet."""
        context = tuple(token_ids[self.system if held.floor == 0 else 0 :])
        runs = []
        for at in range(0, len(context), self.chunk):
            asked = (*self.prefix_later, *context[max(0, at - self.lead_in) : at]) if at else self.prefix
            runs.append((*asked, *self.suffix, *context[at : at + self.chunk]))
        return tuple(runs)

    def on_step_begin(self, batch: DeviceBatch) -> None:
        """Nobody has repeated the new tokens."""
        units, places = batch.state("score")
        units[places.entries, :, :, places.offsets] = units.new_zeros(())  # a plain 0 would be copied from the host

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        """Of a replay: the scores of the chunk that it repeats."""
        if not batch.replay:
            return
        units, places = batch.state("score")
        for index, span in enumerate(batch.rows):
            queries, plan = q[span.start : span.end], batch.table_of(layer).chunk_plan[index]
            prompt = len(plan[0]) - span.run_from - len(queries)
            sealed = 0 if batch.sealed is None else batch.sealed.host_slots[index]
            first = (0 if sealed else self.system) + span.run * self.chunk
            stop = min(first + self.chunk, prompt)
            keys, _ = gather_kv(batch.pages(layer), plan)
            chunk = keys[:, first:stop]
            if self.softmax == "all" and lse is not None:
                ends = torch.full((len(queries),), stop - first, dtype=torch.int32, device=q.device)
                scores = received_mass(queries, chunk, lse[span.start : span.end], ends, batch.scale, reduce="max")
            else:
                sinks, lens = self._sinks(layer, batch, index, keys[:, : min(self.sinks, first)])
                scores = replay_mass(queries, chunk, sinks, keys[:, prompt:], batch.scale, lens=lens)
            entries, offsets = (each[first:stop] for each in places.table.chunk_plan[index])
            before = units[entries, layer, :, offsets]
            units[entries, layer, :, offsets] = torch.maximum(before, scores.T.to(units.dtype))

    def seal(self, job: SealJob) -> Kept:
        """The highest scores, first tokens above all."""
        assert job.work.seal is not None
        scores, tokens = job.items("score"), job.work.held.tokens
        found = [job.candidates(layer) for layer in range(len(scores))]
        valid, positions = (torch.stack([getattr(each, name) for each in found]) for name in ("valid", "positions"))
        scores = scores.masked_fill(positions < self.sinks, torch.inf).masked_fill(~valid, -torch.inf)
        num_layers, num_kv_heads, _ = scores.shape
        if self.scope == "token":
            ranked, count = scores.amax((0, 1)).unsqueeze(0), self._share(tokens)
        elif self.scope == "layer":
            ranked, count = scores.flatten(1), self._share(num_kv_heads * tokens)
        else:
            ranked, count = scores.view(1, -1), self._share(num_layers * num_kv_heads * tokens)
        chosen = top_positions(ranked, count).to(torch.int64)
        kept = torch.zeros(len(ranked), ranked.shape[1] + 1, dtype=torch.bool, device=scores.device)
        kept = kept.scatter_(1, chosen, True)[:, :-1]
        kept = kept.expand_as(scores) if self.scope == "token" else kept.view(scores.shape)
        kept = kept & valid
        order = torch.sort((~kept).to(torch.uint8), dim=2, stable=True).indices
        return Kept(order[..., : job.work.seal.slots], kept.sum(2, dtype=torch.int32))

    def identity(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"keep_ratio": 1.0}

    def small(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"chunk": 40}

    def reference(self, plain: Plain, layer: int) -> Read:
        """Scores query by query, sorted in Python."""
        num_kv_heads, held = plain.k[0].shape[1], len(plain.k[0])
        total = held - plain.decoded
        found: list[tuple[float, int, int, int]] = []  # (-score, layer, head, position)
        for at, keys in enumerate(plain.k):
            best = torch.zeros(num_kv_heads, total, dtype=torch.float64)
            for number, run in enumerate(plain.replays):
                (q, own), first = run[at], self.system + number * self.chunk
                chunk = [*range(first, min(first + self.chunk, total))]
                seen = (
                    [*range(min(self.sinks, first))] if self.softmax == "chunk" else [j for j in range(total) if j not in chunk]
                )
                ends = range(len(seen) + len(chunk) + 1, len(seen) + len(chunk) + len(q) + 1)
                given = probabilities(q, torch.cat([keys[seen + chunk], own]), plain.scale, ends)[..., len(seen) :]
                best[:, chunk] = given[..., : len(chunk)].amax(1).view(num_kv_heads, -1, len(chunk)).amax(1)
            best[:, : self.sinks] = 2.0
            found += [(-best[head, j].item(), at, head, j) for head in range(num_kv_heads) for j in range(total)]
        if self.scope == "token":
            found = [(min(each[0] for each in found if each[3] == j), layer, 0, j) for j in range(total)]
        elif self.scope == "layer":
            found = [each for each in found if each[1] == layer]
        kept = {each[1:] for each in sorted(found)[: len(found) - int(len(found) * (1 - self.keep_ratio) + 1e-6)]}
        if self.scope == "token":
            kept = {(layer, head, j) for _, _, j in kept for head in range(num_kv_heads)}
        of_heads = [sorted(j for at, h, j in kept if (at, h) == (layer, head)) for head in range(num_kv_heads)]
        positions = [[*each, *range(total, held)] for each in of_heads]
        return Read(positions, *([x[layer][seen, head] for head, seen in enumerate(positions)] for x in (plain.k, plain.v)))

    def _kept(self, floor: int, slots: int, mean: int) -> Keep:
        """slots: all that a head may keep."""
        if self.scope == "token":
            return Keep(floor, mean)
        return Keep(floor, slots, mean, across=self.scope == "model")

    def _share(self, count: int) -> int:
        """So many of `count` stay: what is removed is rounded down, but for the last bits of a float."""
        return max(1, ceil(count * self.keep_ratio - 1e-6))

    def _sinks(self, layer: int, batch: DeviceBatch, index: int, firsts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys of the first tokens, and how many each head holds; firsts: those that lie in the tail before the chunk."""
        count = 0 if batch.sealed is None else min(self.sinks, batch.sealed.host_slots[index])
        if batch.sealed is None or not count:
            return firsts, None
        part = batch.sealed.part(layer)
        assert isinstance(part.table, HeadTable)
        assert isinstance(part.payload, PagedKV)
        lens = part.table.lens[index].clamp(max=count)
        return gather_heads(part.payload.pages, part.table.entries[index], count, lens)[0], lens
