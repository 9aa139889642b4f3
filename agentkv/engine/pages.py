"""The device's KV memory: one byte arena, and by KV group the page table of the running rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import GRANULE, EngineConfig, KVGroup, Slot, TableUpdate
from agentkv.errors import BadModel, EngineFault
from agentkv.kernels.move_slots import move_slots


class KVPages:
    """Arena of `config.memory` bytes (on the CPU touched only where used) and by group an int32 table `[max_rows, max_pages]`.

    A table entry is the granule where a stripe starts; a stripe is [layer][kv head][K,V][token][dim] of the group's layers.
    Offsets are int64 from there on. Page p of a row has the group's slots from `p * page_size` on, whatever was freed before
    them, so entries never move. The tables change only by `update_tables`.
    """

    def __init__(self, groups: tuple[KVGroup, ...], config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.groups = groups
        self.num_granules = config.memory // GRANULE
        least = sum(group.stripe_bytes for group in groups)
        if config.memory < least or self.num_granules >= 2**31:
            raise BadModel(
                f"a KV arena of {config.memory} bytes cannot hold one page of {least} bytes, or is past 549 GB",
                hint="Change the engine's memory or its page_size",
            )
        try:
            self.arena = torch.empty(self.num_granules * GRANULE, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise BadModel(
                f"no room for a KV arena of {config.memory} bytes on {device}: {str(error).splitlines()[0]}",
                hint="Give the engine less memory, or free the device",
            ) from None
        self.tables = tuple(
            torch.zeros(config.max_rows, -(-config.window // group.page_size), dtype=torch.int32, device=device)
            for group in groups
        )
        layers = {layer: (group, index) for group in groups for index, layer in enumerate(group.layers)}
        self._layers = tuple(self._view(*layers[layer], dtype) for layer in range(len(layers)))

    def _view(self, group: KVGroup, index: int, dtype: torch.dtype) -> Tensor:
        """`[num_granules, num_kv_heads, 2, page_size, head_dim]`: row g is the page of the group's layer `index` of a stripe at
        granule g."""
        shape = (group.num_kv_heads, 2, group.page_size, group.head_dim)
        plane = group.page_size * group.head_dim
        size = shape[0] * 2 * plane
        elements = self.arena.view(dtype)
        step = GRANULE // dtype.itemsize
        count = (elements.numel() - group.num_layers * size) // step + 1
        return elements.as_strided((count, *shape), (step, 2 * plane, plane, shape[3], 1), index * size)

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
        """Copy K and V of the group's layers from slot to slot; the two sets may overlap, targets differ from one another."""
        if len(source) != len(target):
            raise EngineFault(f"{len(source)} source slots for {len(target)} targets")
        if not source:
            return
        packed = torch.tensor([(*a, *b) for a, b in zip(source, target, strict=True)], dtype=torch.int64)
        source_units, source_slots, target_units, target_slots = packed.to(self.arena.device).unbind(1)
        layers = [self._layers[layer] for layer in self.groups[group].layers]
        move_slots(layers, (source_units, source_slots), (target_units, target_slots))


def _write(table: Tensor, updates: Sequence[TableUpdate]) -> None:
    rows, width = table.shape
    entries: dict[tuple[int, int], int] = {}
    for row, first, units, _ in updates:
        if not (0 <= row < rows and first >= 0 and first + len(units) <= width):
            raise EngineFault(f"row {row}, pages {first} to {first + len(units)} are outside a table of {rows} x {width}")
        for page, unit in enumerate(units, start=first):
            entries[row, page] = unit
    packed = torch.tensor([(*place, unit) for place, unit in entries.items()], dtype=torch.int64)
    row_ids, pages, values = packed.to(table.device).unbind(1)
    table[row_ids, pages] = values.to(torch.int32)
