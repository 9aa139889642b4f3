"""The device side of a step: a batch in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from agentkv.engine.core import Batch, EngineConfig, Group, RowWork, Slot, StateGroup
from agentkv.engine.devices import cpu_kernels
from agentkv.engine.loader import LoadedModel
from agentkv.engine.logprobs import score
from agentkv.engine.pages import KVPages
from agentkv.engine.sampler import sample
from agentkv.engine.sparse import SparseController, SparseMethod
from agentkv.engine.view import DeviceBatch, GroupRows, RowSpan, RowTable
from agentkv.errors import EngineFault

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
        states = tuple(spec.group(config.page_size) for spec in method.states)
        self.groups: tuple[Group, ...] = (*loaded.groups(config.page_size), *states)
        self.pages = KVPages(self.groups, config, loaded.device, loaded.dtype)
        self.num_granules = self.pages.num_granules
        self.vocab_size = loaded.config.vocab_size
        self.controller = SparseController(method, prefill)
        self._weight_bytes = loaded.weight_bytes
        owner = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self._group_of = tuple(owner[layer] for layer in range(len(owner)))
        kept = {group.name: index for index, group in enumerate(self.groups) if isinstance(group, StateGroup)}
        self._state_pages = {name: (self.pages.state(name), index) for name, index in kept.items()}
        if loaded.device.type == "cpu":
            cpu_kernels()  # built now, not in the first step

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[int | None]:
        """Forward the batch; for each row the (first) sampled token id, None where `sample` is False, -1 where a mask allows
        none."""
        self.pages.update_tables(batch.table_updates)
        if not batch.rows:
            return []
        with self._threads(batch):
            step = self._prepare(batch)
            hidden = self._forward(step)
            return self._sample(step, hidden)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Forward the batch without sampling: logits of every token `[num_tokens, vocab_size]`, in the batch's order."""
        self.pages.update_tables(batch.table_updates)
        step = self._prepare(batch)
        scores = self.loaded.model.logits(self._forward(step))
        by_row = dict(zip(step.order, torch.split(scores, [len(work.tokens) for work in step.works]), strict=True))
        return torch.cat([by_row[index] for index in range(len(batch.rows))])

    @torch.inference_mode()
    def move_slots(self, source: list[Slot], target: list[Slot], group: int = 0) -> None:
        """Copy K and V of the group's layers from slot to slot; the two sets may overlap."""
        self.pages.move(source, target, group)

    @torch.inference_mode()
    def move_units(self, unit_bytes: int, source: list[int], target: list[int]) -> None:
        """Copy whole units from granule to granule, in order; see `core.Runner`."""
        self.pages.move_units(unit_bytes, source, target)

    @torch.inference_mode()
    def read_units(self, unit_bytes: int, units: list[int]) -> memoryview:
        """The bytes of units, one after another, in host memory."""
        return self.pages.read_units(unit_bytes, units)

    @torch.inference_mode()
    def write_units(self, unit_bytes: int, units: list[int], data: memoryview) -> None:
        """Put such bytes into units."""
        self.pages.write_units(unit_bytes, units, data)

    @contextmanager
    def _threads(self, batch: Batch) -> Iterator[None]:
        """One thread for a small step on the CPU; the process's setting is restored."""
        held = sum(
            min(work.slot, group.window or work.slot) + len(work.tokens) for work in batch.rows for group in self.groups
        ) * max(group.token_bytes for group in self.groups)
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
        owners = [work.row for work in works for _ in work.tokens]
        rows = [work.row for work in works]
        draws = tuple((index, i) for index, work in enumerate(works) if work.sample for i in range(work.drafted + 1))
        stops = list(accumulate(counts))
        ends = [stops[index] - 1 - works[index].drafted + i for index, i in draws]
        lists = [token_ids, positions, owners, rows, ends]
        for index in range(len(self.groups)):
            slots = [work.slot_in(index) + i for work in works for i in range(len(work.tokens))]
            lens = [work.slot_in(index) + len(work.tokens) for work in works]
            lists += [slots, lens, list(chain(*(self._starts(work, index) for work in works)))]
        packed = torch.tensor([value for each in lists for value in each], dtype=torch.int64).to(self.loaded.device)
        token_ids_, positions_, owners_, rows_, ends_, *rest = torch.split(packed, [len(each) for each in lists])

        num_decodes = sum(work.decodes for work in works)
        decoded = sum(counts[:num_decodes])
        batches = []
        for prefill, first, last in ((False, 0, num_decodes), (True, num_decodes, len(works))):
            if first < last:
                spans = _spans(works[first:last])
                start = decoded if prefill else 0
                tokens, lines = slice(start, start + spans[-1].end), slice(first, last)
                groups = []
                for index in range(len(self.groups)):
                    slots_, lens_, starts_ = rest[3 * index : 3 * index + 3]
                    device = (owners_[tokens], slots_[tokens], rows_[lines], lens_[lines], starts_[tokens])
                    groups.append(self._group_rows(index, works[first:last], device))
                batch_ = DeviceBatch(
                    spans,
                    tokens,
                    prefill,
                    positions_[tokens],
                    tuple(groups),
                    self._group_of,
                    self.pages.layer,
                    self._state_pages,
                )
                batches.append(batch_)
        return _Step(works, tuple(order), token_ids_, positions_, tuple(batches), draws, ends_)

    def _group_rows(self, index: int, works: Sequence[RowWork], device: tuple[Tensor, ...]) -> GroupRows:
        """The rows of one phase in one group. device: rows and slots of their tokens, lines, lengths, first visible slots."""
        owners, slots, rows, lens, starts = device
        group, table = self.groups[index], self.pages.tables[index]
        windowed = group.window is not None
        held = RowTable(
            entries=table,
            rows=rows,
            lens=lens.to(torch.int32),
            host_rows=tuple(work.row for work in works),
            host_lens=tuple(work.slot_in(index) + len(work.tokens) for work in works),
            page_size=group.page_size,
            starts=starts.to(torch.int32) if windowed else None,
            host_starts=tuple(self._starts(work, index) for work in works) if windowed else (),
        )
        return GroupRows(held, table[owners, slots // group.page_size].to(torch.int64), slots % group.page_size)

    def _starts(self, work: RowWork, index: int) -> tuple[int, ...]:
        """First slot that each of the row's tokens sees in a window group; () in others. EngineFault where it is not told."""
        window = self.groups[index].window
        if window is None:
            return ()
        reach = work.reaches[index] if work.reaches else None
        if reach is not None:
            return reach.first
        if work.slot != work.position:
            raise EngineFault(
                f"row {work.row} has holes that the batch does not name: {work.slot} slots at position {work.position}"
            )
        return tuple(max(0, work.slot + i - window + 1) for i in range(len(work.tokens)))

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
