"""How large the KV arena can be beside the weights and one step: found by running the largest steps before anybody waits.

Everything that enters is the same at every start of a model on a machine, or is rounded up, so two starts give the same number
of pages.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from agentkv.engine.attention_flashinfer import WORKSPACE
from agentkv.engine.core import EngineConfig, Group, Request, Sequence
from agentkv.engine.devices import usable_memory
from agentkv.engine.drawn_runner import DrawnRunner
from agentkv.engine.forms import model_shape, serve
from agentkv.engine.graphs import MOST_GRAPHS
from agentkv.engine.limits import DEFAULT
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.query_window import QueryWindow
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import BadModel
from agentkv.types import Sampling

log = logging.getLogger(__name__)

CPU_SHARE, GPU_SHARE = 0.25, 0.9
"""Of what weights and a step leave, the arena's part. A CPU's memory is shared with other programs."""

STEP_ROUND = 16 << 20
ARENA_ROUND = 64 << 20

GRAPH_BYTES = 4 << 20
"""Of the device for one captured step, beside the numbers that it computes: its launches and their arguments. On an H200 a step
of 36 layers took 1.1 to 1.8 MiB."""


class Peak:
    """bytes: most that was allocated at once beyond what there was at the start."""

    def __init__(self) -> None:
        self.bytes = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. usable: what the device has for this process; step: the largest step's peak; graphs: of captured steps, 0 where
    none are; window: KV of one full window; library: what a library's kernels work in, where `config.attention` names one."""

    usable: int
    weights: int
    step: int
    graphs: int
    arena: int
    window: int
    library: int = 0


def groups_of(loaded: LoadedModel, config: EngineConfig, method: SparseMethod) -> tuple[Group, ...]:
    """What a sequence has page tables of: the model's KV and the method's state. BadRequest for a method that does not serve
    the model."""
    return serve(loaded, config, (method,))[0]


def plan_memory(loaded: LoadedModel, config: EngineConfig, method: SparseMethod, step: int | None = None) -> MemoryPlan:
    """The arena for this model and method; `config.memory` is not read. step: what `measure_step` gave, None to measure now.
    BadModel, with the numbers, where there is none."""
    share = CPU_SHARE if loaded.device.type == "cpu" else GPU_SHARE
    stripe = sum(group.stripe_bytes for group in groups_of(loaded, config, method))
    window = _held_bytes(loaded, config, method, config.window)
    usable, weights = usable_memory(loaded.device), loaded.weight_bytes
    step = measure_step(loaded, config, method) if step is None else step
    graphs, library = graph_bytes(loaded, config, step), library_bytes(config)
    arena = max(0, int((usable - weights - step - graphs - library) * share))
    arena -= arena % min(ARENA_ROUND, max(stripe, arena))
    plan = MemoryPlan(usable, weights, step, graphs, arena, window, library)
    log.info("memory plan on %s: %s", loaded.device, plan)
    if not arena:
        raise BadModel(
            f"no room for KV on {loaded.device}: weights take {gib(weights)} and a step {gib(step + graphs)} of {gib(usable)}",
            hint="Take a smaller model or dtype, or a device with more memory",
        )
    if arena < window:
        raise BadModel(
            f"one window of {config.window:,} tokens needs {gib(window)} of KV; weights ({gib(weights)}) and a step "
            f"({gib(step + graphs)}) leave {gib(arena)} of {gib(usable)} for it",
            hint=f"Open it with window={arena // stripe * config.page_size} or less, or say how much memory= it may take",
        )
    return plan


def library_bytes(config: EngineConfig) -> int:
    """What a library's kernels work in."""
    return WORKSPACE if config.attention == "flashinfer" else 0


def graph_bytes(loaded: LoadedModel, config: EngineConfig, step: int) -> int:
    """What captured steps may take: as many graphs as are kept, and the pool that they share for what they compute, by its
    share of the largest step's tokens."""
    if not config.graphs or loaded.device.type != "cuda":
        return 0
    most = min(config.step_tokens, DEFAULT.rows[-1] + DEFAULT.tokens[-1])
    return step * most // config.step_tokens + MOST_GRAPHS * GRAPH_BYTES


