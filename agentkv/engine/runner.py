"""The device side of a step: a batch in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from agentkv.engine.attention_flashinfer import FlashInferDecode, Heads
from agentkv.engine.core import Batch, EngineConfig, RowWork
from agentkv.engine.devices import cpu_kernels
from agentkv.engine.form import Form
from agentkv.engine.forms import query_window, serve, widths
from agentkv.engine.graphs import CudaDevice, Graphs
from agentkv.engine.limits import Limits
from agentkv.engine.loader import LoadedModel
from agentkv.engine.logprobs import NOBODY, Scored, score
from agentkv.engine.pages import KVPages
from agentkv.engine.query_window import QueryWindow
from agentkv.engine.runner_protocol import Launched
from agentkv.engine.sampler import sample
from agentkv.engine.sealed_pages import SealedUnits
from agentkv.engine.sealing import PagedSealJob, prune, write_kept
from agentkv.engine.sparse import SparseController, SparseMethod
from agentkv.engine.step import Plan, Stage, Step
from agentkv.engine.work import PageWork, SealWork, Slot
from agentkv.errors import EngineFault
from agentkv.kernels.send import Fetched

_FEW_TOKENS = 16
_FEW_BYTES = 128 << 20
"""A CPU step of at most so many tokens, weights and KV bytes runs on one thread: more would wait for one another about as
long as they save, and where other processes share the cores, many times as long."""


class ModelRunner:
    """Runs one model with one or several methods over the KV arena it owns: a `runner_protocol.Runner`, used by one thread.

    methods: in the order of `forms`. prefill: by method another that selects and views while prompts are read; None is the same
    method. graphs: of decode steps; None: those of a GPU where `config.graphs`, else none. BadRequest where a method does not
    serve the model or stands there twice, and where `config.attention` names a library that cannot be used.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        methods: SparseMethod | Sequence[SparseMethod],
        *,
        prefill: SparseMethod | Sequence[SparseMethod | None] | None = None,
        graphs: Graphs[tuple[Limits, ...]] | None = None,
    ) -> None:
        self.loaded = loaded
        self.config = config
        methods = (methods,) if isinstance(methods, SparseMethod) else tuple(methods)
        readers = (prefill,) if prefill is None or isinstance(prefill, SparseMethod) else tuple(prefill)
        self.groups, self.served = serve(loaded, config, methods, readers)
        self.forms: tuple[Form, ...] = tuple(served.form for served in self.served)
        self.pages = KVPages(self.groups, config, loaded.device, loaded.dtype, widths(self.groups, self.forms, config))
        self.num_granules = self.pages.num_granules
        self.vocab_size = loaded.config.vocab_size
        self.controller = SparseController(methods, readers)
        self._weight_bytes = loaded.weight_bytes
        owner = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        group_of = tuple(owner[layer] for layer in range(len(owner)))
        sealed = tuple(SealedUnits(self.pages, served) if served.layout else None for served in self.served)
        size = query_window(methods)
        window = QueryWindow(config.max_rows, self.served[0].shape, size, loaded.device) if size else None
        fed = torch.zeros(config.max_rows, dtype=torch.int64, device=loaded.device)
        library = FlashInferDecode(Heads.of(loaded, config.page_size)) if config.attention == "flashinfer" else None
        self._stage = Stage(self.pages, self.served, group_of, sealed, window, fed, library)
        self.ahead = loaded.device.type == "cuda"
        if graphs is None and config.graphs and loaded.device.type == "cuda":
            graphs = Graphs(CudaDevice(loaded.device))
        self.graphs = graphs
        if loaded.device.type == "cpu":
            cpu_kernels()  # built now, not in the first step

    def execute(self, batch: Batch) -> list[int | None]:
        """Forward the batch; for each row the (first) sampled token id, None where `sample` is False, -1 where a mask allows
        none."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch, after: Launched | None = None) -> StepDrawn:
        """Queue the same on the device. after: what `launch` gave for the step before it, whose draws are the tokens of rows
        that follow it."""
        self.pages.update_tables(batch.table_updates)
        if not batch.rows:
            return StepDrawn(batch)
        with self._threads(batch):
            graphs = self.graphs if self._replayable(batch) else None
            drawn = after.by_row if isinstance(after, StepDrawn) else {}
            plan = self._stage.plan(batch, graphs.buckets if graphs else None, drawn)

            def scores(sent: Tensor) -> tuple[Tensor, ...]:
                return self._scores(plan.build(sent))

            values = plan.packed.values
            if graphs is None:
                logits, likeliest = scores(self.pages.send(values))
            else:
                logits, likeliest = graphs.run(plan.limits, values, scores, rare=any(each.tokens for each in plan.limits))
            return self._drawn(batch, plan, logits, likeliest)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Forward the batch without sampling: logits of every token `[num_tokens, vocab_size]`, in the batch's order."""
        self.pages.update_tables(batch.table_updates)
        plan = self._stage.plan(batch)
        scores = self.loaded.model.logits(self.forward(plan.build(self.pages.send(plan.packed.values))))
        by_row = dict(zip(plan.order, torch.split(scores, [len(work.tokens) for work in plan.works]), strict=True))
        return torch.cat([by_row[index] for index in range(len(batch.rows))])

    @torch.inference_mode()
    def move_slots(self, source: list[Slot], target: list[Slot], group: int = 0) -> None:
        """Copy K and V of the group's layers from slot to slot; the two sets may overlap."""
        self.pages.move(source, target, group)

    @torch.inference_mode()
    def move_units(self, unit_bytes: int, source: list[int], target: list[int]) -> None:
        """Copy whole units from granule to granule, in order; see `runner_protocol.Runner`."""
        self.pages.move_units(unit_bytes, source, target)

    @torch.inference_mode()
    def seal(self, work: SealWork) -> int:
        """Write a sequence's new sealed part; most slots that it has in a layer and head. Only a prune waits for the device."""
        served, units = self.served[work.form], self._stage.sealed[work.form]
        job = PagedSealJob(self.pages, served, units, self._stage.window, work)
        if work.seal is None:
            if units is not None:
                return prune(self.pages, served, units, job) if job.num_old else 0
            if job.num_old:
                served.method.prune(job)
            return work.held.slots
        if work.seal.slots and work.seal.keeps != work.seal.units:  # otherwise the tail is trimmed, and that is all
            kept = served.method.seal(job)
            if units is not None:
                if kept is None:
                    raise EngineFault(f"{served.method.fingerprint} did not say what its seal keeps")
                write_kept(self.pages, served, units, job, kept)
        if work.row is not None and self._stage.window is not None:
            self._stage.window.forget(work.row)
        return work.seal.slots

    @torch.inference_mode()
    def refresh(self, work: PageWork) -> None:
        """Make the page state of full pages anew."""
        served = self.served[work.form]
        units = dict(zip(served.form.groups, work.units, strict=True))
        if served.page_states and units[0]:
            into = {name: self.pages.send(units[served.tail[name]]) for name in served.page_states}
            served.method.on_pages(self._stage.fill(work.form, self.pages.send(units[0]), into))

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
        before = torch.get_num_threads()
        if self.loaded.device.type != "cpu" or before == 1 or not self._small(batch):
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _small(self, batch: Batch) -> bool:
        held = sum(
            (min(work.slot, self.groups[index].window or work.slot) + len(work.tokens)) * self.groups[index].token_bytes
            for work in batch.rows
            for index in self.forms[work.form].groups
        )
        return batch.num_tokens <= _FEW_TOKENS and self._weight_bytes + held <= _FEW_BYTES

    def prepare(self, batch: Batch) -> Step:
        """Order the rows and carry the step's integers to the device."""
        return self._stage.step(batch)

    def forward(self, step: Step) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]`, with the hooks called around and inside."""
        lifecycle = self.controller.lifecycle(step.batches)
        lifecycle.begin()
        hidden: Tensor = self.loaded.model(step.token_ids, step.positions, lifecycle)
        lifecycle.end()
        return hidden

    def _scores(self, step: Step) -> tuple[Tensor, ...]:
        """Logits `[num_draws, vocab_size]` behind each draw's token, and where each line's largest is, int64 `[num_draws]`."""
        logits: Tensor = self.loaded.model.logits(self.forward(step)[step.ends])
        return logits, logits.argmax(dim=-1)

    def _replayable(self, batch: Batch) -> bool:
        """Is it a step of few enough tokens, that draw or are of short chunks, of methods whose hooks can be replayed?"""
        if self.graphs is None or any(work.replay for work in batch.rows):
            return False
        decodes, chunks = ([work for work in batch.rows if work.decodes is which] for which in (True, False))
        buckets = self.graphs.buckets
        if not buckets.short(chunks) or sum(len(work.tokens) for work in decodes) > buckets.rows[-1]:
            return False
        if not all(work.sample and self.served[work.form].replayable for work in decodes):
            return False
        return all(self.served[work.form].extendable and not self.controller.read_by_others(work.form) for work in chunks)

    def _drawn(self, batch: Batch, plan: Plan, logits: Tensor, likeliest: Tensor) -> StepDrawn:
        """Draw for the rows that ask for it; one transfer of all tokens, and one of all log-probabilities."""
        count = len(plan.draws)
        if not count:
            return StepDrawn(batch)
        works = [_drawing(plan.works[index], i) for index, i in plan.draws]
        drawn = sample(logits[:count], works, likeliest[:count])
        if count <= len(self._stage.fed):
            self._stage.fed[:count] = drawn
        return StepDrawn(batch, plan, works, Fetched(drawn), score(logits[:count], drawn, works))


class StepDrawn:
    """What a step drew, on its way to the host. Implements `core.Launched`. by_row: which of the draws is a row's first."""

    def __init__(
        self,
        batch: Batch,
        plan: Plan | None = None,
        works: Sequence[RowWork] = (),
        drawn: Fetched | None = None,
        scored: Scored = NOBODY,
    ) -> None:
        self._batch, self._plan, self._works, self._drawn, self._scored = batch, plan, works, drawn, scored
        draws = plan.draws if plan is not None else ()
        self.by_row = {work.row: number for number, (work, (_, i)) in enumerate(zip(works, draws, strict=True)) if not i}

    def wait(self) -> list[int | None]:
        """See `core.Launched`."""
        tokens: list[int | None] = [None] * len(self._batch.rows)
        if self._plan is None or self._drawn is None:
            return tokens
        self._scored.tell()
        plan = self._plan
        for (index, i), work, token in zip(plan.draws, self._works, self._drawn.tolist(), strict=True):
            if i:
                plan.works[index].later.append((token, work.score))
            else:
                tokens[plan.order[index]] = token
        return tokens


def _drawing(work: RowWork, i: int) -> RowWork:
    """What the draw behind a row's i-th guess goes by: everything but the guess's number is the row's."""
    return replace(work, step=work.step + i, score=None) if i else work
