"""The device's KV memory: one byte arena and the page table of the running rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.engine.core import GRANULE, EngineConfig, KVLayout, Slot
from agentkv.errors import BadModel, EngineFault
from agentkv.kernels.move_slots import move_slots


class KVPages:
    """Arena of `config.memory` bytes (on the CPU touched only where used) and int32 table `[max_rows, max_pages]`.

    A table entry is the granule where a stripe starts; a stripe is [layer][kv head][K,V][token][dim]. Offsets are int64
    from there on. The table changes only by `update_table`.
    """

    def __init__(self, layout: KVLayout, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.layout = layout
        self.num_granules = config.memory // GRANULE
        self.max_pages = -(-config.window // layout.page_size)
        if config.memory < layout.stripe_bytes or self.num_granules >= 2**31:
            raise BadModel(
                f"a KV arena of {config.memory} bytes cannot hold one page of {layout.stripe_bytes} bytes, or is past 549 GB",
                hint="Change the engine's memory or its page_size",
            )
        try:
            self.arena = torch.empty(self.num_granules * GRANULE, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise BadModel(
                f"no room for a KV arena of {config.memory} bytes on {device}: {str(error).splitlines()[0]}",
                hint="Give the engine less memory, or free the device",
            ) from None
        self.table = torch.zeros(config.max_rows, self.max_pages, dtype=torch.int32, device=device)
        self._layers = tuple(self._view(layer, dtype) for layer in range(layout.num_layers))

    def _view(self, layer: int, dtype: torch.dtype) -> Tensor:
        """`[num_granules, num_kv_heads, 2, page_size, head_dim]`: row g is the layer's page of a stripe at granule g."""
        shape = (self.layout.num_kv_heads, 2, self.layout.page_size, self.layout.head_dim)
        plane = self.layout.page_size * self.layout.head_dim
        size = shape[0] * 2 * plane
        elements = self.arena.view(dtype)
        step = GRANULE // dtype.itemsize
        count = (elements.numel() - self.layout.num_layers * size) // step + 1
        return elements.as_strided((count, *shape), (step, 2 * plane, plane, shape[3], 1), layer * size)

    def layer(self, layer: int) -> Tensor:
        """The layer's pages. Writing through the view writes the arena."""
        return self._layers[layer]

    def update_table(self, updates: Sequence[tuple[int, int, list[int]]]) -> None:
        """Write (row, first page index, units) into the table, later ones over earlier ones."""
        if not updates:
            return
        rows, width = self.table.shape
        entries: dict[tuple[int, int], int] = {}
        for row, first, units in updates:
            if not (0 <= row < rows and first >= 0 and first + len(units) <= width):
                raise EngineFault(f"row {row}, pages {first} to {first + len(units)} are outside a table of {rows} x {width}")
            for page, unit in enumerate(units, start=first):
                entries[row, page] = unit
        packed = torch.tensor([(*place, unit) for place, unit in entries.items()], dtype=torch.int64)
        row_ids, pages, values = packed.to(self.table.device).unbind(1)
        self.table[row_ids, pages] = values.to(torch.int32)

    def move(self, source: Sequence[Slot], target: Sequence[Slot]) -> None:
        """Copy K and V of all layers from slot to slot; the two sets may overlap, targets differ from one another."""
        if len(source) != len(target):
            raise EngineFault(f"{len(source)} source slots for {len(target)} targets")
        if not source:
            return
        packed = torch.tensor([(*a, *b) for a, b in zip(source, target, strict=True)], dtype=torch.int64)
        source_units, source_slots, target_units, target_slots = packed.to(self.table.device).unbind(1)
        move_slots(self._layers, (source_units, source_slots), (target_units, target_slots))
