"""Copy KV from slot to slot in all layers: compaction, and copy on write of a page."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def move_slots(layers: Iterable[Tensor], source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
    """Copy K and V of each source slot to the target slot with the same index.

    layers: `pages` of each layer (see store_kv). source, target: (entries, offsets), int64 `[num_slots]` each. A layer is
    read whole before it is written, so the two sets may overlap; targets must differ from one another.
    """
    source_entries, source_offsets = source
    target_entries, target_offsets = target
    for pages in layers:
        moved = pages[source_entries, :, :, source_offsets]
        pages[target_entries, :, :, target_offsets] = moved
