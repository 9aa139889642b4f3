"""A model known by its config and its files' headers: what it would take on a device, before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agentkv.engine.cache.pools import KVPools
from agentkv.engine.core import GRANULE, EngineConfig, Group
from agentkv.engine.form import Form
from agentkv.engine.loader import LoadedModel, load_model, resolve_dtype
from agentkv.engine.oracle import cost
from agentkv.engine.sizing import measure_step
from agentkv.engine.sparse import SparseMethod

MOST_TRIED = 1_000_000_000
"""Parameters; the largest steps of a larger model take minutes on a CPU."""


def survey_model(path: str | Path, *, device: str, dtype: str = "auto") -> LoadedModel:
    """The model as it would be on that device, with weights that have shapes and no contents. Raises what `load_model` raises
    for damaged headers; damage inside the tensors is not seen."""
    target = torch.device(device)
    shell = load_model(path, device="meta", dtype=resolve_dtype(dtype, target), contents=False)
    return replace(shell, device=target)


def try_step(surveyed: LoadedModel, config: EngineConfig, method: SparseMethod) -> int | None:
    """What `measure_step` finds, on weights of zero; None where a CPU would take minutes for it."""
    parameters = sum(each.numel() for each in surveyed.model.parameters())
    if surveyed.device.type == "cpu" and parameters > MOST_TRIED:
        return None
    empty = load_model(surveyed.path, device=surveyed.device, dtype=surveyed.dtype, contents=False)
    return measure_step(empty, config, method)


def session_bytes(groups: Sequence[Group], config: EngineConfig, length: int, forms: Sequence[Form] = ()) -> int:
    """Arena bytes that a session of so many logical tokens takes at its peak, by the engine's own forecast. forms: the first is
    the session's; () is one of all groups."""
    pools = KVPools.over(1, groups, forms)
    return pools.bytes(cost(pools, config.step_tokens, None, (), length - 1).peak)  # the last token has no KV


def longest_session(groups: Sequence[Group], config: EngineConfig, arena: int, forms: Sequence[Form] = ()) -> int:
    """Most logical tokens, up to the window, of a session that an empty arena of so many bytes admits; 0 for none."""
    pools = KVPools.over(arena // GRANULE, groups, forms)

    def fits(length: int) -> bool:
        return pools.fits(cost(pools, config.step_tokens, None, (), length - 1).peak, empty=True)

    low, high = 1, config.window
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low > 1 else 0  # one token is a prompt without an answer
