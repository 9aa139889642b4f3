"""What a method was given and what attention read, written down while one session runs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentkv.check.watch import Watcher
from agentkv.engine.gathered import gather_row
from agentkv.engine.sparse import Plain
from agentkv.engine.tables import RowTable
from agentkv.engine.view import AttentionView, DeviceBatch, Part


@dataclass
class LayerSeen:
    """One layer's tokens in order: x, q, k, v of prompts, of replays, and of what was decoded; out: attention's output."""

    x: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)


class Decodes(Watcher):
    """A prompt's plain tensors, and those of each token that is decoded behind it."""

    def __init__(self, num_layers: int) -> None:
        self.prompt = [LayerSeen() for _ in range(num_layers)]
        self.token = [LayerSeen() for _ in range(num_layers)]
        self._replays: list[list[LayerSeen]] = []
        self._ends: list[int] = []

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Note what belongs to the prompt or to the answer."""
        if hook == "on_step_begin" and args[0].replay:
            self._begin_replay(args[0])
        if hook == "project":
            self._of(args[0], args[2]).x.append(args[1].clone())
        elif hook == "store":
            seen = self._of(args[0], args[4])
            seen.k.append(args[2].clone())
            seen.v.append(args[3].clone())
        elif hook == "on_attention_end":
            seen = self._of(args[0], args[5])
            seen.q.append(args[1].clone())
            seen.out.append(args[2].clone())
        return call(*args)

    def _begin_replay(self, batch: DeviceBatch) -> None:
        """A run may take several chunks, which follow one another by position."""
        (span,) = batch.rows
        end = span.position + span.end - span.start
        if self._ends and self._ends[-1] == span.position:
            self._ends[-1] = end
        else:
            self._replays.append([LayerSeen() for _ in self.prompt])
            self._ends.append(end)

    def _of(self, layer: int, batch: DeviceBatch) -> LayerSeen:
        if batch.replay:
            return self._replays[-1][layer]
        return (self.prompt if batch.prefill else self.token)[layer]

    def plain(self, scale: float, page_size: int, step: int = 0) -> Plain:
        """For `reference`, of a decode step by its number."""

        def before(name: str) -> list[Tensor]:
            pairs = zip(self.prompt, self.token, strict=True)
            return [torch.cat((*getattr(prompt, name), *getattr(token, name)[:step])) for prompt, token in pairs]

        return Plain(
            q=before("q"),
            k=before("k"),
            v=before("v"),
            query=[seen.q[step][0] for seen in self.token],
            x=before("x"),
            replays=[[(torch.cat(seen.q), torch.cat(seen.k)) for seen in run] for run in self._replays],
            scale=scale,
            own=[(seen.k[step][0], seen.v[step][0]) for seen in self.token],
            own_x=[seen.x[step][0] for seen in self.token],
            page_size=page_size,
            decoded=step,
        )


class ReadSlot(NamedTuple):
    """A slot that attention read, told by its key: position of the nearest key that was stored. exact: it is that key, bit for
    bit."""

    position: int
    exact: bool


class ViewWatcher(Watcher):
    """What each view lets the first row of a batch read.

    counts: (layer, position of the query, most slots of a head) of decode steps. reads: (layer, slots by head) of every view,
    where keys are wanted.
    """

    def __init__(self, num_kv_heads: int, *, keys: bool = False) -> None:
        self.counts: list[tuple[int, int, int]] = []
        self.reads: list[tuple[int, list[list[ReadSlot]]]] = []
        self._heads, self._wanted = num_kv_heads, keys
        self._stored: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Note keys as they are stored, and views as they are made."""
        if hook == "store" and not args[4].replay:
            self._stored.setdefault(args[0], []).append((args[2].clone(), args[4].positions.clone()))
        made = call(*args)
        if hook == "view" and not args[2].replay:
            self._note(args[0], made, args[2])
        return made

    def forget(self) -> None:
        """Look at what is read from now on; keys are still known."""
        self.counts.clear()
        self.reads.clear()

    def _note(self, layer: int, view: AttentionView, batch: DeviceBatch) -> None:
        if not batch.prefill:
            most = max(sum(_length(part, head) for part in view.parts) for head in range(self._heads))
            self.counts.append((layer, batch.rows[0].position, most))
        if self._wanted:
            keys, positions = (torch.cat(column) for column in zip(*self._stored[layer], strict=True))
            heads = range(self._heads)
            self.reads.append((layer, [_found(view, head, keys[:, head], positions) for head in heads]))


def _found(view: AttentionView, head: int, keys: Tensor, positions: Tensor) -> list[ReadSlot]:
    """Slots of one head. keys: `[n, head_dim]` as they were stored at positions int64 `[n]`."""
    slots = []
    for part in view.parts:
        row = gather_row(part, 0, keys.dtype)
        k = row.k[head, : int(row.lens[head])]
        if row.bias is not None:
            k = k[row.bias[min(head, len(row.bias) - 1), : len(k)] != -torch.inf]
        if len(k):
            nearest = torch.cdist(k, keys).argmin(1)
            exact = (k == keys[nearest]).all(1)
            slots += [ReadSlot(*pair) for pair in zip(positions[nearest].tolist(), exact.tolist(), strict=True)]
    return slots


def _length(part: Part, head: int) -> int:
    """Slots that the part lets the last query of the first row read."""
    table = part.table
    first = table.first_slots[0] if isinstance(table, RowTable) else 0
    lens = table.lens[:1] if isinstance(table, RowTable) else table.lens[0]
    length = int(lens[min(head, len(lens) - 1)]) - first
    if part.bias is not None:
        bias = part.bias[0, min(head, part.bias.shape[1] - 1), first : first + length]
        length -= int((bias == -torch.inf).sum())
    return length
