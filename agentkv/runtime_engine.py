"""Opening a model: from a directory to an engine with its thread, and what memory it will take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentkv import methods as known
from agentkv.engine.checkpoint import find_gguf
from agentkv.engine.core import EngineConfig
from agentkv.engine.devices import (
    free_host_memory,
    usable_device,
    usable_memory,
)
from agentkv.engine.graphs import Graphs
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.lookup import MOST_QUERIES
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sizing import plan_memory
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.threads import EngineThreads
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.worker import EngineWorker
from agentkv.errors import BadRequest
from agentkv.runtime_attention import choose
from agentkv.runtime_backend import EngineBackend
from agentkv.types import check_timeout

BUNDLED = ("micro",)
LOOKUP = 8
CPU_MOST = 1 << 30
CPU_SHARE, WARM_SHARE = 0.25, 0.25
STEP_TIMEOUT = 300.0
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Engine:
    """A loaded model behind its engine: what a `Runtime` owns. backends: by name of the methods that sessions may have; backend
    is that of the first. graphs: of decode steps, None where there are none."""

    backend: EngineBackend
    backends: dict[str, EngineBackend]
    worker: EngineWorker
    config: EngineConfig
    method: SparseMethod
    method_name: str
    device: str
    graphs: Graphs[Any] | None = None


def open_engine(
    model: str | Path,
    *,
    method: str | SparseMethod = "dense",
    methods: Iterable[str | SparseMethod] = (),
    device: str = "auto",
    dtype: str = "auto",
    memory: int | str | None = None,
    window: int | None = None,
    page_size: int | None = None,
    warm_memory: int | str | None = None,
    step_timeout: float | None = None,
    lookup: int = LOOKUP,
    threads: int | None = None,
    graphs: bool = True,
    attention: str = "auto",
) -> Engine:
    """Load a model and start its engine. method: of sessions that name none; methods: others that they may name. attention: see
    `runtime_attention.choose`.

    Raises UnknownModel, BadModel, UnknownOption or BadRequest; nothing is left behind."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024):
        raise BadRequest(f"threads={threads!r}: 1 to 1,024, or None", param="threads")
    path = model_path(model)
    served = _methods([method, *methods])
    name, chosen = next(iter(served.items()))
    lookup = _checked_lookup(lookup) if any(each.truncates for each in served.values()) else 0
    tokenizer = Tokenizer.load(path)
    target = usable_device(device)
    loaded = load_model(path, device=target, dtype=dtype)
    tokenizer.check_fits(loaded.config.vocab_size)
    sizes = (memory, window, page_size, warm_memory, step_timeout)
    config = engine_config(loaded, *sizes, methods=served.values(), attention=attention, model=str(model))
    if not isinstance(graphs, bool):
        raise BadRequest(f"graphs={graphs!r}: True or False", param="graphs")
    config = replace(config, lookup=lookup, graphs=graphs)
    runner = ModelRunner(loaded, config, tuple(served.values()))
    llm = LLM(config, runner, tokenizer=tokenizer, fingerprint=_fingerprint(loaded, tokenizer, config))
    worker = EngineWorker(llm, EngineThreads(threads) if loaded.device.type == "cpu" else None)
    backend = EngineBackend(
        worker,
        tokenizer,
        model_name=str(model),
        fingerprint=_fingerprint(loaded, tokenizer, config, chosen),
        exactness=chosen.exactness,
        window=config.window,
        token_bytes=_token_bytes(runner, 0),
    )
    backends = {name: backend}
    for form, (other, each) in enumerate(list(served.items())[1:], start=1):
        fingerprint = _fingerprint(loaded, tokenizer, config, each)
        token_bytes = _token_bytes(runner, form)
        backends[other] = backend.of_form(form, fingerprint=fingerprint, exactness=each.exactness, token_bytes=token_bytes)
    return Engine(backend, backends, worker, config, chosen, name, str(loaded.device), runner.graphs)


def model_path(model: str | Path) -> Path:
    """Where a bundled model or a path lies: a directory, or a .gguf file. UnknownModel where nothing is there."""
    if str(model) in BUNDLED:
        return Path(__file__).resolve().parent / "data" / str(model)
    path = Path(model).expanduser()
    find_gguf(path)
    return path


