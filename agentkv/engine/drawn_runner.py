"""A runner whose prompts cost nothing: what memory and decodes take is measured without reading them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from agentkv.engine.core import Batch
from agentkv.engine.runner import ModelRunner, StepDrawn
from agentkv.engine.runner_protocol import Launched
from agentkv.engine.step import Step
from agentkv.engine.view import DeviceBatch, RowMass


class DrawnRunner(ModelRunner):
    """A runner that draws a prompt's hidden states, keys, values and queries (normal) instead of computing them. Decodes are
    computed. drawn: what is drawn from now on: prompts, all, or nothing. last: the batch that was launched last; it may be
    executed again as long as nothing else is, and unless it was launched ahead."""

    drawn: Literal["prompts", "all", "nothing"] = "prompts"
    last: Batch = Batch(rows=[])

    def launch(self, batch: Batch, after: Launched | None = None) -> StepDrawn:
        """See `ModelRunner.launch`."""
        drawn = super().launch(batch, after)
        self.last = Batch(batch.rows)
        return drawn

    def _replayable(self, batch: Batch) -> bool:
        """A graph of what was drawn would be replayed for what is not."""
        computed = self.drawn == "nothing" or (self.drawn == "prompts" and all(work.decodes for work in batch.rows))
        return computed and super()._replayable(batch)

    def forward(self, step: Step) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]`; those of prompts are 0."""
        chunks = [batch for batch in step.batches if batch.prefill or self.drawn == "all"]
        if self.drawn == "nothing" or not chunks:
            return super().forward(step)
        first = min(batch.tokens.start for batch in chunks)
        hidden = torch.zeros(
            len(step.token_ids), self.loaded.config.hidden_size, dtype=self.loaded.dtype, device=self.loaded.device
        )
        if first:
            decodes = tuple(batch for batch in step.batches if not batch.prefill)
            before = replace(step, token_ids=step.token_ids[:first], positions=step.positions[:first], batches=decodes)
            hidden[:first] = super().forward(before)
        for batch in chunks:
            self._store_drawn(batch)
        return hidden

    def _store_drawn(self, batch: DeviceBatch) -> None:
        """Every hook of one batch but those of attention, in the order of the layers."""
        count, shape = batch.tokens.stop - batch.tokens.start, self.served[batch.form].shape
        alone, method = replace(batch, tokens=slice(0, count)), self.controller.methods[batch.form]
        lifecycle = self.controller.lifecycle((alone,))
        lifecycle.begin()
        for layer in range(shape.num_layers):
            x, q = self._normal(count, shape.hidden_size), self._normal(count, shape.num_heads, shape.head_dim)
            k, v = (self._normal(count, shape.num_kv_heads, shape.head_dim) for _ in "kv")
            lifecycle.project(layer, x)
            lifecycle.store(layer, k, k, v)
            if batch.recent is not None:
                batch.recent.keep(layer, q)
            needs = method.needs
            lse = torch.full(q.shape[:2], 16.0, device=q.device) if needs.lse or needs.mass else None
            mass = [self._mass(alone, layer, row) for row in range(len(batch.rows))] if needs.mass else None
            method.on_attention_end(layer, q, q, lse, mass, alone)
            lifecycle.layer_end(layer, x)
        lifecycle.end()

    def _normal(self, *dims: int) -> Tensor:
        return torch.randn(dims, dtype=self.loaded.dtype, device=self.loaded.device)

    def _mass(self, batch: DeviceBatch, layer: int, row: int) -> RowMass:
        """Attention received, 0 to 1 for each slot."""
        table, heads, device = batch.table_of(layer), self.served[batch.form].shape.num_kv_heads, self.loaded.device
        first = table.first_slots[row]
        slots = batch.sealed.host_slots[row] if batch.sealed is not None else 0
        sealed = torch.rand(heads, slots, device=device) if slots else None
        return RowMass(sealed, torch.rand(heads, table.host_lens[row] - first, device=device), first)
