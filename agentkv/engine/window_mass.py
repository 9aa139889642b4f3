"""Attention that slots receive from the windows of a prompt's queries, counted once for many layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from agentkv.engine.received import columns, counted, of_row, on_pages, paged_keys, received
from agentkv.engine.tables import RowTable
from agentkv.engine.view import AttentionView, DeviceBatch, PagedKV, Part, RowMass
from agentkv.kernels.page_bounds import layer_step
from agentkv.kernels.send import send

Counted = tuple[range, tuple[RowMass, ...]]

_MOST = 128 << 20
"""Bytes of queries that are kept from layer to layer; a chunk with more is counted layer by layer."""
_AT_ONCE = 64 << 20
"""Bytes of what the slots of a row receive in the layers that are counted together."""


class WindowMass:
    """The queries of one batch of chunks that count, kept until the last layer. What they give is then summed in all layers at
    once: a launch a chunk instead of many a layer, which a GPU would wait for.

    window: see `Needs.mass_window`.
    """

    def __init__(self, batch: DeviceBatch, window: tuple[int, int]) -> None:
        self._batch, self._window = batch, window
        self._by_row = [counted(span.position, span.end - span.start, window) for span in batch.rows]
        rows = zip(batch.rows, self._by_row, strict=True)
        self._runs = [(span.start + first, span.start + end) for span, runs in rows for first, end in runs]
        self._stops = list(accumulate(sum(end - first for first, end in runs) for runs in self._by_row))
        self._num_layers = len(batch.group_of)
        self._parts: dict[int, Part] = {}
        self._kept: tuple[Tensor, Tensor] | None = None

    def add(self, layer: int, q: Tensor, view: AttentionView, lse: Tensor, scale: float) -> Iterator[Counted]:
        """Take a layer's queries, in the order of layers. What has been counted by now: layers, and by row what its slots
        received in each, see `received`. Every layer comes once, the last ones with the last; none where no query counts."""
        if not self._runs:
            return
        part = self._kept_part(q, view)
        if part is None:
            mass = received(q, view, self._batch, scale, lse, window=self._window)
            yield range(layer, layer + 1), tuple(each.of_layers() for each in mass)
        else:
            self._keep(layer, part, q, lse)
        if layer == self._num_layers - 1:
            for layers in self._together():
                yield layers, tuple(self._of_row(layers, index, scale) for index in range(len(self._batch.rows)))

    def _kept_part(self, q: Tensor, view: AttentionView) -> Part | None:
        """The view's only part, if its slots can still be read behind the last layer and the queries are not too many."""
        part = view.parts[0]
        if len(view.parts) > 1 or part.bias is not None or not isinstance(part.payload, PagedKV):
            return None
        if not isinstance(part.table, RowTable) or any(len({*starts}) > 1 for starts in part.table.host_starts):
            return None
        return part if self._stops[-1] * self._num_layers * q[0].nbytes <= _MOST else None

    def _keep(self, layer: int, part: Part, q: Tensor, lse: Tensor) -> None:
        self._parts[layer] = part
        if self._kept is None:
            dims = self._num_layers, self._stops[-1]
            self._kept = q.new_empty(*dims, *q.shape[1:]), lse.new_empty(*dims, *lse.shape[1:])
        for given, kept in zip((q, lse), self._kept, strict=True):
            torch.index_select(given, 0, self._asked, out=kept[layer])

    def _together(self) -> Iterator[range]:
        """The kept layers in runs of the same table."""
        layers = sorted(self._parts)
        while layers:
            part = self._parts[layers[0]]
            assert isinstance(part.payload, PagedKV)
            assert isinstance(part.table, RowTable)
            most = max(1, _AT_ONCE // (4 * part.payload.pages.shape[1] * max(1, *part.table.host_lens)))
            alike = (self._parts[layer].table is part.table and layer == layers[0] + i for i, layer in enumerate(layers[:most]))
            count = next((i for i, same in enumerate(alike) if not same), min(most, len(layers)))
            yield range(layers[0], layers[0] + count)
            layers = layers[count:]

    def _of_row(self, layers: range, index: int, scale: float) -> RowMass:
        """What the slots of the batch's row of that index received in some layers."""
        assert self._kept is not None
        parts = [self._parts[layer] for layer in layers]
        assert isinstance(parts[0].table, RowTable)
        asked = slice(self._stops[index - 1] if index else 0, self._stops[index])
        q, lse = (each[layers.start : layers.stop, asked] for each in self._kept)
        step = layer_step([part.payload.pages for part in parts if isinstance(part.payload, PagedKV)])
        keys = paged_keys(parts[0], index) if step is not None and on_pages(q) else None
        if keys is not None and step is not None:
            tail = columns(q, keys._replace(step=step), lse, self._last[asked] + keys.length, scale)
        else:
            each = zip(q, parts, lse, strict=True)
            tail = torch.stack([of_row(mine, part, index, tops, self._last[asked], scale) for mine, part, tops in each])
        return RowMass(None, tail, parts[0].table.first_slots[index])

    @cached_property
    def _asked(self) -> Tensor:
        """int64 `[num_queries]`: the step's tokens whose queries count."""
        assert self._kept is not None
        return send([token for run in self._runs for token in range(*run)], self._kept[0].device)

    @cached_property
    def _last(self) -> Tensor:
        """int32 `[num_queries]`: how many of its row's slots each query does not see, negated."""
        assert self._kept is not None
        ends = [span.end for span, runs in zip(self._batch.rows, self._by_row, strict=True) for _ in runs]
        behind = [token + 1 - end for run, end in zip(self._runs, ends, strict=True) for token in range(*run)]
        return send(behind, self._kept[0].device, torch.int32)
