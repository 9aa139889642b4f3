"""What a step gives to a method's hooks (DeviceBatch), and what the method hands to attention (AttentionView)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from agentkv.engine.selection import Selection, selected_pages, selected_slots
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.kernels.low_rank_decode import LowRankPages
from agentkv.kernels.quantized_pages import QuantizedPages
from agentkv.kernels.query_tiles import QueryTiles

if TYPE_CHECKING:
    from agentkv.engine.query_window import QueryRows
    from agentkv.engine.sealed import SealedRows

__all__ = [
    "AttentionView",
    "DecodeMass",
    "DeviceBatch",
    "GroupRows",
    "HeadTable",
    "PageFill",
    "PagedKV",
    "Part",
    "RowKernel",
    "RowMass",
    "RowSpan",
    "RowTable",
    "Selection",
]


RowKernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of one query a row: of q, a layer's pages, tables, lengths and the scale; see `attention_flashinfer`."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values in pages of one layer, in the model's dtype.

    pages: `[num_granules, num_kv_heads, 2, page_size, head_dim]`; row g is the layer page that starts at granule g. Pages of
    one head each are `[num_granules, 1, 2, page_size, head_dim]`, and their HeadTable has entries by head.
    """

    pages: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A payload and the rows of it that attention reads.

    A RowTable in a view's last part holds the step's own tokens as its last slots. A HeadTable, and every table of an earlier
    part, is seen whole by every query. Payloads that are not PagedKV hold as many slots in every head: a HeadTable's entries
    are shared by heads there, and the first head's lens counts. bias: added to the scaled score of each slot, -inf hides it,
    float32 `[num_rows, 1 or num_kv_heads, >= max_len]`, or None; not for the step's own tokens in prefill. positions: int64
    `[num_rows, >= max_len]`, the logical position of each slot, where the payload turns keys as they are read (None: slot s is
    at s).
    record: a list that gets the scaled scores of decode rows with one query each, times log2(e), float32 `[num_rows, num_heads,
    max_len]`, where the kernel can leave them; otherwise it stays empty.
    """

    payload: PagedKV | QuantizedPages | LowRankPages
    table: RowTable | HeadTable
    bias: Tensor | None = None
    positions: Tensor | None = None
    record: list[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What attention reads: one to three disjoint parts, merged by log-sum-exp. A step's own tokens, where the view holds
    them, are the last slots of the last part (causality is decided there; earlier parts are wholly visible)."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= 3:
            raise ValueError(f"a view has one to three parts, not {len(self.parts)}")


class RowMass(NamedTuple):
    """Attention that one row's slots received in a step, summed over its queries and the query heads of a group: float32
    `[num_kv_heads, slots]` of the sealed part (None where there is none) and of the tail's slots from `first` on. Of several
    layers `[num_layers, num_kv_heads, slots]`."""

    sealed: Tensor | None
    tail: Tensor
    first: int

    def of_layers(self) -> RowMass:
        """The same as of several layers: of one."""
        return RowMass(None if self.sealed is None else self.sealed.unsqueeze(0), self.tail.unsqueeze(0), self.first)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeMass(Sequence[RowMass]):
    """The same of rows with one token each, all together; row by row where the host knows the rows, so not in a captured step.

    sealed: float32 `[num_rows, num_kv_heads, slots]` of the view's earlier parts, None where it has none; tail: the same from
    the page of each row's first visible slot on. 0 for what is no slot of a row, is not seen, or is hidden.
    """

    sealed: Tensor | None
    tail: Tensor
    rows: tuple[RowMass, ...]

    @overload
    def __getitem__(self, index: int) -> RowMass: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RowMass, ...]: ...
    def __getitem__(self, index: int | slice) -> RowMass | tuple[RowMass, ...]:
        """By row."""
        return self.rows[index]

    def __len__(self) -> int:
        """Rows that are told of one by one."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class PageFill:
    """Pages of KV whose page state is to be made. entries: int64 `[num_pages]`, granules of the KV pages; into: by name of a
    page state, the units int64 `[num_pages]` that belong to them. pages_of, states_of: see DeviceBatch."""

    entries: Tensor
    into: Mapping[str, Tensor]
    pages_of: Callable[[int], Tensor] = field(repr=False)
    states_of: Callable[[str], Tensor] = field(repr=False)

    def pages(self, layer: int) -> Tensor:
        """The layer's pages `[num_granules, num_kv_heads, 2, page_size, head_dim]`."""
        return self.pages_of(layer)

    def state(self, name: str) -> tuple[Tensor, Tensor]:
        """Units of a page state `[num_granules, *shape]`, and which of them are to be written."""
        return self.states_of(name), self.into[name]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of a batch, known on the host.

    start, end: its tokens in the batch, half open. position: logical position of the first. kv_len: tokens kept once they
    are stored. prompt_end: the last token of the prompt is among them. run, run_from: of a replay, which of the runs they
    belong to, and tokens of it that were forwarded before.
    """

    row: int
    start: int
    end: int
    position: int
    kv_len: int
    prompt_end: bool = False
    seq_id: int = -1
    run: int = 0
    run_from: int = 0


@dataclass(frozen=True, slots=True)
class GroupRows:
    """A batch's rows in one KV group: what they hold, and where their new tokens go.

    entries, offsets: int64 `[num_tokens]`, granule of the page and slot in it that each new token is written to.
    """

    table: RowTable
    entries: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class DeviceBatch:
    """The rows of one view class in one phase of a step; every hook gets it as `batch`.

    tokens: where they lie in the step. prefill: chunks; otherwise each row has its last token, and where the method truncates
    a few guesses behind it. positions: int64 `[num_tokens]`, logical. groups: the same rows in each group of the form;
    group_of: layer -> its place among these. pages_of: layer -> its pages (see PagedKV). states: by name, the units of the
    method's state and its place among the groups. form: index of the runner's form. replay: the tokens are forwarded to be
    looked at, their KV will be taken back. sealed: the rows' sealed parts, None where no row has one. filled: pages of KV that
    the batch fills, where there is page state; recent: where queries are kept for a seal. tiles: where the tokens of short
    chunks lie in a captured step, where `rows` does not say it. scale: of the scores before the softmax. library: another
    kernel for decode rows that share a page table, where the engine was given one. scratch: what the
    method's hooks hand on to one another within the step; empty when it begins.
    """

    rows: tuple[RowSpan, ...]
    tokens: slice
    prefill: bool
    positions: Tensor
    groups: tuple[GroupRows, ...]
    group_of: tuple[int, ...] = field(repr=False)
    pages_of: Callable[[int], Tensor] = field(repr=False)
    states: Mapping[str, tuple[Tensor, int]] = field(repr=False, default_factory=dict)
    form: int = 0
    replay: bool = False
    sealed: SealedRows | None = None
    filled: PageFill | None = None
    recent: QueryRows | None = None
    tiles: QueryTiles | None = None
    scale: float = 1.0
    library: RowKernel | None = field(repr=False, default=None)
    scratch: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)

    def table_of(self, layer: int) -> RowTable:
        """What the layer's queries see of the rows."""
        return self.groups[self.group_of[layer]].table

    def places_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where the layer writes the new tokens: entries and offsets, see GroupRows."""
        group = self.groups[self.group_of[layer]]
        return group.entries, group.offsets

    @cached_property
    def owners(self) -> Tensor:
        """int64 `[num_tokens]`: the row, counted in the batch, of each token."""
        return torch.tensor([i for i, count in enumerate(self.counts) for _ in range(count)]).to(self.positions.device)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(span.end - span.start for span in self.rows)

    def pages(self, layer: int) -> Tensor:
        """The layer's pages `[num_granules, num_kv_heads, 2, page_size, head_dim]`."""
        return self.pages_of(layer)

    def part(self, layer: int, selection: Selection | None = None) -> Part:
        """The rows' tails in the layer, or what is selected of them.

        TypeError where a row of a selection has not exactly one query, so in every chunk of a prompt.
        """
        pages, table = self.pages(layer), self.table_of(layer)
        if selection is None:
            return Part(PagedKV(pages), table)
        if self.prefill or any(count != 1 for count in self.counts):
            raise TypeError(
                "a selection is of decode rows with one token each: in prefill and beside guesses all slots are read"
            )
        if selection.table is not None:
            return Part(PagedKV(pages), selection.table)
        if selection.pages:
            return Part(PagedKV(pages), *selected_pages(selection, table, pages.shape[1], pages.shape[3]))
        compact, heads, hiding = selected_slots(selection, table, pages)
        return Part(PagedKV(compact), heads, hiding)

    def state(self, name: str) -> tuple[Tensor, GroupRows]:
        """Units of the method's state of that name, `[num_granules, *shape]` with the page's slots where SLOT stands, and the
        rows' places in them: where the slots come first, the new tokens' items belong at
        `units[places.entries, places.offsets]`."""
        pages, group = self.states[name]
        return pages, self.groups[group]