def engine_config(
    loaded: LoadedModel,
    memory: int | str | None,
    window: int | None,
    page_size: int | None,
    warm_memory: int | str | None = None,
    step_timeout: float | None = None,
    *,
    methods: Iterable[SparseMethod],
    attention: str = "auto",
    model: str = "MODEL",
) -> EngineConfig:
    """Sizes for this model on its device; what is None is chosen. attention, model: see `runtime_attention.choose`.

    memory 'auto' runs the largest steps of each method and takes what they leave (BadModel where that is too little); None is
    the same on a GPU, and on a CPU a quarter of the machine's memory, at most 1 GiB, without a trial.
    """
    config = engine_sizes(loaded, memory, window, page_size, warm_memory, step_timeout)
    config = replace(config, attention=choose(attention, loaded, config.page_size, model).backend)
    return config if config.memory else replace(config, memory=min(plan_memory(loaded, config, each).arena for each in methods))


def engine_sizes(
    loaded: LoadedModel,
    memory: int | str | None,
    window: int | None,
    page_size: int | None,
    warm_memory: int | str | None = None,
    step_timeout: float | None = None,
) -> EngineConfig:
    """The same before a trial: memory 0 stands for what one would leave."""
    on_cpu = loaded.device.type == "cpu"
    for name, value in (("window", window), ("page_size", page_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadRequest(f"{name}={value!r}: an int", param=name)
    if window is not None and not 1 < window <= loaded.window:
        raise BadRequest(f"window={window}: 2 to the model's {loaded.window}", param="window")
    if page_size is not None and not 1 <= page_size <= 1024:
        raise BadRequest(f"page_size={page_size}: 1 to 1,024", param="page_size")
    check_timeout(step_timeout, "step_timeout")
    if memory is None:
        memory = min(CPU_MOST, int(usable_memory(loaded.device) * CPU_SHARE)) if on_cpu else "auto"
    auto = isinstance(memory, str) and memory.strip() == "auto"
    return EngineConfig(
        memory=0 if auto else parse_memory(memory),
        window=window or loaded.window,
        page_size=page_size or (128 if on_cpu else 16),
        max_rows=32 if on_cpu else 256,
        step_tokens=1024 if on_cpu else 8192,
        warm_memory=_warm_memory(loaded, warm_memory),
        step_timeout=step_timeout or STEP_TIMEOUT,
    )


def parse_memory(memory: int | str, *, param: str = "memory") -> int:
    """Bytes of 268435456, '268435456', '256MiB' or '1.5GB'. param: what to call it in a BadRequest."""
    text = str(memory).strip()
    number = text.rstrip("BKMGTi")
    unit = text[len(number) :] or "B"
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise BadRequest(f"{param}={memory!r}: bytes, like '2GiB' or '500MB', or 'auto'", param=param) from None
    if size < 1:
        raise BadRequest(f"{param}={memory!r}: must be positive", param=param)
    return size


def _warm_memory(loaded: LoadedModel, wanted: int | str | None) -> int:
    """Bytes of host memory for idle chains. The arena of a CPU engine is host memory already: nothing unless asked for."""
    if wanted is None:
        return 0 if loaded.device.type == "cpu" else int(free_host_memory() * WARM_SHARE)
    return 0 if str(wanted).strip() == "0" else parse_memory(wanted, param="warm_memory")


def _checked_lookup(lookup: int) -> int:
    if isinstance(lookup, bool) or not isinstance(lookup, int) or not 0 <= lookup <= MOST_QUERIES:
        raise BadRequest(f"lookup={lookup!r}: 0 to {MOST_QUERIES} tokens a step", hint="0 guesses nothing", param="lookup")
    return lookup


def _methods(given: Iterable[str | SparseMethod]) -> dict[str, SparseMethod]:
    """By what sessions call them: as they were written, instances by their class. BadRequest for a name that two have."""
    served: dict[str, SparseMethod] = {}
    for each in given:
        if not isinstance(each, str | SparseMethod):
            raise BadRequest(f"method {each!r}: a name, 'name:option=value' or an instance", param="methods")
        name = each if isinstance(each, str) else type(each).__name__.lower()
        if name in served:
            raise BadRequest(f"two methods are called {name!r}", hint="Write options: name:option=value", param="methods")
        served[name] = known.parse(each) if isinstance(each, str) else each
        known.check_types(served[name])
    return served


def _token_bytes(runner: ModelRunner, form: int) -> int:
    """Bytes of a token that was just forwarded."""
    return sum(runner.groups[group].token_bytes for group in runner.forms[form].groups)


def _fingerprint(loaded: LoadedModel, tokenizer: Tokenizer, config: EngineConfig, method: SparseMethod | None = None) -> str:
    """What KV depends on beside its tokens: weights, tokenizer, template, dtype, page size, method with every option."""
    said = () if method is None else (repr(method),)
    parts = (loaded.fingerprint, tokenizer.fingerprint, *said, str(loaded.dtype), str(config.page_size))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
