"""What was pruned is not read any more, and nothing is read in its place."""

from __future__ import annotations

from collections import Counter

from agentkv.check.outcome import Skipped, require
from agentkv.check.scene import SPAN, Case, Scene
from agentkv.check.seen import ViewWatcher
from agentkv.engine.core import Edit
from agentkv.types import Interval


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
    _look(eyes, spans)
    return f"{gone} slots less, none of {len(spans)} spans is read"


def uneven(case: Case) -> str:
    """Where a prune took more of some heads than of others, and little came since, a seal keeps no token twice: a head has
    fewer candidates than the host believes."""
    config = case.loaded.config
    eyes = ViewWatcher(config.num_kv_heads, keys=True)
    scene, ids = case.scene(watcher=eyes), case.ids(1)
    first = scene.turn(ids, "a", new=2)
    floor = scene.state("a").floor
    by_head = [
        {each.position for each in head if each.exact} for _, heads in eyes.reads[-config.num_layers :] for head in heads
    ]
    span, (least, most) = _widest([{at for at in head if at < floor} for head in by_head], floor)
    if most - least < 2:
        raise Skipped("no prune takes more of one head than of another")
    whole = [*ids, *first.ids]
    scene.llm.prune("a", [span])
    eyes.forget()
    more = case.ids(2, max(1, (least + most) // 2 - len(first.ids)))
    scene.turn([*whole, *more], "a", edits=(Edit(len(whole), (span,)),))
    _look(eyes, [span])
    return f"a prune takes {least} to {most} slots of a head, {len(more)} new tokens follow"


def _widest(held: list[set[int]], floor: int) -> tuple[Interval, tuple[int, int]]:
    """The span of sealed tokens of which heads hold the most different numbers, and these: the least and the most."""
    best: tuple[Interval, tuple[int, int]] = (0, 0), (0, 0)
    for start in range(0, floor, 2):
        for end in range(start + 2, floor + 1, 2):
            counts = [sum(start <= at < end for at in head) for head in held]
            if max(counts) - min(counts) > best[1][1] - best[1][0]:
                best = (start, end), (min(counts), max(counts))
    return best


def _spans(scene: Scene, length: int) -> tuple[list[Interval], int]:
    """What to prune of a chain, and how many of these tokens lie in the tail."""
    floor = scene.state("a").floor
    spans = [SPAN, (max(floor, length - 9), length - 4)]
    tail = sum(max(0, end - max(start, floor)) for start, end in spans)
    return [span for span in spans if span[0] < span[1]], tail


def _look(eyes: ViewWatcher, spans: list[Interval]) -> None:
    """Nothing that was read lies in a span, and no token was read twice at once."""
    require(bool(eyes.reads), "attention read nothing")
    for layer, heads in eyes.reads:
        for head, slots in enumerate(heads):
            where, counts = f"layer {layer}, head {head}", Counter[int]()
            for position, exact in slots:
                gone = any(start <= position < end for start, end in spans)
                require(not gone, f"{where}: token {position} is read after it was pruned")
                counts[position] += exact
            twice = [position for position, count in counts.items() if count > 1]
            require(not twice, f"{where}: token {twice[:1]} is read twice")
