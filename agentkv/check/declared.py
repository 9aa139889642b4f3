"""What a method declares is true: memory, capabilities, needs."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from agentkv.check.lives import FEW
from agentkv.check.outcome import Failed, Skipped, require
from agentkv.check.recorded import RecordedDevice
from agentkv.check.scene import LENGTH, MORE, NEW, PAGE, SPAN, Case, Scene, difference, same
from agentkv.check.waiting import OperationWatcher, WaitWatcher
from agentkv.check.watch import Watcher
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import GRANULE, SLOT, Edit, KVGroup
from agentkv.engine.forms import SEALED_PAGE, model_shape
from agentkv.engine.graphs import CudaDevice, Graphs
from agentkv.engine.limits import Buckets
from agentkv.engine.llm import LLM
from agentkv.engine.sparse import StateSpec

PROMPTS = 3
"""Times that the same turns are played: short prompts are captured behind the second."""


def units(case: Case) -> str:
    """Free and held units partition the arena by identity after every step of a busy life, and nothing is held at its end."""
    scene, ids, other = case.scene(step_tokens=FEW), case.ids(1), case.ids(6)
    scene.each_step = LLM.check
    first, second = scene.finish(scene.start(ids, "a"), scene.start(other, "b"))
    boundary = len(ids) + len(first.ids)
    scene.llm.fork("a", "c", boundary)
    scene.llm.prune("a", [SPAN])
    scene.llm.suspend("b")
    scene.llm.check()
    more = case.more(ids, first, 2)
    scene.finish(
        scene.start(more, "a", edits=(Edit(boundary, (SPAN,)),)),
        scene.start(more, "c"),
        scene.start(case.more(other, second, 3), "b"),
    )
    scene.llm.rollback("c", boundary)
    seq = scene.start(more, "c")
    scene.steps(2)
    scene.llm.abort(seq)
    scene.llm.check()
    scene.clear("abc")
    scene.llm.check()
    require(scene.used == 0, f"{scene.used} bytes are held when every session is closed")
    return "through forks, a prune, host memory, a rollback and an abort"


def memory(case: Case) -> str:
    """Bytes in the arena are those of the states and of what was sealed; nothing is over `most`."""
    if case.windowed:
        raise Skipped("the model has layers that see a window only")
    seen: list[tuple[int, int]] = []

    def look(llm: LLM) -> None:
        for seq in llm.scheduler.running:
            if seq.state is not None and not seq.prefilling and not seq.seal_at:
                seen.append(_weigh(case, llm, seq.state, seq.num_prompt_tokens))

    scene, ids = case.scene(each_step=look), case.ids(1)
    first = scene.turn(ids, "a")
    scene.turn(case.more(ids, first, 2), "a")
    require(bool(seen), "nothing was held while it decoded")
    held, tokens = max(seen)
    return f"at most {held} bytes for {tokens} tokens"


def _weigh(case: Case, llm: LLM, state: KVState, prompt: int) -> tuple[int, int]:
    """(bytes, tokens) of a running sequence that was never pruned."""
    tokens, tail = state.logical_length, state.logical_length - state.floor
    if case.method.seals_into is not None:
        most = case.method.most(prompt, tokens)
        require(tail <= most.tail, f"{tail} tokens lie in the tail, most({prompt}, {tokens}) says {most.tail}")
        require(state.slots <= most.keep.slots, f"{state.slots} slots are sealed, most says {most.keep.slots}")
    found = llm.pools.bytes(llm.pools.distinct([state.slices]))
    low, high = _bytes(case, state)
    require(
        low <= found <= high, f"{found} bytes are held at {tokens} tokens, declared are {low}" + f" to {high}" * (high > low)
    )
    return found, tokens


def _bytes(case: Case, state: KVState) -> tuple[int, int]:
    """Least and most bytes, by what is declared: whole pages of the tail, and units of the sealed part."""
    method, loaded = case.method, case.loaded
    pages = -(-state.logical_length // PAGE) - state.floor // PAGE
    total = pages * sum(group.stripe_bytes for group in loaded.groups(PAGE)) * method.stores
    least = most = 0
    slots = -(-state.slots // SEALED_PAGE)
    for spec in method.states(model_shape(loaded, PAGE)):
        whole = spec.scope == "sequence"
        if spec.part != "sealed":
            total += _unit(spec, PAGE) * (1 if whole else pages)
        if spec.part != "tail" and state.slots:
            page = spec.group(SEALED_PAGE, sealed=True).page_size
            total += _unit(spec, page) * -(-state.slots // page)
    if method.seals_into in ("stripe", "head") and state.slots:
        c = loaded.config
        heads = c.num_layers * c.num_kv_heads
        page = SEALED_PAGE * (2 * c.head_dim * loaded.dtype.itemsize + 4)
        total += _granules(heads * 4)
        if method.seals_into == "stripe":
            total += slots * _granules(heads * page)
        else:
            least, most = slots * _granules(page), slots * heads * _granules(page)
    return total + least, total + most


def _unit(spec: StateSpec, page: int) -> int:
    arrays = [spec.shape, *([] if spec.beside is None else [spec.beside[1]])]
    items = sum(prod(page if dim == SLOT else dim for dim in shape) for shape in arrays)
    return _granules(items * getattr(torch, spec.dtype).itemsize)


def _granules(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def evicts(case: Case) -> str:
    """Fewer slots are held than there are tokens just where the method says that it evicts. Where heads hold different counts,
    which the host does not know, that is fewer bytes than all of their keys and values take."""
    scene = case.scene()
    scene.turn(case.ids(1), "a")
    state = scene.state("a")
    held, all_of_it, what = state.resident, state.logical_length, "tokens"
    if not case.method.counts_on_host:
        held, all_of_it, what = _kv_bytes(scene, state), _all_bytes(case, state.logical_length), "bytes"
    said = f"{held} of {all_of_it} {what} are held"
    require((held < all_of_it) is case.method.evicts, f"evicts={case.method.evicts}, and {said}")
    return said


def _kv_bytes(scene: Scene, state: KVState) -> int:
    """Bytes of keys and values that a state holds, in the tail and sealed."""
    groups = zip(scene.runner.groups, state.holdings, strict=True)
    return sum(
        len(held.units) * group.stripe_bytes for group, held in groups if isinstance(group, KVGroup) or group.name == "sealed"
    )


def _all_bytes(case: Case, tokens: int) -> int:
    return -(-tokens // PAGE) * sum(group.stripe_bytes for group in case.loaded.groups(PAGE))


def reuse(case: Case) -> str:
    """A later turn prefills its own tokens only (and what is replayed of them); a prefix is shared, and gives the same answer,
    where that is declared."""
    later = case.plain(1, 2)[1]
    known = LENGTH + NEW - 1
    require(later.cached == known, f"a later turn found {later.cached} of the {known} tokens that its history had forwarded")
    own = later.prefilled == MORE + 1 or case.method.replay_most(MORE) > 0
    require(own, f"a later turn of {MORE + 1} new tokens prefilled {later.prefilled}")
    scene, ids = case.scene(), case.ids(1)
    scene.turn(ids, "a")
    other = [*ids[: 4 * PAGE], *case.ids(5)]
    found = scene.turn(other)
    wanted = case.scene().turn(other)
    if case.method.reuse == "chain":
        require(found.cached == 0, f"reuse is chain, and {found.cached} tokens came from another session")
        return "by chain"
    require(found.cached == 4 * PAGE or case.windowed, f"reuse is radix, and {found.cached} of {4 * PAGE} tokens were shared")
    require(same(wanted, found), f"behind a shared prefix, {difference(wanted, found)}")
    return f"by chain, and {found.cached} tokens by prefix"


class _Counts(Watcher):
    """Slots of sealed parts on the device, and what the host takes them for."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], int]] = []

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Note both in each view of one row."""
        if hook == "view" and args[2].sealed is not None:
            self.seen.append((args[2].sealed.lens(args[0])[0].tolist(), args[2].sealed.max_slots))
        return call(*args)


def counts(case: Case) -> str:
    """Every head's sealed part is as long as the host believes, where `counts_on_host` says so, and never longer."""
    if case.method.seals_into not in ("stripe", "head"):
        raise Skipped("it seals no keys and values")
    eyes = _Counts()
    case.scene(watcher=eyes).turn(case.ids(1))
    require(bool(eyes.seen), "nothing was sealed")
    for heads, host in eyes.seen:
        fits = max(heads) <= host and (not case.method.counts_on_host or min(heads) == host)
        require(fits, f"heads hold {heads} slots, the host counts {host}")
    heads, host = eyes.seen[-1]
    return f"{min(heads)} to {max(heads)} slots by head, {host} on the host"


