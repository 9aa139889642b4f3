"""Prompts that a whole engine reads, chunk by chunk, seals included, one at a time."""

# mypy: disable-error-code="no-untyped-call"
# (torch's events)

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from agentkv.bench.device_times import synchronize
from agentkv.bench.injected import PAGE, peak_bytes
from agentkv.engine.core import GRANULE, EngineConfig, Request
from agentkv.engine.core import Sequence as EngineSequence
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import EngineFault
from agentkv.types import Sampling


class Taken(NamedTuple):
    """Microseconds of one prompt until its first token is drawn and its seal is done: by the clock, and of its steps on the
    device, see `Reading.step`. prefilled: tokens that were forwarded. ids: prompt and the token that was drawn."""

    us: float
    device_us: float
    prefilled: int
    ids: list[int]


class Reading:
    """An engine with room for one sequence of so many tokens (and `share` times that much), which reads `chunk` a step."""

    def __init__(self, loaded: LoadedModel, method: SparseMethod, length: int, chunk: int, *, share: int = 1) -> None:
        self.device = loaded.device
        config = EngineConfig(1, length + PAGE, page_size=PAGE, max_rows=1, step_tokens=chunk)
        most = peak_bytes(loaded, config, (method,), 0, length, length + 1) * share
        config = replace(config, memory=most * 21 // 20 // GRANULE * GRANULE + GRANULE)
        self.runner = ModelRunner(loaded, config, method)
        self.llm = LLM(config, self.runner, reuse="chain")

    def read(self, token_ids: Sequence[int], chain: str | None = None) -> Taken:
        """Read a prompt and draw one token. chain: to go on from, and to be left behind; None leaves nothing behind."""
        synchronize(self.device)
        began = time.perf_counter()
        sequence, steps = self.add(token_ids, chain), list[Callable[[], float]]()
        while self.llm.has_work:
            steps.append(self.step())
        synchronize(self.device)
        us, device_us = (time.perf_counter() - began) * 1e6, sum(step() for step in steps)
        prefilled = sequence.num_prefilled_tokens
        return Taken(us, device_us, prefilled, self.end(sequence, chain))

    def add(self, token_ids: Sequence[int], chain: str | None = None) -> EngineSequence:
        """A prompt that `step` reads; `end` it before the next one."""
        return self.llm.add(Request(list(token_ids), Sampling(temperature=0.0, max_tokens=1), chain_id=chain))

    def step(self) -> Callable[[], float]:
        """Forward one chunk, the seal behind it included. What is returned says, once the device is done, its microseconds
        between two events there (on a CPU by the clock)."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if self.device.type == "cuda" else []
        began = time.perf_counter()
        if marks:
            marks[0].record()
        self.llm.step()
        us = (time.perf_counter() - began) * 1e6
        if marks:
            marks[1].record()
        return lambda: marks[0].elapsed_time(marks[1]) * 1e3 if marks else us

    def end(self, sequence: EngineSequence, chain: str | None = None) -> list[int]:
        """Its token ids, the drawn one included; what it held is left to the chain, or given back. EngineFault if it failed."""
        if sequence.fault is not None:
            raise EngineFault(f"a prompt could not be read: {sequence.fault}")
        ids = list(sequence.token_ids)
        if chain is None:
            self.llm.abort(sequence)
        else:
            self.llm.commit(sequence, ids[sequence.num_prompt_tokens :])
        return ids
