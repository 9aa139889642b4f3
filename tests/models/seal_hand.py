"""A host side by hand for sealing methods, toy methods, and transformers with a mask for each layer and head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.core import GRANULE, WHOLE, Batch, EngineConfig, Reach, RowWork
from agentkv.engine.form import Held
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Keep, Kept, Most, Needs, SparseMethod
from agentkv.engine.work import SealWork, TableUpdate, TailPages
from agentkv.types import Sampling

LAYERS, HEADS, RECENT = 3, 2, 3


def drops(position: Any, layer: int, head: int, tokens: int) -> Any:
    """Does a toy's seal of so many tokens drop the position? For numbers and for tensors."""
    return (7 * position + 3 * layer + 5 * head + tokens) % (2 + layer + head) == 0


@dataclass(frozen=True)
class Toy(SparseMethod):
    """Keeps the positions that `drops` leaves, and all of the last three. seen: queries at each seal, by layer."""

    window: int = 0
    seen: list[list[Tensor]] = field(default_factory=list, compare=False)
    evicts: ClassVar[bool] = True
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    @property
    def needs(self) -> Needs:
        return Needs(query_window=self.window)

    def keep(self, held: Held) -> Keep | None:
        floor = held.tokens - RECENT
        due = held.prompt_end or held.tail >= 2 * RECENT
        return Keep(floor, held.slots + floor - held.floor) if due else None

    def most(self, prompt: int, tokens: int) -> Most:
        return Most(tokens, Keep(tokens, tokens), again=True)

    def seal(self, job: SealJob) -> Kept:
        assert job.work.seal is not None
        floor, tokens = job.work.seal.floor, job.work.held.tokens
        self.seen.append([job.queries(layer).clone() for layer in range(LAYERS)])
        indices, counts = [], []
        for layer in range(job.shape.num_layers):
            found = job.candidates(layer)
            heads = torch.arange(job.shape.num_kv_heads).unsqueeze(1)
            stays = ~drops(found.positions, layer, heads, tokens) & found.valid & (found.positions < floor)
            order = torch.sort((~stays).to(torch.uint8), dim=1, stable=True).indices
            indices.append(order[:, : job.work.seal.slots])
            counts.append(stays.sum(1, dtype=torch.int32))
        return Kept(torch.stack(indices), torch.stack(counts))


@dataclass(frozen=True)
class Thirds(Toy):
    """Adds two of three positions of the tail to what is sealed, the same in every layer and head."""

    def keep(self, held: Held) -> Keep | None:
        floor = held.tokens - RECENT
        more = sum(position % 3 > 0 for position in range(held.floor, floor))
        return Keep(floor, held.slots + more, appends=True)

    def seal(self, job: SealJob) -> Kept:
        assert job.work.seal is not None
        found, slots = job.candidates(0), job.work.seal.slots
        stays = (torch.arange(found.valid.shape[1]) < found.tail) | (found.positions[0] % 3 > 0)
        stays &= found.positions[0] < job.work.seal.floor
        order = torch.sort((~stays).to(torch.uint8), stable=True).indices[:slots]
        return Kept(order.expand(LAYERS, HEADS, -1), torch.full((LAYERS, HEADS), slots, dtype=torch.int32))


@dataclass(frozen=True)
class HeadToy(Toy):
    """The same in pages of heads, as many as all heads together need."""

    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "head"


@dataclass
class Row:
    """What a row holds. units: by group, pages from the first slot there ever was (0 for those that were let go)."""

    form: int
    tokens: list[int] = field(default_factory=list)
    floor: int = 0
    slots: int = 0
    units: dict[int, list[int]] = field(default_factory=dict)


