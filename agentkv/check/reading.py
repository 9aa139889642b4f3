"""What attention reads: everything within the budget, what `reference` says, no more than is declared, nothing pruned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentkv.check.outcome import Failed, Skipped, require
from agentkv.check.scene import LENGTH, MORE, NEW, PAGE, SPAN, Case, Scene, difference, same
from agentkv.check.seen import FirstDecode, ReadSlot, ViewWatcher
from agentkv.engine.core import Edit
from agentkv.engine.sparse import Read, SparseMethod
from agentkv.types import Interval

CODED = 1e-2
"""Log-probabilities of wide codes beside those of what they stand for."""


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
    """The first decode step's attention is that over what `reference` says of plain tensors, in every layer."""
    config = case.loaded.config
    eyes = FirstDecode(config.num_layers)
    case.scene(watcher=eyes).turn(case.ids(1))
    plain = eyes.plain(config.attention_scale or config.head_dim**-0.5, PAGE)
    tolerance = 1e-9 if case.loaded.dtype == torch.float64 else 1e-4
    worst = 0.0
    for layer, token in enumerate(eyes.token):
        window = config.sliding[layer] if config.sliding else None
        read = _seen(case.method.reference(plain, layer), LENGTH, window)
        wanted = _dense(plain.query[layer], read, plain.own[layer], LENGTH, plain.scale)
        gap = float((wanted - token.out[0][0].double()).abs().max() / wanted.abs().max().clamp(min=1))
        worst = max(worst, gap)
        require(gap <= tolerance, f"layer {layer}: attention is off by {gap:.1e}; reference says {_counts(read)} slots by head")
    return f"{config.num_layers} layers within {worst:.1e}"


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


def _counts(read: Read) -> list[int]:
    return [len(each) for each in read.positions]


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


def prune(case: Case) -> str:
    """Tokens that were pruned, from the tail or from the sealed part, are not read any more, no other is read twice, and their
    memory is given back."""
    eyes = ViewWatcher(case.loaded.config.num_kv_heads, keys=True)
    scene, ids = case.scene(watcher=eyes), case.ids(1)
    first = scene.turn(ids, "a")
    whole = [*ids, *first.ids]
    spans, tail = _spans(scene, len(whole) - 1)
    before = scene.llm.chain_info("a")
    scene.llm.prune("a", spans)
    after = scene.llm.chain_info("a")
    assert before is not None
    assert after is not None
    gone = before.resident_tokens - after.resident_tokens
    require(gone >= tail, f"{tail} tokens were pruned from the tail, {gone} less are held")
    require(after.bytes_held <= before.bytes_held, "more bytes are held after a prune")
    eyes.forget()
    scene.turn(case.more(ids, first, 2), "a", edits=(Edit(len(whole), tuple(spans)),))
    require(bool(eyes.reads), "attention read nothing")
    for layer, heads in eyes.reads:
        for head, slots in enumerate(heads):
            _look(slots, spans, f"layer {layer}, head {head}")
    return f"{gone} slots less, none of {len(spans)} spans is read"


def _spans(scene: Scene, length: int) -> tuple[list[Interval], int]:
    """What to prune of a chain, and how many of these tokens lie in the tail."""
    floor = scene.state("a").floor
    spans = [SPAN, (max(floor, length - 9), length - 4)]
    tail = sum(max(0, end - max(start, floor)) for start, end in spans)
    return [span for span in spans if span[0] < span[1]], tail


def _look(slots: list[ReadSlot], spans: list[Interval], where: str) -> None:
    counts: Counter[int] = Counter()
    for position, exact in slots:
        if any(start <= position < end for start, end in spans):
            raise Failed(f"{where}: token {position} is read after it was pruned")
        counts[position] += exact
    twice = [position for position, count in counts.items() if count > 1]
    require(not twice, f"{where}: token {twice[:1]} is read twice")
