"""Decode by batch, and the largest batch that memory has room for, by method and context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentkv import methods
from agentkv.bench.crossover import LENGTHS
from agentkv.bench.decode_step import MODEL, row_model, row_step
from agentkv.bench.gpu_rows import Measured, Rig, Row
from agentkv.bench.injected import PAGE, peak_bytes
from agentkv.bench.row_methods import TINY, row_method
from agentkv.engine.core import EngineConfig
from agentkv.engine.forms import serve
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sizing import plan_memory
from agentkv.engine.sparse import SparseMethod

BATCHES, LENGTH, NEW = (1, 2, 4, 8, 16, 32, 64), 8192, 512


def batch_rows() -> Iterator[Row]:
    """Dense steps of one to 64 sequences at 8K."""
    yield Row(f"batch sweep, {MODEL}, 1 to 64 x8K, largest batches", "tokens/s at most", None, _measure)


def largest_batch(loaded: LoadedModel, method: SparseMethod, arena: int, length: int, new_tokens: int, step_tokens: int) -> int:
    """Sequences of a prompt of `length` tokens and `new_tokens` of an answer that decode together in an arena of so many bytes,
    none preempted, as the engine sets memory aside: all but one are sealed when the last prompt is read."""
    config = EngineConfig(arena, length + new_tokens + 1, page_size=PAGE, step_tokens=step_tokens)
    peak = peak_bytes(loaded, config, (method,), 0, length, length + new_tokens)
    standing = standing_bytes(loaded, config, method, length, length + new_tokens)
    return 0 if peak > arena else 1 + (arena - peak) // standing


def standing_bytes(loaded: LoadedModel, config: EngineConfig, method: SparseMethod, prompt: int, tokens: int) -> int:
    """What is set aside for a sequence whose prompt has been read and sealed, until it has so many tokens."""
    groups, (served,) = serve(loaded, config, (method,))
    form = served.form
    if form.bound is None:
        return peak_bytes(loaded, config, (method,), 0, prompt, tokens)
    bound = form.bound(prompt, tokens)
    tail = sum((-(-bound.tail // groups[index].page_size) + 2) * groups[index].stripe_bytes for index in form.groups)
    return tail + sum(count * groups[index].stripe_bytes for index, count in zip(form.sealed, bound.units, strict=True))


def _measure(rig: Rig) -> Measured:
    """us: of each batch, the median. largest: by method and context, in the arena that start-up sizing plans beside the weights
    and the largest step, for answers of NEW tokens."""
    length, batches = (96, (1, 2)) if rig.tiny else (LENGTH, BATCHES)
    sweep = []
    for count in batches:
        found = row_step(rig, methods.get("dense"), [length] * count, profile=False)
        told = found.told(rig)
        sweep.append({"rows": count} | {key: told[key] for key in ("median_us", "how", "x_bytes", "tokens_per_s")})
    arena, largest = _largest(rig, LENGTHS if not rig.tiny else (256,))
    us = [each["median_us"] for each in sweep]
    more = {"length": length, "sweep": sweep, "arena_bytes": arena, "new_tokens": NEW, "largest": largest}
    return Measured(us, max(each["tokens_per_s"] for each in sweep), rig.copy, "TB/s", more=more)


def _largest(rig: Rig, lengths: Sequence[int]) -> tuple[int, dict[str, dict[str, Any]]]:
    loaded, dense = row_model(rig), methods.get("dense")
    config = EngineConfig(0, max(lengths) + NEW + 1, page_size=PAGE, max_rows=64, step_tokens=2048)
    arena = plan_memory(loaded, config, dense).arena
    served = {"dense": dense} | {name: row_method(rig, name) for name in TINY}
    return arena, {
        name: {str(length): largest_batch(loaded, method, arena, length, NEW, config.step_tokens) for length in lengths}
        for name, method in served.items()
    }
