"""The work of a seal: candidates for the method, and what it keeps of them into new units. Between steps, without a wait."""

from __future__ import annotations

from functools import cached_property
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.engine.core import GRANULE, SLOT, StateGroup
from agentkv.engine.forms import Served
from agentkv.engine.pages import KVPages
from agentkv.engine.query_window import QueryWindow
from agentkv.engine.sealed import Candidates
from agentkv.engine.sealed_pages import SealedUnits
from agentkv.engine.sparse import Kept
from agentkv.engine.work import SealWork
from agentkv.errors import EngineFault
from agentkv.kernels.page_bounds import layer_step

_CHUNK_BYTES = 64 << 20
"""Most bytes of K and V that are read before they are written."""


class _Places(NamedTuple):
    """Where slots lie, int64 each. k: lines of `_Lines` that hold their K, v: and their V; words: int32 words with their
    logical positions, of the tail's slots indexes of a list of their own."""

    k: Tensor
    v: Tensor
    words: Tensor


class _Lines:
    """The arena as overlapping lines of `head_dim` elements, one at least at each vector of K or V."""

    def __init__(self, pages: KVPages, head_dim: int) -> None:
        flat = pages.elements(pages.dtype)
        self._granule = GRANULE // flat.itemsize
        self._step = gcd(self._granule, head_dim)
        self.lines = flat.as_strided(((flat.numel() - head_dim) // self._step + 1, head_dim), (self._step, 1))
        self.granule = self._granule // self._step
        """Lines from one granule to the next."""
        self.vector = head_dim // self._step
        """Lines from one vector to the next."""


class PagedSealJob:
    """One sequence's seal over the arena. Implements `sealed.SealJob`.

    units: where the method's sealed K and V lie, None where it seals into states.
    """

    def __init__(
        self, pages: KVPages, served: Served, units: SealedUnits | None, window: QueryWindow | None, work: SealWork
    ) -> None:
        self.work, self.shape = work, served.shape
        self._pages, self._served, self._units, self._window = pages, served, units, window
        self._tails = {tail.group: tail for tail in work.tail}
        self.num_old = work.held.slots if any(work.old) else 0
        """Slots of the old sealed part, in the layer and head that has the most."""
        self.num_tail = sum(end - start for start, end in work.runs)
        self._num_front = self.num_old if units is not None else 0  # candidates before the tail's

    # -- for the method

    def candidates(self, layer: int) -> Candidates:
        """See `sealed.SealJob`."""
        heads = layer * self.shape.num_kv_heads + torch.arange(self.shape.num_kv_heads, device=self._device)
        index, lines = self._index, self.lines.lines
        if self._num_front:
            places = self.places(heads, index)
            valid = (index >= self._num_front) | (index < self.old_lens[layer].unsqueeze(1))
            positions = self.positions_at(heads, index)
            return Candidates(lambda part: lines[places[part]], positions, valid, self._num_front)
        positions, valid = self._tail_positions.expand_as(index), self._all_valid
        return Candidates(lambda part: lines[self._first_places[part] + layer * self._layer_lines], positions, valid, 0, True)

    def tail(self, layers: range, at: Tensor) -> tuple[Tensor, Tensor]:
        """See `sealed.SealJob`."""
        found, shape = self._tail_places, (len(layers), self.shape.num_kv_heads, len(at), self.shape.head_dim)
        if found is None:
            raise EngineFault("the tail of the sequence is empty")
        heads = torch.arange(layers.start * shape[1], layers.stop * shape[1], device=self._device)
        first = (heads * (self._layer_lines // shape[1])).unsqueeze(1)
        k, v = (self.lines.lines[first + each[at]].view(shape) for each in (found.k, found.v))
        return k, v

    def positions(self) -> Tensor:
        """See `sealed.SealJob`."""
        return self._tail_positions

    def queries(self, layer: int) -> Tensor:
        """See `sealed.SealJob`."""
        most = self._served.method.needs.query_window
        if self._window is None or self.work.row is None:
            dims = (0, self.shape.num_heads, self.shape.head_dim)
            return torch.empty(dims, dtype=self._pages.dtype, device=self._device)
        return self._window.newest(self.work.row, range(layer, layer + 1), most)[0]

    def observed(self, layers: range) -> Tensor | None:
        """See `sealed.SealJob`."""
        pages = [self._pages.layer(layer) for layer in layers]
        step = layer_step(pages)
        if self._num_front or self._window is None or self.work.row is None or not self._pages.arena.is_cuda or step is None:
            return None
        queries = self._window.newest(self.work.row, layers, self._served.method.needs.query_window)[:, -self.num_tail :]
        if not queries.numel() or pages[0].dtype == torch.float64:
            return None
        from agentkv.kernels.page_columns_triton import PagedKeys, paged_columns, paged_lse  # they need triton

        keys = PagedKeys(pages[0], step, self._tail_units, self._tails[0].first % self._tail_page, self.num_tail)
        last = torch.arange(1 - queries.shape[1], 1, dtype=torch.int32, device=self._device)
        ends, scale = last + self.num_tail, self.shape.scale
        return paged_columns(queries, keys, paged_lse(queries, keys, ends, scale), ends, scale, by_head=True)

    def items(self, name: str) -> Tensor:
        """See `sealed.SealJob`."""
        spec = self._served.specs[name]
        parts = []
        if spec.part != "tail" and self.num_old:
            parts.append(self._items(self._served.sealed[name], self.old(name)[1], 0, self.num_old))
        if spec.part != "sealed":
            tail = self._tails[self._served.tail[name]]
            first = tail.first % self._pages.groups[tail.group].page_size
            parts.append(self._items(tail.group, self._pages.send(tail.units), first, tail.stop - tail.first))
        at = spec.shape.index(SLOT)
        return torch.cat(parts, at) if parts else self._items(self._served.sealed[name], self._pages.send([]), 0, 0)

    def old(self, name: str) -> tuple[Tensor, Tensor]:
        """See `sealed.SealJob`."""
        return self._sealed(name, self.work.old)

    def new(self, name: str) -> tuple[Tensor, Tensor]:
        """See `sealed.SealJob`."""
        return self._sealed(name, self.work.new)

    # -- for the engine

    def places(self, heads: Tensor, index: Tensor) -> _Places:
        """Where candidates lie. heads: int64 `[n]`, layer * num_kv_heads + kv head; index: int64 `[n, count]`."""
        old, tail = self._old_places, self._tail_places
        if tail is None and old is None:
            raise EngineFault("nothing to seal: the sequence holds neither a sealed part nor a tail of K and V")
        line = heads.unsqueeze(1)
        found = []
        if old is not None:
            at = index.clamp(0, self.num_old - 1)
            found.append(_Places(*(each[line, at] for each in old)))
        if tail is not None:
            at = (index - self._num_front).clamp(0, self.num_tail - 1)
            head = 2 * self._tail_page * self.lines.vector * line
            found.append(_Places(tail.k[at] + head, tail.v[at] + head, at))
        if len(found) == 1:
            return found[0]
        sealed = index < self._num_front
        return _Places(*(torch.where(sealed, a, b) for a, b in zip(*found, strict=True)))

    def positions_at(self, heads: Tensor, index: Tensor) -> Tensor:
        """Logical positions of candidates, int32 like `index`; see `places`."""
        found = []
        if self._old_places is not None:
            at = index.clamp(0, self.num_old - 1)
            found.append(self._pages.elements(torch.int32)[self._old_places.words[heads.unsqueeze(1), at]])
        if self.num_tail:
            found.append(self._tail_positions[(index - self._num_front).clamp(0, self.num_tail - 1)])
        return found[0] if len(found) == 1 else torch.where(index < self._num_front, found[0], found[1])

    @cached_property
    def lines(self) -> _Lines:
        """How K and V are found in the arena."""
        return _Lines(self._pages, self.shape.head_dim)

    @cached_property
    def old_lens(self) -> Tensor:
        """Slots of the old sealed part, int32 `[num_layers, num_kv_heads]`."""
        assert self._units is not None
        return self._units.lens[self.work.old[1][0]]

    @cached_property
    def _index(self) -> Tensor:
        """int64 `[num_kv_heads, candidates]`, each head's numbers."""
        return torch.arange(self._num_front + self.num_tail, device=self._device).expand(self.shape.num_kv_heads, -1)

    @cached_property
    def _all_valid(self) -> Tensor:
        return torch.ones_like(self._index, dtype=torch.bool)

    @cached_property
    def _first_places(self) -> _Places:
        """Of layer 0, where all candidates are of the tail; those of others are `_layer_lines` further each."""
        return self.places(torch.arange(self.shape.num_kv_heads, device=self._device), self._index)

    @property
    def _layer_lines(self) -> int:
        return 2 * self._tail_page * self.lines.vector * self.shape.num_kv_heads

    @property
    def _device(self) -> torch.device:
        return self._pages.arena.device

    @cached_property
    def _tail_positions(self) -> Tensor:
        parts = [torch.arange(start, end, dtype=torch.int32, device=self._device) for start, end in self.work.runs]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=self._device)

    @cached_property
    def _tail_units(self) -> Tensor:
        return self._pages.send(self._tails[0].units)

    @property
    def _tail_page(self) -> int:
        return self._pages.groups[0].page_size

    @cached_property
    def _tail_places(self) -> _Places | None:
        """K and V of the tail in layer 0 and head 0 `[num_tail]`; None where the tail is empty."""
        if not self._served.method.stores:
            raise EngineFault(f"{self._served.method.fingerprint} keeps K and V in states of its own: there are no candidates")
        if not self.num_tail:
            return None
        tail, size = self._tails[0], self._tail_page
        slots = torch.arange(tail.first, tail.stop, device=self._device)
        units = self._tail_units[slots // size - tail.first // size]
        k = units * self.lines.granule + slots % size * self.lines.vector
        return _Places(k, k + size * self.lines.vector, slots)

    @cached_property
    def _old_places(self) -> _Places | None:
        """Slots of the old sealed part `[num_layers * num_kv_heads, num_old]`; behind their lengths anything that exists."""
        if self._units is None or not self.num_old:
            return None
        layout, units = self._units.layout, self._pages.send(self.work.old[0])
        slots = torch.arange(self.num_old, device=self._device)
        pages = (slots // layout.page_size).expand(layout.num_layers * layout.num_kv_heads, -1)
        if self._units.by_head:
            pages = pages + self._units.pages_of(self.old_lens)[1].flatten().unsqueeze(1)
        heads = torch.arange(len(pages), device=self._device)
        return sealed_places(self._units, self.lines, units[pages.clamp(max=len(units) - 1)], heads, slots % layout.page_size)

    def _items(self, group: int, units: Tensor, first: int, count: int) -> Tensor:
        """Items of `count` slots of a state from slot `first` of the given units on, with the slots at SLOT."""
        state = self._pages.groups[group]
        assert isinstance(state, StateGroup)
        at = state.shape.index(SLOT)
        by_slot = self._pages.state(group)[units].movedim(1 + at, 1).flatten(0, 1)
        return by_slot[first : first + count].movedim(0, at)

    def _sealed(self, name: str, parts: tuple[list[int], ...]) -> tuple[Tensor, Tensor]:
        group = self._served.sealed[name]
        place = self._served.form.sealed.index(group)
        return self._pages.state(group), self._pages.send(parts[place] if parts else [])


def sealed_places(units: SealedUnits, lines: _Lines, granules: Tensor, heads: Tensor, offsets: Tensor) -> _Places:
    """Slots of sealed pages. granules: int64 `[n, count]` where the pages lie; heads: int64 `[n]`, see `PagedSealJob.places`;
    offsets: int64 `[count]`, slots in the pages."""
    layout = units.layout
    head = heads.new_zeros(len(heads), 1) if units.by_head else heads.unsqueeze(1)
    k = granules * lines.granule + (head * 2 * layout.page_size + offsets) * lines.vector
    words = granules * (GRANULE // 4) + layout.payload_bytes // 4 + head * layout.page_size + offsets
    return _Places(k, k + layout.page_size * lines.vector, words)


def write_kept(pages: KVPages, served: Served, units: SealedUnits, job: PagedSealJob, kept: Kept) -> Tensor:
    """Copy what a seal keeps into its new units: K, V, positions, and the items of states that seals move. The counts that were
    written, int32 `[num_layers, num_kv_heads]`: no more than the seal said, in a layer and head.

    The rest of each new unit is filled with the first candidate, so that nothing in it is ever no number.
    """
    work, layout = job.work, units.layout
    slots = min(kept.indices.shape[2], work.held.slots if work.seal is None else work.seal.slots)
    counts = kept.counts.clamp(0, slots).to(torch.int32)
    place = torch.arange(slots, device=counts.device)
    indices = torch.where(place < counts.unsqueeze(2), kept.indices[..., :slots], 0)
    keeps = (0,) * len(work.new) if work.seal is None else work.seal.keeps
    new = pages.send(work.new[0])
    _write_pages(pages, units, job, _cells(units, counts, new, keeps[0]), indices.flatten(0, 1))
    units.lens[work.new[1][0]] = counts
    for name, spec in served.specs.items():
        if spec.part == "both":
            state, target = job.new(name)
            first = keeps[served.form.sealed.index(served.sealed[name])]
            made = _pick(job.items(name).movedim(spec.shape.index(SLOT), 2), indices, len(target), layout.page_size)
            state[target[first:]] = made.movedim(3, 1 + spec.shape.index(SLOT))[first:]
    return counts


def prune(pages: KVPages, served: Served, units: SealedUnits, job: PagedSealJob) -> int:
    """Write the old sealed part without the slots of `work.removed` into the new units; most slots that are left in a layer and
    head, for which it waits."""
    layout = units.layout
    heads = torch.arange(layout.num_layers * layout.num_kv_heads, device=job.old_lens.device)
    slots = torch.arange(job.num_old, device=job.old_lens.device)
    positions = job.positions_at(heads, slots.expand(len(heads), -1))
    stays = slots < job.old_lens.flatten().unsqueeze(1)
    for start, end in job.work.removed:
        stays &= (positions < start) | (positions >= end)
    order = torch.sort((~stays).to(torch.uint8), dim=1, stable=True).indices
    shape = (layout.num_layers, layout.num_kv_heads)
    kept = Kept(order.view(*shape, -1), stays.sum(1, dtype=torch.int32).view(shape))
    return int(write_kept(pages, served, units, job, kept).max())


class _Cells(NamedTuple):
    """Pages to write, one a line, int64 `[n]` each: granule, layer * num_kv_heads + kv head, and number among the head's."""

    granules: Tensor
    heads: Tensor
    pages: Tensor


def _cells(units: SealedUnits, counts: Tensor, new: Tensor, keeps: int) -> _Cells:
    """Every page of every head of new units, those that the old part keeps left out. How many belong to a head of head pages is
    known on the device alone: pages that are left over go to the last head, behind its length."""
    heads = counts.numel()
    if units.by_head:
        numbers = torch.arange(len(new), device=new.device)
        pages, firsts = (each.flatten() for each in units.pages_of(counts))
        owners = torch.searchsorted(firsts + pages, numbers, right=True).clamp_(max=heads - 1)
        return _Cells(new, owners, numbers - firsts[owners])
    numbers = torch.arange(keeps, len(new), device=new.device).repeat_interleave(heads)
    return _Cells(new[numbers], torch.arange(heads, device=new.device).repeat(len(new) - keeps), numbers)


def _write_pages(pages: KVPages, units: SealedUnits, job: PagedSealJob, cells: _Cells, indices: Tensor) -> None:
    """indices: int64 `[num_layers * num_kv_heads, slots]` of candidates, 0 behind the counts."""
    lines, words = job.lines.lines, pages.elements(torch.int32)
    size = units.layout.page_size
    offsets = torch.arange(size, device=indices.device)
    chunk = max(1, _CHUNK_BYTES // (2 * size * lines.shape[1] * lines.itemsize))
    for part in zip(*(torch.split(column, chunk) for column in cells), strict=True):
        granules, heads, numbers = part
        slots = numbers.unsqueeze(1) * size + offsets
        index = torch.where(slots < indices.shape[1], indices[heads.unsqueeze(1), slots.clamp(max=indices.shape[1] - 1)], 0)
        source = job.places(heads, index)
        target = sealed_places(units, job.lines, granules.unsqueeze(1), heads, offsets)
        lines[target.k], lines[target.v] = lines[source.k], lines[source.v]
        words[target.words] = job.positions_at(heads, index)


def _pick(items: Tensor, indices: Tensor, num_pages: int, page_size: int) -> Tensor:
    """Items `[num_pages, num_layers, num_kv_heads, page_size, ...]` of items `[num_layers, num_kv_heads, candidates, ...]`."""
    behind = num_pages * page_size - indices.shape[2]
    index = torch.nn.functional.pad(indices, (0, behind))
    index = index.view(*index.shape, *[1] * (items.dim() - 3)).expand(*index.shape, *items.shape[3:])
    picked = items.gather(2, index)
    return picked.view(*picked.shape[:2], num_pages, page_size, *picked.shape[3:]).movedim(2, 0)
