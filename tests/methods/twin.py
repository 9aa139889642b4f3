"""A chain of turns in our engine, and beside it transformers' model, whose attention is told what is held."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from evicted import Engine, Turn, kept_mask
from masked import Masked, Sight, Tensors

from agentkv.engine.core import Edit
from agentkv.engine.sparse import Plain


class Twin:
    """Both are told the same prompts. held: by layer and KV head, the positions that the next prompt sees of what was before
    it; tensors: by layer, of the last prompt."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        self.engine = Engine(folder, name, **options)
        self.masked = Masked(folder)
        self.history: list[int] = []
        self.forwarded = 0
        self.edits: tuple[Edit, ...] = ()
        self.held: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.tensors: list[Tensors] = []

    def turn(self, more: list[int], count: int = 8, reads: Sight | None = None) -> tuple[Turn, float]:
        """The engine's turn, and the widest difference of its log-probabilities from those of the twin. reads: what tokens of
        answers see; None: what the engine held when the prompt had been read, and the answer."""
        ids, before = [*self.history, *more], self.forwarded
        turn = self.engine.turn(ids, count=count, edits=self.edits)
        first = self.masked.forward(ids[before:], lambda layer, head, at: self.held[layer, head] | set(range(before, at + 1)))
        self.tensors = self.masked.tensors
        sight = reads or (lambda layer, head, at: {*turn.kept(layer, head), *range(len(ids), at + 1)})
        logprobs = self.masked.answer(first, turn.tokens, sight)
        self.history, self.forwarded = [*ids, *turn.tokens], len(ids) + len(turn.tokens) - 1
        sealed, tail = turn.left
        for layer, heads in enumerate(sealed):
            for head, slots in enumerate(heads):
                self.held[layer, head] = {*slots, *tail}
        return turn, max(abs(a - b) for a, b in zip(logprobs, turn.logprobs, strict=True))

    def prune(self, start: int, end: int) -> None:
        """Remove tokens between turns."""
        self.engine.llm.prune("c", [(start, end)])
        self.engine.llm.check()
        self.edits = (*self.edits, Edit(len(self.history), ((start, end),)))
        for held in self.held.values():
            held -= set(range(start, end))

    @property
    def plain(self) -> Plain:
        """The last prompt, which must have been the first, as the method's reference takes it."""
        q, k, v = ([getattr(layer, name) for layer in self.tensors] for name in "qkv")
        return Plain(q, k, v, [each[-1] for each in q], [], [], self.tensors[0].scale)


def same_as_reference(twin: Twin, turn: Turn) -> None:
    """The engine held what the method's reference says of transformers' tensors."""
    mask = kept_mask(turn, len(twin.tensors[0].k))
    for layer in range(len(mask)):
        read = twin.engine.method.reference(twin.plain, layer)
        for head, positions in enumerate(read.positions):
            assert mask[layer, head].nonzero().flatten().tolist() == list(positions)
