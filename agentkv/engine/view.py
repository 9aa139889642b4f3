"""What a step gives to a method's hooks (DeviceBatch), and what the method hands to attention (AttentionView)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from agentkv.kernels.chunk_attention import token_slots
from agentkv.kernels.decode_attention import RowPages, plan_row


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
    the host (a method that knows its kept counts only on the device gives upper bounds).
    """

    entries: Tensor
    rows: Tensor
    lens: Tensor
    host_rows: tuple[int, ...]
    host_lens: tuple[int, ...]
    page_size: int

    def by_query(self, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`rows` and `lens` with a line for each query, `[num_tokens]`; a row's counts[i] queries are its last slots."""
        if counts not in self._by_query:
            behind = [count - 1 - i for count in counts for i in range(count)]
            packed = torch.tensor([*counts, *behind]).to(self.rows.device)
            repeats, back = torch.split(packed, [len(counts), len(behind)])
            rows, lens = self.rows.repeat_interleave(repeats), self.lens.repeat_interleave(repeats) - back.to(torch.int32)
            self._by_query[counts] = rows, lens
        return self._by_query[counts]

    @cached_property
    def _by_query(self) -> dict[tuple[int, ...], tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def decode_plan(self) -> tuple[RowPages, ...]:
        """Pages of each row for decode on the CPU."""
        pairs = zip(self.host_rows, self.host_lens, strict=True)
        return tuple(plan_row(self.entries[row], length, self.page_size) for row, length in pairs)

    @cached_property
    def chunk_plan(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(entries, offsets) int64 `[kv_len]` of each row's slots, for chunked prefill."""
        pairs = zip(self.host_rows, self.host_lens, strict=True)
        return tuple(token_slots(self.entries[row], length, self.page_size) for row, length in pairs)


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
class RowSpan:
    """One row of a batch, known on the host.

    start, end: its tokens in the batch, half open. position: logical position of the first. kv_len: slots held once they
    are stored. prompt_end: the last token of the prompt is among them.
    """

    row: int
    start: int
    end: int
    position: int
    kv_len: int
    prompt_end: bool = False
    seq_id: int = -1


@dataclass(frozen=True)
class DeviceBatch:
    """The rows of one view class in one phase of a step; every hook gets it as `batch`.

    tokens: where they lie in the step. prefill: chunks; otherwise each row has its last token, and where the method truncates
    a few guesses behind it. positions: int64 `[num_tokens]`, logical. entries, offsets: int64 `[num_tokens]`, granule of the
    page and slot in it that each new token is written to.
    pages_of: layer -> its pages (see PagedKV).
    """

    rows: tuple[RowSpan, ...]
    tokens: slice
    prefill: bool
    positions: Tensor
    entries: Tensor
    offsets: Tensor
    table: RowTable
    pages_of: Callable[[int], Tensor] = field(repr=False)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(span.end - span.start for span in self.rows)

    def pages(self, layer: int) -> Tensor:
        """The layer's pages `[num_granules, num_kv_heads, 2, page_size, head_dim]`."""
        return self.pages_of(layer)