def graph(case: Case) -> str:
    """Hooks run the same operations in every decode step, so that steps can be replayed with other rows in their place."""
    if not case.method.graph_safe:
        raise Skipped("not declared")
    eyes = OperationWatcher()
    case.scene(watcher=eyes).turn(case.ids(1), new=12)
    steady = eyes.steps[1:]  # what is made once and kept is made in the first
    for number, step in enumerate(steady, 2):
        require(step == steady[0], f"decode step {number} runs {len(step)} operations, the one before {len(steady[0])}")
    return f"{len(steady[0])} operations in each of {len(steady)} steps, {_replayed(case)} steps replayed"


def _replayed(case: Case) -> int:
    """Play two turns out of graphs until their prompts are, too, where they can be; how many steps were replayed."""
    on_gpu, wanted, ids = case.loaded.device.type == "cuda", case.plain(1, 2), case.ids(1)
    graphs = Graphs[Any](CudaDevice(case.loaded.device) if on_gpu else RecordedDevice(), Buckets(slots=32))
    scene = case.scene(graphs=graphs)
    for _ in range(PROMPTS):
        found = [scene.turn(ids, "a")]
        found.append(scene.turn(case.more(ids, wanted[0], 2), "a"))
        told = graphs.stats()
        require(not told.failed, f"a step cannot be captured: {', '.join(told.failed.values())}")
        for plain, answer in zip(wanted, found, strict=True):
            require(same(plain, answer), f"replayed from a graph, {difference(plain, answer)}")
        scene.clear(["a"])
    return told.replays


