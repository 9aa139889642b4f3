"""What attention reads: everything within the budget, what `reference` says, no more than is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentkv.check.outcome import Skipped, require
from agentkv.check.scene import LENGTH, MORE, NEW, PAGE, Case, difference, same
from agentkv.check.seen import Decodes, ViewWatcher
from agentkv.engine.sparse import Read, SparseMethod

CODED = 1e-2
"""Log-probabilities of wide codes beside those of what they stand for."""
SHOWN = 111
"""Tokens of the prompt that `reference` is asked about: shares of it are no whole numbers, and its last page wants one more."""
STEPS = (0, 1, 6, 19)
"""Decode steps that are compared: what leaves during an answer has left."""


def budget(case: Case) -> str:
    """With a budget of the whole length (wide codes, full rank) every token and its probability is that of full attention."""
    options = case.method.identity(LENGTH + MORE + 2 * NEW)
    if options is None:
        raise Skipped("no options make it read what full attention reads")
    wide = Case(replace(case.method, **options), case.loaded)
    full = Case(SparseMethod(), case.loaded)
    close = None if case.method.stores and case.method.seals_into != "states" else CODED
    for turn, (wanted, found) in enumerate(zip(full.plain(1, 2), wide.plain(1, 2), strict=True), 1):
        require(same(wanted, found, close), f"turn {turn} with {_named(options) or 'its options'}: {difference(wanted, found)}")
    return f"two turns with {_named(options) or 'any options'}"


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def reference(case: Case) -> str:
    """Attention of decode steps is that over what `reference` says of plain tensors, in every layer."""
    config = case.loaded.config
    eyes = Decodes(config.num_layers)
    case.scene(watcher=eyes).turn(case.ids(1, SHOWN), new=STEPS[-1] + 2)
    tolerance = 1e-9 if case.loaded.dtype == torch.float64 else 1e-4
    worst = 0.0
    for step in STEPS:
        plain = eyes.plain(config.attention_scale or config.head_dim**-0.5, PAGE, step)
        for layer, token in enumerate(eyes.token):
            window = config.sliding[layer] if config.sliding else None
            read = _seen(case.method.reference(plain, layer), SHOWN + step, window)
            wanted = _dense(plain.query[layer], read, plain.own[layer], SHOWN + step, plain.scale)
            gap = float((wanted - token.out[step][0].double()).abs().max() / wanted.abs().max().clamp(min=1))
            worst = max(worst, gap)
            where, slots = f"decode step {step}, layer {layer}", [len(each) for each in read.positions]
            require(gap <= tolerance, f"{where}: attention is off by {gap:.1e}; reference says {slots} slots by head")
    return f"{len(STEPS)} steps of {config.num_layers} layers within {worst:.1e}"


def _seen(read: Read, length: int, window: int | None) -> Read:
    """What a layer's window, which is the model's, leaves of it for the query at `length`."""
    if window is None:
        return read
    stay = [[i for i, position in enumerate(head) if position > length - window] for head in read.positions]
    positions = [[head[i] for i in at] for head, at in zip(read.positions, stay, strict=True)]
    return Read(positions, *([head[at] for head, at in zip(each, stay, strict=True)] for each in (read.k, read.v)))


def _dense(query: Tensor, read: Read, own: tuple[Tensor, Tensor], length: int, scale: float) -> Tensor:
    """Attention of one query `[num_heads, head_dim]` over what it reads and, where that is not among it, its own token."""
    outs = []
    group = len(query) // len(read.k)
    for head, one in enumerate(query.double()):
        kv = head // group
        k, v = read.k[kv].double(), read.v[kv].double()
        if length not in read.positions[kv]:
            k, v = (torch.cat((each, mine[kv : kv + 1].double())) for each, mine in zip((k, v), own, strict=True))
        outs.append(torch.softmax(k @ one * scale, 0) @ v)
    return torch.stack(outs)


def reads(case: Case) -> str:
    """No query of an answer reads more slots of a head than `most_read` declares, and who selects declares less than all."""
    method, config = case.method, case.loaded.config
    eyes = ViewWatcher(config.num_kv_heads)
    case.scene(watcher=eyes).turn(case.ids(1))
    declared = [(method.most_read(layer, LENGTH, position + 1), position) for layer, position, _ in eyes.counts]
    for (layer, position, count), (most, _) in zip(eyes.counts, declared, strict=True):
        require(count <= most, f"layer {layer}: {count} slots are read at position {position}, {most} are declared")
    selects = type(method).select is not SparseMethod.select
    less = any(most <= position for most, position in declared)
    require(less or not selects, "it selects, and most_read declares no budget")
    return f"at most {max(count for _, _, count in eyes.counts)} of {LENGTH + NEW - 1} slots"
