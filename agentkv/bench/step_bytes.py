"""Bytes that a decode step cannot do without reading: weights, and what its rows' methods read of what they hold."""

from __future__ import annotations

from typing import NamedTuple

from agentkv.bench.injected import Injected
from agentkv.engine.cache.intervals import clip, size
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import KVGroup, StateGroup
from agentkv.engine.sparse import SparseMethod


class StepBytes(NamedTuple):
    """weights: once a step. kv: pages of K and V that are not sealed, in each layer no more slots than the method says. state:
    of whole pages, in layers that choose by it, and by token. sealed: units of sealed parts, as many as are held."""

    weights: int
    kv: int
    state: int
    sealed: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def step_bytes(injected: Injected) -> StepBytes:
    """Of one more step of the same rows, from their tables."""
    loaded, runner = injected.runner.loaded, injected.runner
    kv = state = sealed = 0
    for sequence in injected.sequences:
        if sequence.state is None:
            continue
        method, prompt = runner.controller.methods[sequence.request.form], sequence.num_prompt_tokens
        reads = _reads(method, sequence.state, prompt, loaded.config.num_layers)
        for holding in sequence.state.holdings:
            index, group = holding.pool.group, runner.groups[holding.pool.group]
            if index in sequence.state.form.sealed:
                sealed += len(holding.units) * group.stripe_bytes
            elif index not in sequence.state.form.groups:
                continue
            elif isinstance(group, KVGroup):
                kv += sum(reads[layer] for layer in group.layers) * group.token_bytes // group.num_layers
            else:
                state += _state_bytes(group, sequence.state, reads)
    return StepBytes(loaded.weight_bytes, kv, state, sealed)


def _reads(method: SparseMethod, state: KVState, prompt: int, num_layers: int) -> list[int]:
    """Slots of the tail that are read by layer."""
    tail = size(clip(state.runs, state.floor, state.logical_length))
    return [
        min(tail, max(0, method.most_read(layer, prompt, state.logical_length) - state.slots)) for layer in range(num_layers)
    ]


def _state_bytes(group: StateGroup, state: KVState, reads: list[int]) -> int:
    """Of tail state: an item for each slot, or for each whole page that a layer chooses from."""
    tail = size(clip(state.runs, state.floor, state.logical_length))
    if group.by_slot:
        return tail * group.token_bytes
    choosing = sum(slots < tail for slots in reads)
    return tail // group.page_size * group.stripe_bytes * choosing // len(reads)