class Hand:
    """Rows over a runner whose free memory is NaN: units are scattered, and what is let go is NaN again."""

    def __init__(self, loaded: LoadedModel, methods: Any, page_size: int = 4) -> None:
        config = EngineConfig(24 << 20, 128, page_size=page_size, max_rows=4)
        self.runner = ModelRunner(loaded, config, methods)
        self.page_size = page_size
        self.runner.pages.arena.fill_(0xFF)
        self.next = 3
        self.rows: dict[int, Row] = {}

    def take(self, group: int, count: int) -> list[int]:
        """Fresh units, descending and with gaps."""
        size = self.runner.groups[group].stripe_bytes // GRANULE
        units = [self.next + 2 * size * i for i in reversed(range(count))]
        self.next += 2 * size * count + 1
        assert self.next < self.runner.num_granules
        return units

    def drop(self, group: int, units: Sequence[int]) -> None:
        size = self.runner.groups[group].stripe_bytes
        for unit in units:
            self.runner.pages.arena[unit * GRANULE : unit * GRANULE + size].fill_(0xFF)

    def batch(self, work: dict[int, list[int]], form: int = 0, *, replay: bool = False, step: int | None = None) -> Batch:
        """The next tokens of each row; step: None samples nothing."""
        updates, works = [], []
        for index, tokens in work.items():
            row = self.rows.setdefault(index, Row(form))
            at, count = len(row.tokens), len(tokens)
            reaches = []
            for group, each in enumerate(self.runner.groups):
                if group in self.runner.forms[row.form].groups:
                    held = row.units.setdefault(group, [])
                    wanted = 1 if each.page_size == WHOLE else -(-(at + count) // each.page_size)
                    fresh = self.take(group, max(0, wanted - len(held)))
                    updates.append(TableUpdate(index, len(held), fresh, group))
                    held += fresh
                filled = group in self.runner.forms[row.form].groups and row.floor
                reaches.append(Reach(at, (row.floor,) * count) if filled else None)
            sample = step is not None
            more: dict[str, Any] = {"form": row.form, "sealed": row.slots, "replay": replay, "reaches": tuple(reaches)}
            works.append(RowWork(index, tokens, at, at, sample, Sampling(), 0, step or 0, seq_id=index, **more))
            if not replay:
                row.tokens += tokens
        return Batch(works, [each for each in updates if each.units])

    def logits(self, work: dict[int, list[int]], form: int = 0, **more: Any) -> Tensor:
        return self.runner.logits(self.batch(work, form, **more))

    def work(self, index: int, *, prompt_end: bool = True, removed: tuple[tuple[int, int], ...] = ()) -> SealWork:
        """The seal that is due, or a prune of the sealed part, with fresh units."""
        row = self.rows[index]
        form, tokens = self.runner.forms[row.form], len(row.tokens)
        held = Held(tokens, row.floor, tokens - row.floor, row.slots, prompt_end)
        assert form.seal is not None
        seal = None if removed else form.seal(held)
        old = tuple(row.units.get(group, []) for group in form.sealed)
        counts = [len(units) for units in old] if seal is None else seal.units
        keeps = (0,) * len(form.sealed) if seal is None else seal.keeps
        new = tuple(
            [*units[:keep], *self.take(group, count - keep)]
            for group, units, count, keep in zip(form.sealed, old, counts, keeps, strict=True)
        )
        tails = []
        for group in form.groups:
            first = row.floor // self.runner.groups[group].page_size
            tails.append(TailPages(group, row.floor, tokens, row.units[group][first:]))
        return SealWork(row.form, index, held, seal, ((row.floor, tokens),), tuple(tails), old, new, removed)

    def seal(self, index: int, **more: Any) -> int:
        """Carry it out; what is let go becomes NaN."""
        work, row = self.work(index, **more), self.rows[index]
        most = self.runner.seal(work)
        form = self.runner.forms[row.form]
        updates = []
        for group, old, new in zip(form.sealed, work.old, work.new, strict=True):
            self.drop(group, sorted(set(old) - set(new)))
            row.units[group] = new
            updates.append(TableUpdate(index, 0, new, group))
        if work.seal is not None:
            row.floor, row.slots = work.seal.floor, work.seal.slots
            for group in form.groups:
                size = self.runner.groups[group].page_size
                self.drop(group, row.units[group][: row.floor // size])
        elif form.shrinks:
            row.slots = most
        self.runner.pages.update_tables(updates)
        return most


Visible = Callable[[int, int, int, int], bool]
"""(layer, kv head, query position, key position) -> may it be read, where it is not in the future?"""


def oracle(twin: Any, tokens: list[int], visible: Visible) -> Tensor:
    """transformers' logits `[len(tokens), vocab_size]` where each layer and KV head sees what it is told to."""
    from transformers import AttentionInterface

    count = len(tokens)
    masks = torch.tensor(
        [
            [[[k <= q and visible(layer, head, q, k) for k in range(count)] for q in range(count)] for head in range(HEADS)]
            for layer in range(LAYERS)
        ]
    )

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = ~masks[module.layer_idx].repeat_interleave(group, 0)
        scores = (q @ k.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("by_head", attention)
    model = copy.deepcopy(twin)
    model.config._attn_implementation = "by_head"
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]
