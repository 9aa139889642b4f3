"""Random paged rows with sealed parts, and what attention over them is: float64, one query and one key at a time.

Every slot that nothing lives in is NaN, so reading one shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import DeviceBatch, GroupRows, PagedKV, Part, RowSpan

SCALE = 0.35
SEALED_PAGE = 16
NUM_PAGES = 400


@dataclass(frozen=True)
class Row:
    """count: its new tokens. tail: slots, the new ones included. floor: the first visible slot; sealed: slots by KV head."""

    count: int
    tail: int
    floor: int = 0
    sealed: tuple[int, ...] = (0, 0)


@dataclass
class Line:
    """What one KV head of a row holds: keys and values `[n, head_dim]`, float64."""

    k: Tensor
    v: Tensor


@dataclass
class Scene:
    """rows: what there is. Heads: 2 KV heads of 3 query heads each."""

    rows: list[Row]
    prefill: bool
    dtype: torch.dtype = torch.float64
    seed: int = 0
    device: str = "cpu"
    page_size: int = 4
    head_dim: int = 8
    num_kv_heads: int = 2
    num_heads: int = 6
    tails: list[list[Line]] = field(init=False)
    """By row and KV head, all slots of the tail from slot 0; those before the floor are NaN."""

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.free = torch.randperm(NUM_PAGES, generator=self.random).tolist()
        self.pages = self.empty(self.num_kv_heads, self.page_size)
        self.q = self.draw(sum(row.count for row in self.rows), self.num_heads)
        self.tails = []
        entries = torch.zeros(len(self.rows) + 2, 1 + max(row.tail for row in self.rows) // self.page_size, dtype=torch.int32)
        for index, row in enumerate(self.rows):
            held = self.draw(2, self.num_kv_heads, row.tail)
            held[:, :, : row.floor] = torch.nan
            for page in range(row.floor // self.page_size, -(-row.tail // self.page_size)):
                entries[self.line(index), page] = self.free.pop()
            for slot in range(row.floor, row.tail):
                entry = entries[self.line(index), slot // self.page_size]
                self.pages[entry, :, :, slot % self.page_size] = held[:, :, slot].transpose(0, 1)
            self.tails.append([Line(held[0, head].double(), held[1, head].double()) for head in range(self.num_kv_heads)])
        self.pages, self.q = self.pages.to(self.device), self.q.to(self.device)
        self.batch = self._batch(entries.to(self.device))

    def line(self, index: int) -> int:
        """The row's line of the page table."""
        return len(self.rows) + 1 - index

    def draw(self, *shape: int) -> Tensor:
        """Random, `[*shape, head_dim]`."""
        return torch.randn(*shape, self.head_dim, generator=self.random, dtype=torch.float64).to(self.dtype)

    def empty(self, num_kv_heads: int, page_size: int) -> Tensor:
        """Pages in which nothing lives."""
        return torch.full((NUM_PAGES, num_kv_heads, 2, page_size, self.head_dim), torch.nan, dtype=self.dtype)

    def leave_behind(self, value: float) -> None:
        """What stands in the pages of the rows' floors before them: a seal moves tokens away and wipes nothing."""
        for index, row in enumerate(self.rows):
            entry = self.batch.table_of(0).entries[self.line(index), row.floor // self.page_size]
            self.pages[entry, :, :, : row.floor % self.page_size] = value

    def _batch(self, entries: Tensor) -> DeviceBatch:
        stops = [sum(row.count for row in self.rows[: index + 1]) for index in range(len(self.rows))]
        spans = tuple(
            RowSpan(self.line(index), stop - row.count, stop, row.tail - row.count, row.tail)
            for index, (row, stop) in enumerate(zip(self.rows, stops, strict=True))
        )
        lines = [self.line(index) for index in range(len(self.rows))]
        starts = [row.floor for row in self.rows for _ in range(row.count)]
        floored = any(starts)
        table = RowTable(
            entries=entries,
            rows=torch.tensor(lines, device=self.device),
            lens=torch.tensor([row.tail for row in self.rows], dtype=torch.int32, device=self.device),
            host_rows=tuple(lines),
            host_lens=tuple(row.tail for row in self.rows),
            page_size=self.page_size,
            starts=torch.tensor(starts, dtype=torch.int32, device=self.device) if floored else None,
            host_starts=tuple((row.floor,) * row.count for row in self.rows) if floored else (),
        )
        places = torch.zeros(stops[-1], dtype=torch.int64, device=self.device)
        group = GroupRows(table, places, places)
        return DeviceBatch(spans, slice(0, stops[-1]), self.prefill, places, (group,), (0,), lambda layer: self.pages)

    def sealed(self, form: Literal["stripe", "head"], host_slots: bool) -> tuple[Part, list[list[Line]]]:
        """A part with the rows' sealed slots in pages of all heads or of one, and the same as lines."""
        most = max(max(row.sealed) for row in self.rows)
        width = -(-most // SEALED_PAGE) + 1
        pages = self.empty(self.num_kv_heads if form == "stripe" else 1, SEALED_PAGE)
        entries = torch.full((len(self.rows), self.num_kv_heads, width), -7, dtype=torch.int32)
        lines = []
        for index, row in enumerate(self.rows):
            for page in range(-(-max(row.sealed) // SEALED_PAGE)):
                entries[index, :, page] = self.free.pop()
            mine = []
            for head, length in enumerate(row.sealed):
                if form == "head":
                    for page in range(-(-length // SEALED_PAGE)):
                        entries[index, head, page] = self.free.pop()
                held = self.draw(2, length)
                for slot in range(length):
                    place = entries[index, head, slot // SEALED_PAGE], head if form == "stripe" else 0
                    pages[place[0], place[1], :, slot % SEALED_PAGE] = held[:, slot]
                mine.append(Line(held[0].double(), held[1].double()))
            lines.append(mine)
        lens = torch.tensor([row.sealed for row in self.rows], dtype=torch.int32)
        bounds = tuple(max(row.sealed) for row in self.rows) if host_slots else ()
        entries = (entries[:, 0].contiguous() if form == "stripe" else entries).to(self.device)
        return Part(PagedKV(pages.to(self.device)), HeadTable(entries, lens.to(self.device), most, bounds)), lines


def seen_of_tail(scene: Scene, index: int, query: int) -> range:
    """The tail's slots that the row's query of that number sees."""
    row = scene.rows[index]
    return range(row.floor, row.tail - row.count + query + 1)


def brute(
    scene: Scene, parts: list[list[list[Line]]], biases: list[Tensor | None] | None = None, *, tail: bool = True
) -> tuple[Tensor, Tensor]:
    """out and lse of every query over wholly visible lines [part][row][head] and, with `tail`, what it sees of the tail.

    biases: `[num_rows, num_kv_heads, slots]` of each part and at last of the tail.
    """
    out = torch.zeros(scene.q.shape, dtype=torch.float64)
    lse = torch.full(scene.q.shape[:2], -torch.inf, dtype=torch.float64)
    biases = biases or [None] * (len(parts) + 1)
    for index, span in enumerate(scene.batch.rows):
        for query in range(span.end - span.start):
            for head in range(scene.num_heads):
                kv_head = head * scene.num_kv_heads // scene.num_heads
                seen = [(lines[index][kv_head], slot, bias) for lines, bias in zip(parts, biases[:-1], strict=True)
                        for slot in range(len(lines[index][kv_head].k))]  # fmt: skip
                if tail:
                    slots = seen_of_tail(scene, index, query)
                    seen += [(scene.tails[index][kv_head], slot, biases[-1]) for slot in slots]
                q = scene.q[span.start + query, head].double().cpu()
                added = [0.0 if bias is None else float(bias[index, kv_head, slot]) for _, slot, bias in seen]
                scores = [float(line.k[slot] @ q) * SCALE + more for (line, slot, _), more in zip(seen, added, strict=True)]
                top = max(scores)
                total = math.fsum(math.exp(score - top) for score in scores)
                lse[span.start + query, head] = top + math.log(total)
                for score, (line, slot, _) in zip(scores, seen, strict=True):
                    out[span.start + query, head] += math.exp(score - top) / total * line.v[slot]
    return out, lse


def picked(scene: Scene, slots: list[list[list[int]]]) -> list[list[Line]]:
    """Lines of the tail's slots [row][head][...]."""
    return [
        [Line(line.k[mine], line.v[mine]) for line, mine in zip(lines, by_head, strict=True)]
        for lines, by_head in zip(scene.tails, slots, strict=True)
    ]
