"""Sequences whose prompts were not computed: their keys, values and queries are drawn, and all else is the engine's own.

What a decode step at 128K takes does not hang on what the keys say, and reading so many prompts would cost minutes. So the
host side is an `LLM` as it is (admission, accounts, tables, seals), and on the device every hook of the method runs; only the
model's layers are left out, in prompts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from agentkv.bench.shapes import random_prompts
from agentkv.engine.cache.pools import KVPools
from agentkv.engine.core import GRANULE, Batch, EngineConfig, Request
from agentkv.engine.core import Sequence as EngineSequence
from agentkv.engine.drawn_runner import DrawnRunner
from agentkv.engine.form import Held
from agentkv.engine.forms import serve
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.oracle import cost
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import Capacity, EngineFault
from agentkv.kernels.move_units import unit_rows
from agentkv.types import Sampling

PAGE = 16
_AT_ONCE = 128 << 10
"""Tokens of prompts that are drawn in one step, where none is longer."""
_SWAPPED = 256 << 20
"""Most bytes of units that lie beside the arena while two change places."""


class Injected:
    """An engine whose sequences each hold a prompt of so many tokens, sealed where the method seals, pages in random order, and
    decode. `llm.step()` is a decode step of all of them; `batch` is the last one, to be executed again."""

    def __init__(self, llm: LLM, runner: DrawnRunner, sequences: Sequence[EngineSequence]) -> None:
        self.llm, self.runner, self.sequences = llm, runner, tuple(sequences)

    @property
    def batch(self) -> Batch:
        """The last decode step. Executing it again writes the same slots; what a method counts in steps goes on."""
        return self.runner.last


class DrawnEngine(NamedTuple):
    """An engine that draws prompts, and the requests that it has room for, none of them begun."""

    llm: LLM
    runner: DrawnRunner
    requests: list[Request]


def drawn_engine(
    loaded: LoadedModel,
    methods: SparseMethod | Sequence[SparseMethod],
    lengths: Sequence[int],
    *,
    forms: Sequence[int] = (),
    new_tokens: int = 64,
    memory: int | None = None,
) -> DrawnEngine:
    """For prompts of these lengths, in tokens, each of which may decode `new_tokens` when all have been read; see `inject`."""
    methods = (methods,) if isinstance(methods, SparseMethod) else tuple(methods)
    forms = tuple(forms) or (0,) * len(lengths)
    spare = sum(_steps(methods[form], length) for form, length in zip(forms, lengths, strict=True))
    most = max(lengths) + new_tokens + spare
    step = max(max(lengths), min(sum(lengths), _AT_ONCE)) + len(lengths)
    config = EngineConfig(memory or 1, most + 1, page_size=PAGE, max_rows=len(lengths), step_tokens=step)
    if memory is None:
        peaks = (peak_bytes(loaded, config, methods, form, length, most) for form, length in zip(forms, lengths, strict=True))
        config = replace(config, memory=sum(peaks) * 21 // 20 // GRANULE * GRANULE + GRANULE)
    runner = DrawnRunner(loaded, config, methods)
    prompts = random_prompts(len(lengths), max(lengths), runner.vocab_size, seed=0)
    sampling = Sampling(temperature=0.0, max_tokens=new_tokens + spare)
    rows = zip(prompts, lengths, forms, strict=True)
    requests = [Request(prompt[:length], sampling, form=form) for prompt, length, form in rows]
    return DrawnEngine(LLM(config, runner, reuse="chain"), runner, requests)


def inject(
    loaded: LoadedModel,
    methods: SparseMethod | Sequence[SparseMethod],
    lengths: Sequence[int],
    *,
    forms: Sequence[int] = (),
    new_tokens: int = 64,
    memory: int | None = None,
    shuffle: bool = True,
) -> Injected:
    """Rows that hold prompts of these lengths, in tokens, and have decoded one step; all may decode `new_tokens` in all.

    methods: one or several; forms: for each row the index of its method, () is the first. memory: bytes of the arena, None for
    what all rows take at their peaks, and a twentieth more; where it is given, prompts enter one after another, as memory for
    the sealed may lack for the peaks of all. shuffle: pages in random order. Rows decode from the end of their own prompts on,
    so the first are a few tokens longer by the time that the last is read. Capacity where one finds no room.
    """
    llm, runner, requests = drawn_engine(loaded, methods, lengths, forms=forms, new_tokens=new_tokens, memory=memory)
    runner.ahead = False  # a step that was launched ahead cannot be executed again
    sequences = []
    for together in [requests] if memory is None else [[request] for request in requests]:
        sequences += [llm.add(request) for request in together]
        read_prompts(llm, sequences)
    if shuffle:
        shuffle_units(llm, runner)
    llm.step()
    return Injected(llm, runner, sequences)


def peak_bytes(
    loaded: LoadedModel, config: EngineConfig, methods: Sequence[SparseMethod], form: int, prompt: int, tokens: int
) -> int:
    """Most bytes that a sequence of so many tokens holds at once, its prompt's reading and sealing included: what the engine
    sets aside before it starts. form: which of the methods it has."""
    groups, served = serve(loaded, config, methods)
    pools = KVPools.over(1 << 31, groups, [each.form for each in served])
    return pools.bytes(cost(pools, config.step_tokens, None, (), tokens, form=served[form].form, prompt=prompt).peak)


def shuffle_units(llm: LLM, runner: ModelRunner, seed: int = 0) -> None:
    """Every unit of the arena changes its place with another of its class, drawn at random; the accounts follow, and the rows'
    tables with the next step."""
    llm.memory.settle()
    generator = torch.Generator().manual_seed(seed)
    for cls, follow in llm.arena.followers.items():
        units = torch.tensor(sorted(llm.arena.used_units(cls)), dtype=torch.int64)
        pairs = units[torch.randperm(len(units), generator=generator)][: len(units) // 2 * 2].view(-1, 2)
        if not len(pairs):
            continue
        rows = unit_rows(runner.pages.arena, cls.unit_bytes, GRANULE)
        for ones, others in (part.to(rows.device).unbind(1) for part in torch.split(pairs, max(1, _SWAPPED // cls.unit_bytes))):
            beside = rows[ones]
            rows[ones] = rows[others]
            rows[others] = beside
        follow(dict([*pairs.tolist(), *pairs.flip(1).tolist()]))
    llm.arena.compactions += 1  # the tables on the device are out of date


def _steps(method: SparseMethod, length: int) -> int:
    """Steps that a prompt of so many tokens may take, its replays included: others decode in them."""
    return 1 + (len(method.replay(Held(length, 0, length, 0, True), [0] * length)) if method.replay_most(length) else 0)


def read_prompts(llm: LLM, sequences: Sequence[EngineSequence]) -> None:
    """Step until their prompts have been read and sealed. Capacity where one finds no room, EngineFault where one fails."""
    while any(not sequence.num_generated or sequence.seal_at for sequence in sequences):
        llm.step()
        for sequence in sequences:
            if sequence.fault is not None:
                raise EngineFault(f"a drawn prompt could not be read: {sequence.fault}")
        if llm.scheduler.waiting:
            raise Capacity(
                f"{len(llm.scheduler.running)} sequences run; another has no room", hint="Give more memory or take fewer"
            )
