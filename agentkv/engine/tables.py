"""Page tables: which slots of a payload the rows of a batch read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import floordiv, mod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentkv.kernels.chunk_attention import token_slots
from agentkv.kernels.decode_attention import RowPages, plan_row
from agentkv.kernels.send import send

if TYPE_CHECKING:
    from agentkv.kernels.paged_decode import Cut, DecodePlan


@dataclass(frozen=True)
class RowTable:
    """Which pages a batch's rows read, and how much of them. Built once a step, read by every layer.

    entries: int32 `[max_rows, max_pages]` on the device, granules. rows: int64 `[num_rows]`, lines of `entries`.
    lens: int32 `[num_rows]` on the device, slots held, the step's own tokens included. host_rows, host_lens: the same on
    the host (a method that knows its kept counts only on the device gives upper bounds). starts: int32 `[num_tokens]` on the
    device, the first slot that each of the batch's tokens sees, None where each sees all; host_starts: the same on the host, by
    row. Slots before a row's first start are never read. exact: the host's numbers are those of the rows. In a captured step,
    which serves other rows later, they are not: host_lens are upper bounds, a row sees no more than host_lens - host_starts
    slots, and host_rows means nothing.
    """

    entries: Tensor
    rows: Tensor
    lens: Tensor
    host_rows: tuple[int, ...]
    host_lens: tuple[int, ...]
    page_size: int
    starts: Tensor | None = None
    host_starts: tuple[tuple[int, ...], ...] = ()
    exact: bool = True

    @property
    def cut(self) -> bool:
        """May slots before a row's first visible one lie in its table?"""
        return any(self.first_slots) if self.exact else self.starts is not None

    @property
    def first_slots(self) -> tuple[int, ...]:
        """First slot that is read of each row."""
        return tuple(each[0] for each in self.host_starts) or (0,) * len(self.host_rows)

    def by_query(self, counts: tuple[int, ...], own: bool = True) -> RowTable:
        """The table with a line for each token: counts[i] tokens of row i are its last slots, and each ends its own line; or,
        where they are not its own, each sees all of it."""
        if all(count == 1 for count in counts):
            return self
        if (counts, own) not in self._by_query:
            behind = [(count - 1 - i) * own for count in counts for i in range(count)]
            packed = send([*counts, *behind], self.rows.device)
            repeats, back = torch.split(packed, [len(counts), len(behind)])
            owner = [index for index, count in enumerate(counts) for _ in range(count)]
            self._by_query[counts, own] = replace(
                self,
                rows=self.rows.repeat_interleave(repeats),
                lens=self.lens.repeat_interleave(repeats) - back.to(torch.int32),
                host_rows=tuple(self.host_rows[index] for index in owner),
                host_lens=tuple(self.host_lens[index] - less for index, less in zip(owner, behind, strict=True)),
                host_starts=tuple((start,) for starts in self.host_starts for start in starts),
            )
        return self._by_query[counts, own]

    @cached_property
    def _by_query(self) -> dict[tuple[tuple[int, ...], bool], RowTable]:
        return {}

    def newest(self, slots: int) -> RowTable:
        """Of rows with one token each, no more than the last `slots` slots (arXiv 2309.17453)."""
        firsts = tuple(max(pair) for pair in zip(self.first_slots, (n - slots for n in self.host_lens), strict=True))
        if firsts == self.first_slots:
            return self
        if slots not in self._newest:
            starts = (self.lens - slots).clamp(min=0)
            starts = starts if self.starts is None else torch.maximum(starts, self.starts)
            self._newest[slots] = replace(self, starts=starts, host_starts=tuple((first,) for first in firsts))
        return self._newest[slots]

    @cached_property
    def _newest(self) -> dict[int, RowTable]:
        return {}

    def visible(self, num_kv_heads: int) -> tuple[HeadTable, tuple[int, ...]]:
        """Each row's slots from the page of its first visible one on, for one query a row, and how many slots of that page come
        before the visible one (at most, where the table is not exact)."""
        if num_kv_heads not in self._visible:
            size = self.page_size
            hidden = tuple(first % size if self.exact else (size - 1) * self.cut for first in self.first_slots)
            bounds = tuple(n - f + h for n, f, h in zip(self.host_lens, self.first_slots, hidden, strict=True))
            entries, lens = self.entries[self.rows], self.lens
            if self.starts is not None:
                front = (self.starts // size).unsqueeze(1)
                pages = torch.arange(-(-max(bounds) // size), device=entries.device)
                entries = entries.gather(1, (front + pages).clamp(max=entries.shape[1] - 1).to(torch.int64))
                lens = lens - (front * size).squeeze(1)
            lens = lens.unsqueeze(1).expand(-1, num_kv_heads).contiguous()
            self._visible[num_kv_heads] = HeadTable(entries, lens, max(bounds), bounds), hidden
        return self._visible[num_kv_heads]

    @cached_property
    def _visible(self) -> dict[int, tuple[HeadTable, tuple[int, ...]]]:
        return {}

    @cached_property
    def from_front(self) -> RowTable:
        """The same of rows with one token each, their pages counted from the page of the first visible slot, all slots of which
        are told of: it has no `starts`. entries: `[num_rows, max_pages]`."""
        found, _ = self.visible(1)
        return replace(
            self, entries=found.entries, rows=found.rows, lens=found.lens[:, 0].contiguous(), starts=None, host_starts=(),
            host_rows=tuple(range(len(self.host_rows))), host_lens=found.bounds,
        )  # fmt: skip

    @cached_property
    def hidden(self) -> Tensor:
        """int32 `[num_rows]` on the device: of rows with one token each, slots of the page of the first visible one that come
        before it."""
        return torch.zeros_like(self.lens) if self.starts is None else self.starts % self.page_size

    def apart(self, counts: tuple[int, ...]) -> tuple[RowTable, RowTable]:
        """The visible slots before the last counts[i] of row i, counted from the page of the first of them and wholly seen, and
        those last ones, which are the step's own tokens. TypeError where the table is not exact."""
        if not self.exact:
            raise TypeError("the host does not know where the rows of a captured step end")
        if counts not in self._apart:
            size, lines = self.page_size, tuple(range(len(counts)))
            fronts, hidden = (tuple(rule(first, size) for first in self.first_slots) for rule in (floordiv, mod))
            befores = tuple(length - count for length, count in zip(self.host_lens, counts, strict=True))
            held = tuple(before - front * size for before, front in zip(befores, fronts, strict=True))
            starts = tuple((first,) * count for first, count in zip(hidden, counts, strict=True))
            owns = tuple((before,) * count for before, count in zip(befores, counts, strict=True))
            packed = send([*lines, *fronts, *held, *chain(*starts), *chain(*owns)], self.rows.device)
            rows, front, lens, *both = torch.split(packed, [len(counts)] * 3 + [sum(counts)] * 2)
            first, own = (each.to(torch.int32) for each in both)
            pages = front.unsqueeze(1) + torch.arange(-(-max(held) // size), device=rows.device)
            entries = self.entries[self.rows].gather(1, pages.clamp(max=self.entries.shape[1] - 1))
            before = RowTable(entries, rows, lens.to(torch.int32), lines, held, size, first, starts)
            self._apart[counts] = before, replace(self, starts=own, host_starts=owns)
        return self._apart[counts]

    @cached_property
    def _apart(self) -> dict[tuple[int, ...], tuple[RowTable, RowTable]]:
        return {}

    @cached_property
    def lines(self) -> Tensor:
        """The rows' entries in order, int32 `[num_rows, pages of the longest]`, contiguous."""
        return self.entries[:, : -(-max(self.host_lens) // self.page_size)].index_select(0, self.rows)

    @property
    def work(self) -> DecodePlan:
        """Pieces of the rows for decode on a GPU, where each row has one token."""
        return self.work_in()

    def work_in(self, cut: Cut | None = None) -> DecodePlan:
        """The same cut in another way; None: as `paged_decode` wants it."""
        from agentkv.kernels.paged_decode import CUT, bound_pieces, plan_decode

        cut = cut or CUT
        if cut not in self._work:
            seen = sum(self.host_lens) - sum(self.first_slots)
            bound = bound_pieces(len(self.host_lens), seen, cut)
            self._work[cut] = plan_decode(self.lens, self.rows, bound, self.starts, cut)
        return self._work[cut]

    @cached_property
    def _work(self) -> dict[Cut, DecodePlan]:
        return {}

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

    def by_page(self, index: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pages int64 `[num_pages]` of a row's slots from its first visible one on, and values of those `[heads, slots]` as
        `[num_pages, heads, page_size]`, 0 elsewhere: whole pages are read and written many times faster than slots."""
        first, length, size = self.first_slots[index], self.host_lens[index], self.page_size
        pages = self.entries[self.host_rows[index], first // size : -(-length // size)].to(torch.int64)
        padded = torch.nn.functional.pad(values, (first % size, -length % size))
        return pages, padded.view(len(values), -1, size).transpose(0, 1)

    @cached_property
    def chunk_starts(self) -> tuple[list[int] | None, ...]:
        """For each row the first slot that each of its tokens sees, counted from the first of its `chunk_plan`; None: all."""
        if self.starts is None:
            return (None,) * len(self.host_rows)
        return tuple([each - starts[0] for each in starts] for starts in self.host_starts)


@dataclass(frozen=True)
class HeadTable:
    """Slots by row and KV head, all of which every query of the row sees: a part that lies wholly before a step's own tokens,
    or a selection.

    entries: int32 `[num_rows, num_kv_heads, max_pages]` on the device, granules, or `[num_rows, max_pages]` where heads share
    their pages; columns past a line's length may hold anything. lens: int32 `[num_rows, num_kv_heads]` on the device, slots
    held. max_slots: most slots of a line, known on the host; host_slots: the same by row, () where each may have the most.
    like: a table whose lines hold as many slots, line by line. by_slot: entries are int64 and name slots, one in each column:
    granule * page_size + slot in the page.
    """

    entries: Tensor
    lens: Tensor
    max_slots: int
    host_slots: tuple[int, ...] = ()
    like: HeadTable | None = None
    by_slot: bool = False

    @property
    def bounds(self) -> tuple[int, ...]:
        """Most slots of each row's lines."""
        return self.host_slots or (self.max_slots,) * len(self.lens)

    @cached_property
    def rows(self) -> Tensor:
        """int64 `[num_rows]`: the lines of `entries` in order."""
        return self.like.rows if self.like else torch.arange(len(self.lens), device=self.lens.device)

    @cached_property
    def work(self) -> DecodePlan:
        """Pieces of the lines for decode on a GPU; those of `like`, if there is one."""
        if self.like:
            return self.like.work
        from agentkv.kernels.paged_decode import bound_pieces, plan_decode

        lens = self.lens.contiguous()
        return plan_decode(lens, self.rows, bound_pieces(lens.numel(), sum(self.bounds) * lens.shape[1]))

    def by_row(self, page_size: int) -> RowTable:
        """The same where heads share their pages and hold the same slots: those of the first head."""
        lines = tuple(range(len(self.lens)))
        return RowTable(self.entries, self.rows, self.lens[:, 0].contiguous(), lines, self.bounds, page_size)
