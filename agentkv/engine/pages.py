"""The device's KV memory: one byte arena, and by KV group the page table of the running rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from types import MappingProxyType

import numpy
import torch
from torch import Tensor

from agentkv.engine.cache.layout import UnitLayout
from agentkv.engine.core import GRANULE, SLOT, EngineConfig, Group, KVGroup, StateGroup
from agentkv.engine.work import Slot, TableUpdate
from agentkv.errors import BadModel, EngineFault
from agentkv.kernels.move_slots import move_slots
from agentkv.kernels.move_units import CHUNK_BYTES, move_units, unit_rows
from agentkv.kernels.send import send


class KVPages:
    """Arena of `config.memory` bytes (on the CPU touched only where used) and by group an int32 table
    `[max_rows + 1, max_pages]`.

    A table entry is the granule where a unit starts; a unit of KV is a stripe, [layer][kv head][K,V][token][dim] of the group's
    layers. Offsets are int64 from there on. Page p of a row has the group's slots from `p * page_size` on, whatever was freed
    before them, so entries never move. The tables change only by `update_tables`. The last line is that of dead rows, which
    fill up a captured step: its entries are one unit of the group behind the host's memory, which nobody else has.

    dtype: of K and V. widths: pages of a row by group, where they are not those of a window's tokens.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        widths: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.groups = groups
        self.dtype = dtype
        self.num_granules = config.memory // GRANULE
        least = sum(group.stripe_bytes for group in groups)
        self.all_granules = self.num_granules + least // GRANULE
        if config.memory < least or self.all_granules >= 2**31:
            raise BadModel(
                f"a KV arena of {config.memory} bytes cannot hold one page of {least} bytes, or is past 549 GB",
                hint="Change the engine's memory or its page_size",
            )
        try:
            self.arena = torch.empty(self.all_granules * GRANULE, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise BadModel(
                f"no room for a KV arena of {config.memory} bytes on {device}: {str(error).splitlines()[0]}",
                hint="Give the engine less memory, or free the device",
            ) from None
        self.tables = tuple(
            torch.zeros(
                config.max_rows + 1, widths.get(index, -(-config.window // group.page_size)), dtype=torch.int32, device=device
            )
            for index, group in enumerate(groups)
        )
        self.dead_row = config.max_rows
        units = accumulate((group.stripe_bytes // GRANULE for group in groups), initial=self.num_granules)
        for table, unit in zip(self.tables, units, strict=False):
            table[self.dead_row] = unit
        kv = [group for group in groups if isinstance(group, KVGroup)]
        layers = {layer: (group, index) for group in kv for index, layer in enumerate(group.layers)}
        states = ((index, group) for index, group in enumerate(groups) if isinstance(group, StateGroup))
        self._states = {index: self._state_views(group) for index, group in states}
        self._layers = tuple(self._view(*layers[layer], dtype) for layer in range(len(layers)))

    def _view(self, group: KVGroup, index: int, dtype: torch.dtype) -> Tensor:
        """`[num_granules, num_kv_heads, 2, page_size, head_dim]`: row g is the page of the group's layer `index` of a stripe at
        granule g."""
        return self.arena.view(dtype).as_strided(*UnitLayout.of(group, "stripe").strides(index, self.all_granules))

    def _state_views(self, group: StateGroup) -> tuple[Tensor, ...]:
        """`[num_granules, *unit_shape]`, and `*beside_shape` where there is another: row g is the unit of the state that starts
        at granule g. Rows overlap."""
        elements, rows = self.elements(getattr(torch, group.dtype)), self.all_granules - group.stripe_bytes // GRANULE + 1
        found, first = [], 0
        for dims in (group.unit_shape, group.beside_shape)[: 2 if group.beside else 1]:
            strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
            found.append(elements.as_strided((rows, *dims), (GRANULE // group.itemsize, *strides), first))
            first += prod(dims)
        return tuple(found)

    def elements(self, dtype: torch.dtype) -> Tensor:
        """The arena as one run of elements of a dtype. Writing through it writes the arena."""
        return self.arena.view(dtype)

    def state(self, group: int) -> Tensor:
        """Units of a method's state `[num_granules, *unit_shape]`. Writing through the view writes the arena."""
        return self._states[group][0]

    def beside(self, group: int) -> Tensor:
        """The second array of the same units `[num_granules, *beside_shape]`."""
        return self._states[group][1]

    def send(self, values: Sequence[int]) -> Tensor:
        """Integers on the device, int64. The host does not wait for the copy."""
        return send(values, self.arena.device)

    def layer(self, layer: int) -> Tensor:
        """The layer's pages. Writing through the view writes the arena."""
        return self._layers[layer]

    def update_tables(self, updates: Sequence[TableUpdate]) -> None:
        """Write units into the tables, later ones over earlier ones."""
        for group, table in enumerate(self.tables):
            mine = [update for update in updates if update.group == group]
            if mine:
                _write(table, mine)

    def move(self, source: Sequence[Slot], target: Sequence[Slot], group: int) -> None:
        """Copy what the group has, K and V of its layers or a state, from slot to slot; the two sets may overlap, targets
        differ from one another."""
        if len(source) != len(target):
            raise EngineFault(f"{len(source)} source slots for {len(target)} targets")
        if not source:
            return
        packed = self.send([number for pair in zip(source, target, strict=True) for slot in pair for number in slot])
        source_units, source_slots, target_units, target_slots = packed.view(-1, 4).unbind(1)
        moved = self.groups[group]
        if isinstance(moved, StateGroup):
            if not moved.by_slot:
                raise EngineFault(f"state {moved.name!r} has no slots to move")
            for units, shape in zip(self._states[group], (moved.shape, moved.beside), strict=False):
                by_slot = units.movedim(1 + shape.index(SLOT), 1)
                by_slot[target_units, target_slots] = by_slot[source_units, source_slots]
            return
        layers = [self._layers[layer] for layer in moved.layers]
        move_slots(layers, (source_units, source_slots), (target_units, target_slots))

    def move_units(self, unit_bytes: int, source: Sequence[int], target: Sequence[int]) -> None:
        """See `runner_protocol.Runner.move_units`."""
        if len(source) != len(target):
            raise EngineFault(f"{len(source)} source units for {len(target)} targets")
        packed = self.send([*source, *target]).view(2, -1)
        move_units(unit_rows(self.arena, unit_bytes, GRANULE), packed[0], packed[1])

    def read_units(self, unit_bytes: int, units: Sequence[int]) -> memoryview:
        """See `runner_protocol.Runner.read_units`. The host memory is pinned where the device is a GPU."""
        rows = unit_rows(self.arena, unit_bytes, GRANULE)
        on_gpu = self.arena.device.type == "cuda"
        flat = torch.empty(len(units) * unit_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        held = flat.view(torch.int64).view(-1, rows.shape[1])
        for start, stop, index in self._chunks(units, unit_bytes):
            held[start:stop].copy_(rows[index], non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream(self.arena.device).synchronize()
        data: memoryview = flat.numpy().data
        return data

    def write_units(self, unit_bytes: int, units: Sequence[int], data: memoryview) -> None:
        """See `runner_protocol.Runner.write_units`."""
        if data.nbytes != len(units) * unit_bytes:
            raise EngineFault(f"{data.nbytes} bytes for {len(units)} units of {unit_bytes}")
        rows = unit_rows(self.arena, unit_bytes, GRANULE)
        held = torch.from_numpy(numpy.frombuffer(data, dtype=numpy.int64)).view(len(units), rows.shape[1])
        for start, stop, index in self._chunks(units, unit_bytes):
            rows[index] = held[start:stop].to(rows.device, non_blocking=True)
        if self.arena.device.type == "cuda":
            torch.cuda.current_stream(self.arena.device).synchronize()  # the caller may let go of `data` now

    def _chunks(self, units: Sequence[int], unit_bytes: int) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, their granules on the device) of runs of units whose bytes fit a chunk."""
        index = self.send(units)
        step = max(1, CHUNK_BYTES // unit_bytes)
        for start in range(0, len(units), step):
            yield start, min(start + step, len(units)), index[start : start + step]


def _write(table: Tensor, updates: Sequence[TableUpdate]) -> None:
    rows, width = len(table) - 1, table.shape[1]
    entries: dict[tuple[int, int], int] = {}
    for row, first, units, _ in updates:
        if not (0 <= row < rows and first >= 0 and first + len(units) <= width):
            raise EngineFault(f"row {row}, pages {first} to {first + len(units)} are outside a table of {rows} x {width}")
        for page, unit in enumerate(units, start=first):
            entries[row, page] = unit
    if not entries:
        return
    packed = send([number for (row, page), unit in entries.items() for number in (row, page, unit)], table.device)
    row_ids, pages, values = packed.view(-1, 3).unbind(1)
    table[row_ids, pages] = values.to(torch.int32)
