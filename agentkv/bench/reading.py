"""Prompts that a whole engine reads, chunk by chunk, seals included, one at a time."""

# mypy: disable-error-code="no-untyped-call"
# (torch's events)

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from agentkv.bench.device_times import synchronize
from agentkv.bench.injected import PAGE, peak_bytes
from agentkv.engine.core import GRANULE, EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import EngineFault
from agentkv.types import Sampling


class Taken(NamedTuple):
    """Microseconds of one prompt until its first token is drawn and its seal is done: by the clock, and between two events on
    the device (on a CPU the same). prefilled: tokens that were forwarded. ids: prompt and the token that was drawn."""

    us: float
    device_us: float
    prefilled: int
    ids: list[int]


class Reading:
    """An engine with room for one sequence of so many tokens (and `share` times that much), which reads `chunk` a step."""

    def __init__(self, loaded: LoadedModel, method: SparseMethod, length: int, chunk: int, *, share: int = 1) -> None:
        self._device = loaded.device
        config = EngineConfig(1, length + PAGE, page_size=PAGE, max_rows=1, step_tokens=chunk)
        most = peak_bytes(loaded, config, (method,), 0, length, length + 1) * share
        config = replace(config, memory=most * 21 // 20 // GRANULE * GRANULE + GRANULE)
        self.runner = ModelRunner(loaded, config, method)
        self.llm = LLM(config, self.runner, reuse="chain")

    def read(self, token_ids: Sequence[int], chain: str | None = None) -> Taken:
        """Read a prompt and draw one token. chain: to go on from, and to be left behind; None leaves nothing behind."""
        request = Request(list(token_ids), Sampling(temperature=0.0, max_tokens=1), chain_id=chain)
        synchronize(self._device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if self._device.type == "cuda" else []
        began = time.perf_counter()
        if marks:
            marks[0].record()
        sequence = self.llm.add(request)
        while self.llm.has_work:
            self.llm.step()
        if marks:
            marks[1].record()
        synchronize(self._device)
        us = (time.perf_counter() - began) * 1e6
        if sequence.fault is not None:
            raise EngineFault(f"a prompt could not be read: {sequence.fault}")
        ids, prefilled = list(sequence.token_ids), sequence.num_prefilled_tokens
        if chain is None:
            self.llm.abort(sequence)
        else:
            self.llm.commit(sequence, ids[len(token_ids) :])
        return Taken(us, marks[0].elapsed_time(marks[1]) * 1e3 if marks else us, prefilled, ids)