def measure_step(loaded: LoadedModel, config: EngineConfig, method: SparseMethod) -> int:
    """Bytes that the largest steps take beside weights and KV: `step_tokens` tokens, over all rows or in one, every row drawing
    in the dearest way, and the queries that are kept for seals. On a GPU also the last step of a prompt that fills the window,
    and its seal, where there is room for one. Raises BadModel where they do not fit."""
    each = max(1, min(config.step_tokens // config.max_rows, config.window - 1))
    one = min(config.step_tokens, config.window - 1)
    queries = QueryWindow.bytes(config.max_rows, model_shape(loaded, config.page_size), method.needs.query_window)
    step = max(_tried(_first_step, loaded, config, method, lengths) for lengths in ([each] * config.max_rows, [one]))
    if loaded.device.type == "cuda" and config.window - 1 > one:
        room = usable_memory(loaded.device) - loaded.weight_bytes - queries - step
        if _held_bytes(loaded, config, method, last_length(config)) <= room:
            step = max(step, _tried(last_step, loaded, config, method))
    return queries + step


def _tried(trial: Callable[..., int], loaded: LoadedModel, *given: Any) -> int:
    """What a trial finds, rounded. Its engine goes at once: a cycle of objects would keep its arena beside the next one."""
    found, fault = 0, None
    try:
        found = trial(loaded, *given)
    except BadModel as error:
        fault = error.with_traceback(None)  # whose frames hold the engine
    gc.collect()
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    if fault is not None:
        raise fault
    return -(-found // STEP_ROUND) * STEP_ROUND


def _first_step(loaded: LoadedModel, config: EngineConfig, method: SparseMethod, lengths: list[int]) -> int:
    """Bytes beside KV of a step that reads prompts of these lengths whole."""
    llm = _trial(loaded, config, method, lengths, ModelRunner)
    sampling = Sampling(max_tokens=1, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    for length in lengths:
        llm.add(Request(token_ids=[0] * length, sampling=sampling))
    with measured(loaded.device) as peak:
        outputs = llm.step()
    _check([output.seq for output in outputs], loaded, sum(lengths))
    return peak.bytes


def last_step(loaded: LoadedModel, config: EngineConfig, method: SparseMethod) -> int:
    """Bytes beside KV of the last `step_tokens` of a prompt that fills the window (or the next multiple of so many), and of its
    seal: they grow with what stands before them, which is drawn, as are prompts that a method replays. 0 for a method that
    cannot go on from drawn KV. BadModel as in `measure_step`."""
    length = last_length(config)
    llm = _trial(loaded, replace(config, window=length + 1), method, [length], DrawnRunner)
    runner = llm.runner
    assert isinstance(runner, DrawnRunner)
    runner.ahead = False  # a step that was launched ahead would still be drawn
    sequence = llm.add(Request(token_ids=[0] * length, sampling=Sampling(max_tokens=1, temperature=0.0)))
    while sequence.num_forwarded + config.step_tokens < length and sequence.fault is None:
        llm.step()
    if sequence.fault is not None and not isinstance(sequence.fault.__cause__, torch.OutOfMemoryError):
        log.warning("no prompt of a whole window was tried: %s", sequence.fault)
        return 0
    _check([sequence], loaded, config.step_tokens)
    with measured(loaded.device) as peak:
        runner.drawn = "nothing"
        llm.step()
        runner.drawn = "all"
        while llm.has_work:
            llm.step()
    _check([sequence], loaded, config.step_tokens)
    return peak.bytes


def last_length(config: EngineConfig) -> int:
    """Tokens of a prompt in whole steps, no shorter than the window has room for."""
    return -(-(config.window - 1) // config.step_tokens) * config.step_tokens


def _trial(
    loaded: LoadedModel, config: EngineConfig, method: SparseMethod, lengths: list[int], runner: type[ModelRunner]
) -> LLM:
    """An engine with memory for prompts of these lengths."""
    memory = sum(_held_bytes(loaded, config, method, length) for length in lengths)
    config = replace(config, memory=memory, attention="triton", graphs=False)  # no library's kernels read prompts
    return LLM(config, runner(loaded, config, method), reuse="chain")


def _check(sequences: list[Sequence], loaded: LoadedModel, tokens: int) -> None:
    faults = [sequence.fault for sequence in sequences if sequence.fault is not None]
    if faults:
        raise BadModel(
            f"a step of {tokens} tokens cannot run beside the weights ({gib(loaded.weight_bytes)}) on {loaded.device}: "
            f"{str(faults[0]).splitlines()[0]}",
            hint="Open it with a smaller window, take a smaller model or dtype, or a device with more memory",
        )


@contextmanager
def measured(device: torch.device) -> Iterator[Peak]:
    """Measure what runs inside. On a GPU torch's allocator counts; on a CPU the tensors that operations return are counted, so
    what a kernel takes for itself and gives back is not."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
    else:
        with _Live(peak):
            yield peak


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, while they live."""

    def __init__(self, peak: Peak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peak = peak
        self._live: dict[int, int] = {}
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; what it returns and was not given is new."""
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                self._bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self._peak.bytes = max(self._peak.bytes, self._bytes)
        return result

    def _gone(self, key: int) -> None:
        self._bytes -= self._live.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _held_bytes(loaded: LoadedModel, config: EngineConfig, method: SparseMethod, length: int) -> int:
    """Most bytes that a sequence of so many tokens holds while its prompt is read and sealed."""
    groups, (served,) = serve(loaded, config, (method,))
    form = served.form
    reached = {index: _reach(groups[index], config, length + form.replay_most(length)) for index in form.groups}
    units = {index: -(-reach // groups[index].page_size) for index, reach in reached.items()}
    if form.bound is not None:  # a tail begins and ends inside a page
        bound = form.bound(length, length)
        units = {index: max(count, -(-bound.tail // groups[index].page_size) + 2) for index, count in units.items()}
        units.update(zip(form.sealed, bound.units, strict=True))
    least = sum(group.stripe_bytes for group in groups)  # of any arena
    return max(least, sum(groups[index].stripe_bytes * count for index, count in units.items()))


def _reach(group: Group, config: EngineConfig, length: int) -> int:
    """Most tokens that a sequence of so many holds in the group."""
    return length if group.window is None else min(length, group.window + group.slack + config.step_tokens + config.page_size)


def gib(size: int) -> str:
    """A size for people."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