class _Denied(Watcher):
    """Gives hooks nothing but what their method declared: no numbers in place of the rest."""

    def __init__(self, case: Case) -> None:
        self._needs = case.method.needs

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make the call with less."""
        given, needs = list(args), self._needs
        if hook == "store" and not needs.k_raw:
            given[1] = torch.full_like(args[1], torch.nan)
        elif hook == "select" and not needs.q_raw:
            given[2] = torch.full_like(args[2], torch.nan)
        elif hook == "on_layer_end" and args[0] not in needs.hidden_layers:
            given[1] = torch.full_like(args[1], torch.nan)
        elif hook == "on_attention_end":
            given[3:5] = args[3] if needs.lse or needs.mass else None, args[4] if needs.mass else None
        return call(*given)


def needs(case: Case) -> str:
    """Two turns are the same where hooks get nothing that was not declared."""
    scene, ids = case.scene(watcher=_Denied(case)), case.ids(1)
    wanted = case.plain(1, 2)
    try:
        first = scene.turn(ids, "a")
        second = scene.turn(case.more(ids, wanted[0], 2), "a")
    except Failed as failed:
        raise Failed(f"without what it did not declare: {failed}") from None
    for plain, found in zip(wanted, (first, second), strict=True):
        require(same(plain, found), f"without what it did not declare, {difference(plain, found)}")
    return "two turns on what is declared"


def waits(case: Case) -> str:
    """No hook, and no seal, waits for the device."""
    eyes = WaitWatcher()
    scene, ids = case.scene(watcher=eyes), case.ids(1)
    try:
        first = scene.turn(ids, "a")
        scene.turn(case.more(ids, first, 2), "a")
    except Exception:
        require(not eyes.failures, "; ".join(eyes.failures))
        raise
    return "in hooks and seals of two turns"
