"""Greedy play of many tasks at once with attention cut to a window: a control for what the model needs to see.

It runs on the training module with its own simple cache, so it is also evidence independent of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from agentkv.world import render, tokens, trajectory
from agentkv.world.env import World
from agentkv.world.micro_model import Micro, load, rope, rotate
from agentkv.world.reference_play import answer_of
from agentkv.world.trajectory import Event

LONGEST_TURN = 200
CHUNK = 1024  # tokens of one forward pass


class Player:
    """Rows of tokens with their keys and values. `window`: how far back a query sees, beside the first `heads[row]` tokens."""

    def __init__(self, model: Micro, rows: int, capacity: int, window: int | None) -> None:
        c = model.config
        weight = model.embed_tokens.weight
        self.model, self.window = model, window
        self.keys = torch.zeros(c.layers, rows, c.kv_heads, capacity, c.head_dim, device=weight.device, dtype=weight.dtype)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.heads = torch.zeros_like(self.lengths)

    def feed(self, new: Sequence[Sequence[int]]) -> list[int]:
        """Append tokens to each row (none is fine) and return the likeliest next token of each."""
        best = [0] * len(new)
        for start in range(0, max(map(len, new)), CHUNK):
            part = [ids[start : start + CHUNK] for ids in new]
            best = [token if ids else old for token, ids, old in zip(self._chunk(part), part, best, strict=True)]
        return best

    @torch.no_grad()
    def _chunk(self, new: Sequence[Sequence[int]]) -> list[int]:
        device = self.lengths.device
        counts = torch.tensor([len(ids) for ids in new], device=device)
        width = int(counts.max())
        ids = torch.zeros(len(new), width, dtype=torch.long)
        for i, row in enumerate(new):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        at = self.lengths[:, None] + torch.arange(width, device=device)  # places beyond a row's own are overwritten later
        x = self.model.embed_tokens(ids.to(device))
        cos, sin = rope(at, self.model.config)
        reach = int(self.lengths.max()) + width
        seen = self._seen(at, reach)
        for i, layer in enumerate(self.model.layers):
            x = self._layer(i, layer, x, cos, sin, at, seen)
        last = (counts - 1).clamp_min(0)
        hidden = self.model.norm(x[torch.arange(len(new), device=device), last])
        self.lengths += counts
        found: list[int] = self.model.logits(hidden).argmax(-1).tolist()
        return found

    def _seen(self, at: Tensor, reach: int) -> Tensor:
        place = torch.arange(reach, device=at.device)
        seen = place <= at[:, :, None]
        if self.window is not None:
            seen &= (place > at[:, :, None] - self.window) | (place < self.heads[:, None, None])
        return seen[:, None]

    def _layer(self, i: int, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        attention, c = layer.self_attn, self.model.config
        rows, width, _ = x.shape
        h = layer.input_layernorm(x)
        q = attention.q_norm(attention.q_proj(h).view(rows, width, c.heads, c.head_dim)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(h).view(rows, width, c.kv_heads, c.head_dim)).transpose(1, 2)
        v = attention.v_proj(h).view(rows, width, c.kv_heads, c.head_dim).transpose(1, 2)
        where = at[:, None, :, None].expand_as(k)
        self.keys[i].scatter_(2, where, rotate(k, cos, sin))
        self.values[i].scatter_(2, where, v)
        # The query heads that share a key head stand one below the other, so that nothing is copied.
        reach, repeat = seen.shape[-1], c.heads // c.kv_heads
        stacked = rotate(q, cos, sin).reshape(rows, c.kv_heads, repeat * width, c.head_dim)
        keys, values = self.keys[i, :, :, :reach], self.values[i, :, :, :reach]
        out = F.scaled_dot_product_attention(stacked, keys, values, seen.repeat(1, 1, repeat, 1))
        out = out.reshape(rows, c.heads, width, c.head_dim)  # on a GPU the output may be laid out otherwise
        x = x + attention.o_proj(out.transpose(1, 2).reshape(rows, width, -1))
        result: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return result

    def turns(self, alive: Sequence[bool], first: Sequence[int]) -> list[list[int]]:
        """One greedy turn of each living row, from the token that `feed` gave."""
        made: list[list[int]] = [[] for _ in first]
        going, following = list(alive), list(first)
        for _ in range(LONGEST_TURN):
            step = [[token] if go else [] for go, token in zip(going, following, strict=True)]
            for row, new in zip(made, step, strict=True):
                row += new
            going = [go and token != tokens.IM_END for go, token in zip(going, following, strict=True)]
            following = self.feed(step)  # the end of a turn is fed too
            if not any(going):
                break
        return made


def play(folder: Path, worlds: Sequence[World], window: int | None, device: str = "cpu", most_turns: int = 16) -> list[bool]:
    """The verdicts of some tasks, played in step; `window` None is the model as it is."""
    model = load(folder, device)
    longest = max(2 * world.task.metadata["bytes"] for world in worlds)
    player = Player(model, len(worlds), longest + LONGEST_TURN + CHUNK, window)
    new = [trajectory.encode([Event("user", world.prompt)], world.dialect).ids for world in worlds]
    player.heads += torch.tensor([len(ids) for ids in new], device=device)
    opening = [tokens.IM_START, *tokens.plain("assistant\n")]
    alive = [True] * len(worlds)
    for _ in range(most_turns):
        first = player.feed([[*ids, *opening] if go else [] for ids, go in zip(new, alive, strict=True)])
        made = player.turns(alive, first)
        for i, world in enumerate(worlds):
            body = answer_of(tokens.decode(made[i]), world) if alive[i] else None
            new[i] = [] if body is None else _result(world, body)
            alive[i] = bool(new[i]) and int(player.lengths[i]) + len(new[i]) < longest
        if not any(alive):
            break
    return [world.verdict() for world in worlds]


def _result(world: World, body: str) -> list[int]:
    out = render.Ids()
    out.add([10])  # behind the turn's end
    render.result(out, body)
    return out.ids
