"""Our engine over a model folder with one method: turns of a chain, and what a sealed part holds, read from bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentkv import methods
from agentkv.engine.core import GRANULE, Edit, EngineConfig, Request, Sequence
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling

PAGE = 16  # slots of a sealed page


@dataclass
class Turn:
    """tokens: drawn. logprobs: theirs. kept: by layer and head, positions of the sealed part and of the tail, when the prompt
    had just been read. bytes_held: of the sequence then, sealed_bytes: those of them that are K, V and positions of the sealed
    part. prefilled: tokens that were forwarded for the prompt. left: as `sealed` and `tail`, when the answer was complete."""

    tokens: list[int]
    logprobs: list[float]
    sealed: list[list[list[int]]]
    tail: list[int]
    bytes_held: int
    sealed_bytes: int
    prefilled: int
    left: tuple[list[list[list[int]]], list[int]]

    def kept(self, layer: int, kv_head: int) -> list[int]:
        return [*self.sealed[layer][kv_head], *self.tail]


class Engine:
    """step_tokens: most tokens of a chunk."""

    def __init__(self, folder: Path, name: str, *, dtype: str = "float64", step_tokens: int = 4096, **options: Any) -> None:
        self.loaded = load_model(folder, dtype=dtype)
        config = EngineConfig(64 << 20, 2000, page_size=16, max_rows=4, step_tokens=step_tokens)
        self.method = methods.get(name, **options)
        self.llm = LLM(config, ModelRunner(self.loaded, config, self.method), reuse=self.method.reuse)

    def turn(self, ids: list[int], chain: str = "c", count: int = 8, edits: tuple[Edit, ...] = ()) -> Turn:
        """Continue a chain by a prompt (the whole logical history), commit it, and say what came of it."""
        llm = self.llm
        seq = llm.add(Request(ids, Sampling(max_tokens=count, temperature=0, logprobs=True), chain_id=chain, edits=edits))
        before, logprobs, found = None, [], None
        while llm.has_work:
            for out in llm.step():
                logprobs += [score.logprob for score in out.scores if out.seq is seq]
            llm.check()
            batch = llm.scheduler.batch
            if before is None:
                before = next((work.position for work in batch.rows if work.seq_id == seq.seq_id), None)
            if found is None and len(seq.token_ids) > len(ids):
                found = *self.positions(seq), *self._bytes(seq)
        assert seq.fault is None, seq.fault.__cause__
        assert found is not None
        assert before is not None
        made = seq.token_ids[len(ids) :]
        left = self.positions(seq)
        llm.commit(seq, made)
        return Turn(made, logprobs, *found, len(ids) - before, left)

    def positions(self, seq: Sequence) -> tuple[list[list[list[int]]], list[int]]:
        """Logical positions of a running sequence's slots: sealed ones by layer and head, and the tail's."""
        state, shape = seq.state, self.loaded.config
        assert state is not None
        tail = [p for start, end in state.runs for p in range(max(start, state.floor), end)]
        if not state.sealed or not state.sealed[0].units:
            return [[[] for _ in range(shape.num_kv_heads)] for _ in range(shape.num_layers)], tail
        heads, arena = shape.num_layers * shape.num_kv_heads, self.llm.runner.pages.arena
        units, (lens_unit,) = state.sealed[0].units, state.sealed[1].units
        lens = _words(arena, lens_unit * GRANULE, heads).tolist()
        payload = 2 * PAGE * shape.head_dim * self.loaded.dtype.itemsize  # of one head
        found, page = [], 0
        for head, length in enumerate(lens):
            slots: list[int] = []
            for index in range(-(-length // PAGE)):
                if state.form.shrinks:  # stripes: the positions of all heads follow the payload of all heads
                    slots += _words(arena, units[index] * GRANULE + payload * heads + head * PAGE * 4, PAGE).tolist()
                else:
                    slots += _words(arena, units[page] * GRANULE + payload, PAGE).tolist()
                    page += 1
            found.append(slots[:length])
        return [found[i : i + shape.num_kv_heads] for i in range(0, heads, shape.num_kv_heads)], tail

    def _bytes(self, seq: Sequence) -> tuple[int, int]:
        assert seq.state is not None
        of = [len(holding.units) * holding.pool.cls.unit_bytes for holding in seq.state.holdings]
        sealed = seq.state.sealed
        return sum(of), len(sealed[0].units) * sealed[0].pool.cls.unit_bytes if sealed else 0


def _words(arena: Tensor, offset: int, count: int) -> Tensor:
    return arena[offset : offset + 4 * count].view(torch.int32)


def kept_mask(turn: Turn, length: int) -> Tensor:
    """bool [num_layers, num_kv_heads, length] of what was held when the prompt had been read."""
    mask = torch.zeros(len(turn.sealed), len(turn.sealed[0]), length, dtype=torch.bool)
    for layer, heads in enumerate(turn.sealed):
        for head in range(len(heads)):
            kept = turn.kept(layer, head)
            assert kept == sorted(set(kept)), "ascending, each once"
            mask[layer, head, kept] = True
    return mask


def prompt(count: int, vocab: int = 256, seed: int = 1) -> list[int]:
    """Ids below `vocab`, reproducible."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
