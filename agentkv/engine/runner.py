"""The device side of a step: a batch in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from agentkv.engine.core import Batch, EngineConfig, RowWork, Slot
from agentkv.engine.loader import LoadedModel
from agentkv.engine.logprobs import score
from agentkv.engine.pages import KVPages
from agentkv.engine.sampler import sample
from agentkv.engine.sparse import SparseController, SparseMethod
from agentkv.engine.view import DeviceBatch, RowSpan, RowTable

_FEW_TOKENS = 16
_FEW_BYTES = 128 << 20
"""A CPU step of at most so many tokens, weights and KV bytes runs on one thread: more would wait for one another about as
long as they save, and where other processes share the cores, many times as long."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch on the device. order: index in the batch of each row of `works`, which has decodes first, then chunks.

    draws: (index of the row in `works`, how many of the row's draws come before) of each draw.
    """

    works: tuple[RowWork, ...]
    order: tuple[int, ...]
    token_ids: Tensor
    positions: Tensor
    batches: tuple[DeviceBatch, ...]
    draws: tuple[tuple[int, int], ...]
    ends: Tensor
    """int64 `[num_draws]`: the token of the step that each draw comes after."""


class ModelRunner:
    """Runs one model with one method over the KV arena it owns. Implements `core.Runner`; used by one thread.

    prefill: a second method that selects and views while prompts are read; None is the same method.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, method: SparseMethod, *, prefill: SparseMethod | None = None
    ) -> None:
        self.loaded = loaded
        self.config = config
        self.layout = loaded.layout(config.page_size)
        self.pages = KVPages(self.layout, config, loaded.device, loaded.dtype)
        self.num_granules = self.pages.num_granules
        self.vocab_size = loaded.config.vocab_size
        self.controller = SparseController(method, prefill)
        self._weight_bytes = loaded.weight_bytes

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[int | None]:
        """Forward the batch; for each row the (first) sampled token id, None where `sample` is False, -1 where a mask allows
        none."""
        self.pages.update_table(batch.table_updates)
        if not batch.rows:
            return []
        with self._threads(batch):
            step = self._prepare(batch)
            hidden = self._forward(step)
            return self._sample(step, hidden)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Forward the batch without sampling: logits of every token `[num_tokens, vocab_size]`, in the batch's order."""
        self.pages.update_table(batch.table_updates)
        step = self._prepare(batch)
        scores = self.loaded.model.logits(self._forward(step))
        by_row = dict(zip(step.order, torch.split(scores, [len(work.tokens) for work in step.works]), strict=True))
        return torch.cat([by_row[index] for index in range(len(batch.rows))])

    @torch.inference_mode()
    def move_slots(self, source: list[Slot], target: list[Slot]) -> None:
        """Copy K and V of all layers from slot to slot; the two sets may overlap."""
        self.pages.move(source, target)

    @contextmanager
    def _threads(self, batch: Batch) -> Iterator[None]:
        """One thread for a small step on the CPU; the process's setting is restored."""
        held = sum(work.slot + len(work.tokens) for work in batch.rows) * self.layout.token_bytes
        small = batch.num_tokens <= _FEW_TOKENS and self._weight_bytes + held <= _FEW_BYTES
        before = torch.get_num_threads()
        if not small or before == 1 or self.loaded.device.type != "cpu":
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _prepare(self, batch: Batch) -> _Step:
        """Order the rows by phase and carry the step's integers to the device in one copy."""
        order = sorted(range(len(batch.rows)), key=lambda index: not batch.rows[index].decodes)
        works = tuple(batch.rows[index] for index in order)
        counts = [len(work.tokens) for work in works]
        token_ids = [token for work in works for token in work.tokens]
        positions = [work.position + i for work in works for i in range(len(work.tokens))]
        slots = [work.slot + i for work in works for i in range(len(work.tokens))]
        owners = [work.row for work in works for _ in work.tokens]
        rows = [work.row for work in works]
        lens = [work.slot + len(work.tokens) for work in works]
        draws = tuple((index, i) for index, work in enumerate(works) if work.sample for i in range(work.drafted + 1))
        stops = list(accumulate(counts))
        ends = [stops[index] - 1 - works[index].drafted + i for index, i in draws]
        lists = (token_ids, positions, slots, owners, rows, lens, ends)
        packed = torch.tensor([value for each in lists for value in each], dtype=torch.int64).to(self.loaded.device)
        token_ids_, positions_, slots_, owners_, rows_, lens_, ends_ = torch.split(packed, [len(each) for each in lists])

        page_size = self.layout.page_size
        entries = self.pages.table[owners_, slots_ // page_size].to(torch.int64)
        num_decodes = sum(work.decodes for work in works)
        decoded = sum(counts[:num_decodes])
        places = (positions_, entries, slots_ % page_size)
        batches = []
        for prefill, first, last in ((False, 0, num_decodes), (True, num_decodes, len(works))):
            if first < last:
                spans = _spans(works[first:last])
                table = self._table(spans, rows_[first:last], lens_[first:last].to(torch.int32))
                batches.append(self._device_batch(prefill, decoded if prefill else 0, spans, table, places))
        return _Step(works, tuple(order), token_ids_, positions_, tuple(batches), draws, ends_)

    def _table(self, spans: tuple[RowSpan, ...], rows: Tensor, lens: Tensor) -> RowTable:
        host_rows = tuple(span.row for span in spans)
        host_lens = tuple(span.kv_len for span in spans)
        return RowTable(self.pages.table, rows, lens, host_rows, host_lens, self.layout.page_size)

    def _device_batch(
        self, prefill: bool, start: int, spans: tuple[RowSpan, ...], table: RowTable, places: tuple[Tensor, Tensor, Tensor]
    ) -> DeviceBatch:
        """The rows of one phase, whose tokens begin at `start` of the step. places: positions, entries, offsets of the step."""
        tokens = slice(start, start + spans[-1].end)
        positions, entries, offsets = (each[tokens] for each in places)
        return DeviceBatch(spans, tokens, prefill, positions, entries, offsets, table, self.pages.layer)

    def _forward(self, step: _Step) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]`, with the hooks called around and inside."""
        lifecycle = self.controller.lifecycle(step.batches)
        lifecycle.begin()
        hidden: Tensor = self.loaded.model(step.token_ids, step.positions, lifecycle)
        if lifecycle.end():
            raise NotImplementedError("replay")
        return hidden

    def _sample(self, step: _Step, hidden: Tensor) -> list[int | None]:
        """Draw for the rows that ask for it; one transfer of all tokens, and one of all log-probabilities."""
        tokens: list[int | None] = [None] * len(step.works)
        if not step.draws:
            return tokens
        works = [_drawing(step.works[index], i) for index, i in step.draws]
        logits = self.loaded.model.logits(hidden[step.ends])
        drawn = sample(logits, works)
        score(logits, drawn, works)
        for (index, i), work, token in zip(step.draws, works, drawn.tolist(), strict=True):
            if i:
                step.works[index].later.append((token, work.score))
            else:
                tokens[step.order[index]] = token
        return tokens


def _drawing(work: RowWork, i: int) -> RowWork:
    """What the draw behind a row's i-th guess goes by: everything but the guess's number is the row's."""
    return replace(work, step=work.step + i, score=None) if i else work


def _spans(works: Sequence[RowWork]) -> tuple[RowSpan, ...]:
    """Host facts of the rows of one device batch; a row's prompt ends where its first draw is made."""
    ends = accumulate(len(work.tokens) for work in works)
    return tuple(
        RowSpan(
            row=work.row,
            start=end - len(work.tokens),
            end=end,
            position=work.position,
            kv_len=work.slot + len(work.tokens),
            prompt_end=work.sample and work.step == 0,
            seq_id=work.seq_id,
        )
        for work, end in zip(works, ends, strict=True)
    )
