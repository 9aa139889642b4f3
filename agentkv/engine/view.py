"""What a step gives to a method's hooks (DeviceBatch), and what the method hands to attention (AttentionView)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from agentkv.kernels.chunk_attention import token_slots
from agentkv.kernels.decode_attention import RowPages, plan_row

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealedRows
    from agentkv.kernels.paged_decode import DecodePlan


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values in pages of one layer, in the model's dtype.

    pages: `[num_granules, num_kv_heads, 2, page_size, head_dim]`; row g is the layer page that starts at granule g.
    """

    pages: Tensor


@dataclass(frozen=True)
class RowTable:
    """Which pages a batch's rows read, and how much of them. Built once a step, read by every layer.

    entries: int32 `[max_rows, max_pages]` on the device, granules. rows: int64 `[num_rows]`, lines of `entries`.
    lens: int32 `[num_rows]` on the device, slots held, the step's own tokens included. host_rows, host_lens: the same on
    the host (a method that knows its kept counts only on the device gives upper bounds). starts: int32 `[num_tokens]` on the
    device, the first slot that each of the batch's tokens sees, None where each sees all; host_starts: the same on the host, by
    row. Slots before a row's first start are never read.
    """

    entries: Tensor
    rows: Tensor
    lens: Tensor
    host_rows: tuple[int, ...]
    host_lens: tuple[int, ...]
    page_size: int
    starts: Tensor | None = None
    host_starts: tuple[tuple[int, ...], ...] = ()

    @property
    def first_slots(self) -> tuple[int, ...]:
        """First slot that is read of each row."""
        return tuple(each[0] for each in self.host_starts) or (0,) * len(self.host_rows)

    def by_query(self, counts: tuple[int, ...]) -> RowTable:
        """The table with a line for each token: counts[i] tokens of row i are its last slots, and each ends its own line."""
        if all(count == 1 for count in counts):
            return self
        if counts not in self._by_query:
            behind = [count - 1 - i for count in counts for i in range(count)]
            packed = torch.tensor([*counts, *behind]).to(self.rows.device)
            repeats, back = torch.split(packed, [len(counts), len(behind)])
            owner = [index for index, count in enumerate(counts) for _ in range(count)]
            self._by_query[counts] = replace(
                self,
                rows=self.rows.repeat_interleave(repeats),
                lens=self.lens.repeat_interleave(repeats) - back.to(torch.int32),
                host_rows=tuple(self.host_rows[index] for index in owner),
                host_lens=tuple(self.host_lens[index] - less for index, less in zip(owner, behind, strict=True)),
                host_starts=tuple((start,) for starts in self.host_starts for start in starts),
            )
        return self._by_query[counts]

    @cached_property
    def _by_query(self) -> dict[tuple[int, ...], RowTable]:
        return {}

    @cached_property
    def work(self) -> DecodePlan:
        """Pieces of the rows for decode on a GPU, where each row has one token."""
        from agentkv.kernels.paged_decode import bound_pieces, plan_decode

        seen = sum(self.host_lens) - sum(self.first_slots)
        return plan_decode(self.lens, self.rows, bound_pieces(len(self.host_lens), seen), self.starts)

    @cached_property
    def decode_plan(self) -> tuple[RowPages, ...]:
        """Pages of each row for decode on the CPU."""
        rows = zip(self.host_rows, self.host_lens, self.first_slots, strict=True)
        return tuple(plan_row(self.entries[row], length, self.page_size, first) for row, length, first in rows)

    @cached_property
    def chunk_plan(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(entries, offsets) int64 `[kv_len - first slot]` of each row's slots, for chunked prefill."""
        rows = zip(self.host_rows, self.host_lens, self.first_slots, strict=True)
        return tuple(token_slots(self.entries[row], length, self.page_size, first) for row, length, first in rows)

    @cached_property
    def chunk_starts(self) -> tuple[list[int] | None, ...]:
        """For each row the first slot that each of its tokens sees, counted from the first of its `chunk_plan`; None: all."""
        if self.starts is None:
            return (None,) * len(self.host_rows)
        return tuple([each - starts[0] for each in starts] for starts in self.host_starts)


@dataclass(frozen=True, slots=True)
class Part:
    """A payload and the rows of it that attention reads.

    bias: added to the scaled score of each slot, `[num_rows, max_len]` float32, or None.
    """

    payload: PagedKV
    table: RowTable
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What attention reads: one to three disjoint parts, merged by log-sum-exp. A step's own tokens, where the view holds
    them, are the last slots of the last part (causality is decided there; earlier parts are wholly visible)."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= 3:
            raise ValueError(f"a view has one to three parts, not {len(self.parts)}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Slots that attention may read, chosen without deleting the others.

    slots: int32 `[num_rows, (num_kv_heads,) count]`, ascending, slots of each row's tail (pages of it where `pages`); what lies
    behind `lens` is ignored. lens: int32 `[num_rows, (num_kv_heads)]`: slots, or pages.
    """

    slots: Tensor
    lens: Tensor
    pages: bool = False


class RowMass(NamedTuple):
    """Attention that one row's slots received in a step, summed over its queries and the query heads of a group: float32
    `[num_kv_heads, slots]` of the sealed part (None where there is none) and of the tail's slots from `first` on."""

    sealed: Tensor | None
    tail: Tensor
    first: int


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
    are stored. prompt_end: the last token of the prompt is among them.
    """

    row: int
    start: int
    end: int
    position: int
    kv_len: int
    prompt_end: bool = False
    seq_id: int = -1


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
    a few guesses behind it. positions: int64 `[num_tokens]`, logical. groups: the same rows in each KV group; group_of: layer
    -> its group. pages_of: layer -> its pages (see PagedKV). states: by name, the units of the method's state and its group.
    form: index of the runner's form. replay: the tokens are forwarded to be looked at, their KV will be taken back. sealed:
    the rows' sealed parts, None where no row has one.
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

    def table_of(self, layer: int) -> RowTable:
        """What the layer's queries see of the rows."""
        return self.groups[self.group_of[layer]].table

    def places_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where the layer writes the new tokens: entries and offsets, see GroupRows."""
        group = self.groups[self.group_of[layer]]
        return group.entries, group.offsets

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(span.end - span.start for span in self.rows)

    def pages(self, layer: int) -> Tensor:
        """The layer's pages `[num_granules, num_kv_heads, 2, page_size, head_dim]`."""
        return self.pages_of(layer)

    def part(self, layer: int, selection: Selection | None = None) -> Part:
        """The rows' tails in the layer, or what is selected of them."""
        payload, table = PagedKV(self.pages(layer)), self.table_of(layer)
        if selection is not None:
            raise NotImplementedError("a view of a selection")
        return Part(payload, table)

    def state(self, name: str) -> tuple[Tensor, GroupRows]:
        """Units of the method's state of that name, `[num_granules, *shape]` with the page's slots where SLOT stands, and the
        rows' places in them: where the slots come first, the new tokens' items belong at
        `units[places.entries, places.offsets]`."""
        pages, group = self.states[name]
        return pages, self.groups[group]
