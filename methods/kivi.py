"""Keys in few bits by channel, values by token, behind a tail that stays as it is (arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, ModelShape, Most, Plain, Read, SparseMethod, StateSpec
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import AttentionView, DeviceBatch, Part, Selection
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages, store_pages
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob

_AT_ONCE = 8192
"""Tokens whose keys and values are read at once, each layer's its own: a few in all layers."""
_FLAGS = 256
"""Slots of a page of flags: one granule."""


@dataclass(frozen=True)
class KIVI(SparseMethod):
    """All but the newest tokens in 2, 4 or 8 bits: keys by channel, values by token.

    A first prompt is read in full precision and then quantised; later tokens follow group by group. A later prompt reads the
    codes of what was before it. A sealed slot is a logical position: pruned ones are hidden, and their codes stay as long as
    the chain; what was pruned before its group was sealed is not in the group's range.

    bits: of a code (for grouped queries the paper advises 4). group: tokens of a group of keys, and channels of a group of
    values (at most a head's). residual: newest tokens that stay as they are, a multiple of group. schedule: the paper has one
    boundary for keys and one for values, here both share one. "window": the newest `residual` tokens always stay, as values do
    in the paper, and less than a group more. "blocks": `residual` tokens are quantised at once, so that 0 to `residual` - 1
    stay, as keys do in the paper and its code. scales: dtype of scale and zero (the code: float16). against: codes are nearest
    to what is "stored" (the code) or to the scale and zero before they were rounded, "exact" (the paper's formula).
    """

    bits: Literal[2, 4, 8] = 4
    group: int = 32
    residual: int = 128
    schedule: Literal["window", "blocks"] = "window"
    scales: Literal["float16", "bfloat16", "float32"] = "float16"
    against: Literal["stored", "exact"] = "stored"

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str | None] = "arXiv 2402.02750"
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "states"

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits!r}: give 2, 4 or 8")
        if self.group < 1:
            raise ValueError(f"group={self.group}: give 1 or more")
        if self.residual < self.group or self.residual % self.group:
            raise ValueError(f"residual={self.residual}: give a multiple of group={self.group}")
        for name, known in (
            ("schedule", ("window", "blocks")),
            ("scales", ("float16", "bfloat16", "float32")),
            ("against", ("stored", "exact")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: give one of {', '.join(known)}")

    def unserved(self, model: ModelShape) -> str | None:
        """Groups must divide heads, and codes fill bytes."""
        try:
            self._layout(model.num_kv_heads, model.head_dim)
        except ValueError as error:
            return str(error)
        return super().unserved(model)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """Pages of a group of tokens, all layers; and for each slot whether it was pruned."""
        size = self._layout(model.num_kv_heads, model.head_dim).page_bytes
        return (
            StateSpec("codes", "page", "uint8", "append", (model.num_layers, size), "sealed", self.group),
            StateSpec("gone", "slot", "uint8", "append", part="sealed", page_size=_FLAGS),
        )

    def keep(self, held: Held) -> Keep | None:
        """Whole groups, as soon as the schedule lets go of them."""
        floor = self._floor(held.tokens)
        return Keep(floor, floor, appends=True) if floor > held.floor and held.tail else None

    def most(self, prompt: int, tokens: int) -> Most:
        """A tail that lets go of its oldest group before the next token enters."""
        tail = self.residual + (self.group if self.schedule == "window" else 0)
        floor = self._floor(tokens)
        return Most(min(tokens, tail), Keep(floor, floor, appends=True), again=True)

    def seal(self, job: SealJob) -> None:
        """Quantise the tail's oldest tokens into pages behind those that are there. Where one was pruned, its neighbour in the
        group stands in."""
        seal, first, shape = job.work.seal, job.work.held.slots, job.shape
        assert seal is not None
        units, pages = job.new("codes")
        pages, layout = pages[first // self.group :], self._layout(shape.num_kv_heads, shape.head_dim)
        places = torch.arange(first, seal.floor, device=units.device)
        at, gone = self._stand_ins(job.positions(), places)
        step = max(1, _AT_ONCE // len(at))
        for start in range(0, shape.num_layers, step):
            layers = range(start, min(start + step, shape.num_layers))
            found = (torch.unflatten(x, 2, (-1, self.group)).transpose(1, 2) for x in job.tail(layers, at))
            for layer, k, v in zip(layers, *found, strict=True):
                store_pages(QuantizedPages(units[:, layer], layout), pages, k, v, self.against)
        flags, into = torch.cat((job.items("gone"), gone.to(torch.uint8))), job.new("gone")[1]
        whole = first // _FLAGS
        padded = functional.pad(flags[whole * _FLAGS :], (0, -len(flags) % _FLAGS))
        units, _ = job.new("gone")
        units[into[whole:]] = padded.view(-1, _FLAGS)

    def prune(self, job: SealJob) -> None:
        """The flags anew; the codes stay."""
        (units, old), (_, new) = job.old("gone"), job.new("gone")
        flags = units[old].flatten()
        for start, end in job.work.removed:
            flags[start : min(end, job.work.held.slots)] = 1
        units[new] = flags.view(-1, _FLAGS)

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """Codes, then the tail."""
        tail = batch.part(layer, selection)
        if batch.sealed is None:
            return AttentionView((tail,))
        units, table, bias = self._sealed(batch)
        heads, dim = batch.pages(layer).shape[1], batch.pages(layer).shape[4]
        codes = QuantizedPages(units[:, layer], self._layout(heads, dim))
        return AttentionView((Part(codes, table, bias), tail))

    def reference(self, plain: Plain, layer: int) -> Read:
        """Group by group, number by number."""
        k, v = (x[layer].double().clone() for x in (plain.k, plain.v))
        dim, size = k.shape[2], self.residual if self.schedule == "blocks" else self.group
        least = 0 if self.schedule == "blocks" else self.residual  # that stay
        floor = next(at for at in range(0, len(k) + size, size) if len(k) - at < least + size)
        for head in range(k.shape[1]):
            for start in range(0, floor, self.group):
                for channel in range(dim):
                    self._round(k[start : start + self.group, head, channel])
            for token in range(floor):
                for start in range(0, dim, min(self.group, dim)):
                    self._round(v[token, head, start : start + self.group])
        heads = range(k.shape[1])
        return Read([range(len(k))] * len(heads), [k[:, head] for head in heads], [v[:, head] for head in heads])

    def _round(self, numbers: Tensor) -> None:
        """In place: one group, read back from its codes."""
        low, high = min(numbers.tolist()), max(numbers.tolist())
        exact = (high - low) / (2**self.bits - 1), low
        scale, zero = torch.tensor(exact, dtype=torch.float64).to(getattr(torch, self.scales)).tolist()
        step, start = (scale, zero) if self.against == "stored" else exact
        for index, number in enumerate(numbers.tolist()):
            code = round(min(max((number - start) / (step or 1), 0), 2**self.bits - 1))
            numbers[index] = code * scale + zero

    def identity(self, length: int) -> Mapping[str, Any]:
        """Nothing is old enough."""
        return {"residual": -(-length // self.group) * self.group, "schedule": "window"}

    def small(self, length: int) -> Mapping[str, Any]:
        """Several pages of codes."""
        return {"group": 16, "residual": 32}

    def _floor(self, tokens: int) -> int:
        """Logical position from which tokens stay as they are, when there are so many."""
        if self.schedule == "blocks":
            return tokens // self.residual * self.residual
        return max(0, tokens - self.residual) // self.group * self.group

    def _layout(self, num_kv_heads: int, head_dim: int) -> PageLayout:
        """One group of tokens of one layer."""
        dtype = getattr(torch, self.scales)
        return PageLayout(num_kv_heads, self.group, head_dim, self.bits, self.group, min(self.group, head_dim), dtype)

    def _stand_ins(self, positions: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of logical places int64 `[n]` the token of the tail whose number stands there, and whether the place's own is gone.
        positions: int32, ascending, of the tail's tokens. Where a whole group is gone, any token."""
        following = torch.searchsorted(positions, places.to(torch.int32)).clamp(max=len(positions) - 1)
        inside = positions[following] // self.group == places // self.group
        return torch.where(inside, following, (following - 1).clamp(min=0)), positions[following] != places

    def _sealed(self, batch: DeviceBatch) -> tuple[Tensor, RowTable, Tensor]:
        """Units of codes, the rows' pages of them, and the bias float32 `[num_rows, 1, max_slots]` that hides pruned ones; once
        a step."""
        sealed = batch.sealed
        assert sealed is not None
        if "sealed" not in batch.scratch:
            codes, entries = sealed.state("codes")
            table = HeadTable(entries.to(torch.int32), sealed.lens(0), sealed.max_slots, sealed.host_slots).by_row(self.group)
            units, pages = sealed.state("gone")
            gone = units[pages].flatten(1)[:, : sealed.max_slots].unsqueeze(1) != 0
            bias = torch.zeros(gone.shape, device=gone.device).masked_fill(gone, -torch.inf)
            batch.scratch["sealed"] = codes, table, bias
        found: tuple[Tensor, RowTable, Tensor] = batch.scratch["sealed"]
        return found
