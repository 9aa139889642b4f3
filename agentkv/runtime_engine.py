"""Opening a model: from a directory to an engine with its thread, and what memory it will take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from agentkv import methods
from agentkv.engine.checkpoint import find_gguf
from agentkv.engine.core import EngineConfig
from agentkv.engine.devices import best_device, device_names, free_memory, usable_device
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.lookup import MOST_QUERIES
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.worker import EngineWorker
from agentkv.errors import BadRequest
from agentkv.runtime_backend import EngineBackend

BUNDLED = ("micro",)
LOOKUP = 8
CPU_MOST = 1 << 30
CPU_SHARE, GPU_SHARE = 0.25, 0.8
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Engine:
    """A loaded model behind its engine: what a `Runtime` owns."""

    backend: EngineBackend
    worker: EngineWorker
    config: EngineConfig
    method: SparseMethod
    method_name: str
    device: str


def open_engine(
    model: str | Path,
    *,
    method: str | SparseMethod = "dense",
    device: str = "auto",
    dtype: str = "auto",
    memory: int | str | None = None,
    window: int | None = None,
    page_size: int | None = None,
    lookup: int = LOOKUP,
) -> Engine:
    """Load a model and start its engine. Raises UnknownModel, BadModel, UnknownOption or BadRequest; nothing is left behind."""
    path = model_path(model)
    chosen, name = _method(method)
    lookup = _checked_lookup(lookup) if chosen.truncates else 0
    tokenizer = Tokenizer.load(path)
    target = usable_device(device)
    loaded = load_model(path, device=target, dtype=dtype)
    config = replace(engine_config(loaded, memory, window, page_size), lookup=lookup)
    runner = ModelRunner(loaded, config, chosen)
    worker = EngineWorker(LLM(config, runner, tokenizer=tokenizer, reuse=chosen.reuse))
    backend = EngineBackend(
        worker,
        tokenizer,
        model_name=str(model),
        fingerprint=_fingerprint(loaded, tokenizer, chosen, config),
        exactness=chosen.exactness,
        window=config.window,
        token_bytes=runner.layout.token_bytes,
    )
    return Engine(backend, worker, config, chosen, name, str(loaded.device))


def model_path(model: str | Path) -> Path:
    """Where a bundled model or a path lies: a directory, or a .gguf file. UnknownModel where nothing is there."""
    if str(model) in BUNDLED:
        return Path(__file__).resolve().parent / "data" / str(model)
    path = Path(model).expanduser()
    find_gguf(path)
    return path


def engine_config(loaded: LoadedModel, memory: int | str | None, window: int | None, page_size: int | None) -> EngineConfig:
    """Sizes for this model on its device; what is None is chosen."""
    on_cpu = loaded.device.type == "cpu"
    for name, value in (("window", window), ("page_size", page_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadRequest(f"{name}={value!r}: an int", param=name)
    if window is not None and not 1 < window <= loaded.window:
        raise BadRequest(f"window={window}: 2 to the model's {loaded.window}", param="window")
    if page_size is not None and not 1 <= page_size <= 1024:
        raise BadRequest(f"page_size={page_size}: 1 to 1,024", param="page_size")
    return EngineConfig(
        memory=parse_memory(memory) if memory is not None else _default_memory(loaded),
        window=window or loaded.window,
        page_size=page_size or (128 if on_cpu else 16),
        max_rows=32 if on_cpu else 256,
        step_tokens=1024 if on_cpu else 8192,
    )


def parse_memory(memory: int | str) -> int:
    """Bytes of 268435456, '268435456', '256MiB' or '1.5GB'."""
    text = str(memory).strip()
    number = text.rstrip("BKMGTi")
    unit = text[len(number) :] or "B"
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise BadRequest(f"memory={memory!r}: bytes, or like '2GiB' or '500MB'", param="memory") from None
    if size < 1:
        raise BadRequest(f"memory={memory!r}: must be positive", param="memory")
    return size


def _checked_lookup(lookup: int) -> int:
    if isinstance(lookup, bool) or not isinstance(lookup, int) or not 0 <= lookup <= MOST_QUERIES:
        raise BadRequest(f"lookup={lookup!r}: 0 to {MOST_QUERIES} tokens a step", hint="0 guesses nothing", param="lookup")
    return lookup


def _default_memory(loaded: LoadedModel) -> int:
    free = free_memory(loaded.device)
    return min(CPU_MOST, int(free * CPU_SHARE)) if loaded.device.type == "cpu" else int(free * GPU_SHARE)


def _method(method: str | SparseMethod) -> tuple[SparseMethod, str]:
    if isinstance(method, str):
        return methods.get(method), method
    return method, type(method).__name__.lower()


def _fingerprint(loaded: LoadedModel, tokenizer: Tokenizer, method: SparseMethod, config: EngineConfig) -> str:
    """What KV depends on beside its tokens: weights, tokenizer, template, method with every option, dtype, page size."""
    parts = (loaded.fingerprint, tokenizer.fingerprint, repr(method), str(loaded.dtype), str(config.page_size))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def list_methods() -> list[dict[str, Any]]:
    """Every method: name, family, exactness, reuse, options with defaults, summary."""
    rows = []
    for name in methods.NAMES:
        kind = methods.resolve(name)
        rows.append(
            {
                "name": name,
                "family": kind.family,
                "exactness": kind.exactness,
                "reuse": kind.reuse,
                "options": {option.name: repr(getattr(methods.get(name), option.name)) for option in fields(kind)},
                "summary": (kind.__doc__ or "").strip().splitlines()[0],
            }
        )
    return rows


def devices() -> list[str]:
    """Devices that this torch can use, the one that 'auto' takes first."""
    return device_names()


def memory_plan(model: str | Path) -> dict[str, Any]:
    """What a model takes here: weights, KV bytes a token, arena, tokens that fit. Loads the model."""
    loaded = load_model(model_path(model), device=best_device())
    config = engine_config(loaded, None, None, None)
    layout = loaded.layout(config.page_size)
    return {
        "name": str(model),
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes_per_token": layout.token_bytes,
        "arena_bytes": config.memory,
        "tokens_that_fit": config.memory // layout.stripe_bytes * config.page_size,
        "window": config.window,
    }
