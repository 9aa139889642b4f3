"""From methods and a model to what the engine knows of them: groups of units, and a form for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentkv.engine.cache.layout import Granularity, UnitLayout
from agentkv.engine.core import SLOT, WHOLE, EngineConfig, Group, KVGroup, StateGroup
from agentkv.engine.form import Bound, Form, Held, Seal
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import Keep, ModelShape, SparseMethod, StateSpec
from agentkv.errors import BadRequest, EngineFault

SEALED_PAGE = 16
"""Slots of a page of a sealed part, whatever the KV page."""


@dataclass(frozen=True)
class Served:
    """One method as the runner serves it. specs, tail, sealed: its states by name, and the runner's group of their tail and
    sealed copies. layout, payload, lens: of a sealed part of K and V: the units, and the groups of the slots and of the counts
    by layer and head."""

    method: SparseMethod
    form: Form
    shape: ModelShape
    specs: Mapping[str, StateSpec]
    tail: Mapping[str, int]
    sealed: Mapping[str, int]
    layout: UnitLayout | None = None
    payload: int = -1
    lens: int = -1
    page_states: tuple[str, ...] = field(default=())

    @property
    def replayable(self) -> bool:
        """Can its decode steps be captured?"""
        return self.method.graph_safe

    @property
    def extendable(self) -> bool:
        """Can steps in which its rows read short chunks be captured? What is held has to lie in pages of K and V, and what
        attention gave each slot is told of a prompt's rows as they are."""
        method = self.method
        return self.replayable and method.stores and method.seals_into != "states" and not method.needs.mass


def model_shape(loaded: LoadedModel, page_size: int) -> ModelShape:
    """What methods may know of the model."""
    c = loaded.config
    return ModelShape(
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        hidden_size=c.hidden_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        page_size=page_size,
        scale=c.attention_scale or c.head_dim**-0.5,
        windowed=any(window is not None for window in c.sliding),
        fingerprint=loaded.fingerprint,
        vocab_size=c.vocab_size,
        key_norm=loaded.model.qk_norm,
    )


def serve(
    loaded: LoadedModel, config: EngineConfig, methods: Sequence[SparseMethod], readers: Sequence[SparseMethod | None] = ()
) -> tuple[tuple[Group, ...], tuple[Served, ...]]:
    """The engine's groups, the model's KV first, and what serves each method. readers: see `SparseController`.

    BadRequest where a method does not serve the model, declares what cannot be kept, or stands there twice.
    """
    shape = model_shape(loaded, config.page_size)
    kv = loaded.groups(config.page_size)
    groups: list[Group] = list(kv)
    served = []
    for index, method in enumerate(methods):
        _check(method, shape, kv)
        if method in methods[:index]:
            raise BadRequest(f"{method.fingerprint} is there twice", hint="Give each of them once", param="method")
        reader = readers[index] if index < len(readers) else None
        served.append(_serve(method, reader, shape, kv, groups))
    return tuple(groups), tuple(served)


def widths(groups: Sequence[Group], forms: Sequence[Form], config: EngineConfig) -> dict[int, int]:
    """Pages of a row by group, where they are not those of a window's tokens: sealed parts have their bound, and behind a
    prompt there is room for what is forwarded to be looked at."""
    found: dict[int, int] = {}
    for form in forms:
        if form.bound is not None:
            long, short = (form.bound(prompt, config.window).units for prompt in (config.window, 1))
            found.update((index, max(pair)) for index, *pair in zip(form.sealed, long, short, strict=True))
        if form.replay is not None:
            more = config.window + form.replay_most(config.window)
            found.update({index: -(-more // groups[index].page_size) for index in form.groups})
    return {index: max(1, width) for index, width in found.items()}


def query_window(methods: Sequence[SparseMethod]) -> int:
    """Most queries of a prompt that a method asks for at its seal."""
    return max(method.needs.query_window for method in methods)


def _serve(
    method: SparseMethod, reader: SparseMethod | None, shape: ModelShape, kv: tuple[KVGroup, ...], groups: list[Group]
) -> Served:
    """Append the method's groups to those there are."""
    specs = {spec.name: spec for spec in method.states(shape)}

    def append(group: Group) -> int:
        groups.append(group)
        return len(groups) - 1

    tail = {name: append(spec.group(shape.page_size)) for name, spec in specs.items() if spec.part != "sealed"}
    layout, payload, lens = None, -1, -1
    if method.seals_into in ("stripe", "head"):
        layout = _layout(method, kv[0])
        payload = append(_payload(layout))
        lens = append(StateGroup("lens", (shape.num_layers, shape.num_kv_heads), "int32", 4, WHOLE, sealed=True))
    sealed = {name: append(spec.group(SEALED_PAGE, sealed=True)) for name, spec in specs.items() if spec.part != "tail"}
    of_sealed = (*((payload, lens) if layout else ()), *sealed.values())
    mine = (*tail.values(), *of_sealed)
    mutable = frozenset(index for index in mine if _state(groups, index).mutable)
    page_states = tuple(name for name in tail if specs[name].scope == "page")
    seal, bound = _sealing(method, layout, [_state(groups, index) for index in of_sealed])
    form = Form(
        groups=(*(range(len(kv)) if method.stores else ()), *tail.values()),
        name=type(method).__name__.lower(),
        sealed=of_sealed,
        mutable=mutable,
        reuse=method.reuse,
        fingerprint=method.fingerprint + (f" read by {reader.fingerprint}" if reader not in (None, method) else ""),
        truncates=method.truncates and not mutable,
        paged=bool(page_states),
        shrinks=method.seals_into == "stripe",
        holes=method.seals_into == "states",
        stays=frozenset(sealed[name] for name, spec in specs.items() if name in sealed and spec.scope == "page"),
        seal=seal,
        bound=bound,
        replay=method.replay if method.replay_most(shape.page_size) else None,
        replay_most=method.replay_most,
        looks_back=method.needs.query_window,
    )
    return Served(method, form, shape, specs, tail, sealed, layout, payload, lens, page_states)


def _state(groups: Sequence[Group], index: int) -> StateGroup:
    group = groups[index]
    assert isinstance(group, StateGroup)
    return group


def _layout(method: SparseMethod, kv: KVGroup) -> UnitLayout:
    """K and V of a sealed unit."""
    granularity: Granularity = "head" if method.seals_into == "head" else "stripe"
    return UnitLayout(granularity, kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.itemsize, SEALED_PAGE)


def _payload(layout: UnitLayout) -> StateGroup:
    """K and V by the layout, then the int32 logical position of each slot: [layer][kv head][token], in head pages [token]."""
    heads = 1 if layout.granularity == "head" else layout.num_layers * layout.num_kv_heads
    size = layout.payload_bytes + heads * layout.page_size * 4
    return StateGroup("sealed", (size,), "uint8", 1, layout.page_size, sealed=True)


def _sealing(
    method: SparseMethod, layout: UnitLayout | None, groups: Sequence[StateGroup]
) -> tuple[Callable[[Held], Seal | None] | None, Callable[[int, int], Bound] | None]:
    """`seal` and `bound` of the form, which count in units what the method counts in tokens; None where it never seals."""
    if method.seals_into is None:
        return None, None
    by_head = layout is not None and layout.granularity == "head"

    def slots_of(keep: Keep) -> int:
        """No head has more than all that share its budget."""
        if layout is None or not keep.mean:
            return keep.slots
        return min(keep.slots, keep.mean * layout.num_kv_heads * (layout.num_layers if keep.across else 1))

    def units(keep: Keep) -> tuple[int, ...]:
        if keep.slots == 0:
            return (0,) * len(groups)
        counts = [-(-slots_of(keep) // group.page_size) for group in groups]
        if layout is not None and by_head:
            heads = layout.num_layers * layout.num_kv_heads
            rounded = heads * (keep.mean + layout.page_size - 1) // layout.page_size if keep.mean else counts[0] * heads
            counts[0] = min(rounded, counts[0] * heads)
        return tuple(counts)

    def keeps(held: Held, made: tuple[int, ...], slots: int) -> tuple[int, ...]:
        """Whole units, and all of them where nothing is added."""
        whole = made if slots == held.slots else [held.slots // group.page_size for group in groups]
        stay = [0 if group.mutable or (by_head and i == 0) else whole[i] for i, group in enumerate(groups)]
        return tuple(min(pair) for pair in zip(stay, made, strict=True))

    def seal(held: Held) -> Seal | None:
        keep = method.keep(held)
        if keep is None:
            return None
        if not (held.floor <= keep.floor <= held.tokens and keep.slots >= 0):
            raise EngineFault(f"{method.fingerprint} keeps {keep} of {held}: the floor lies outside what is held")
        made = units(keep)
        stay = keeps(held, made, slots_of(keep)) if keep.appends else (0,) * len(made)
        return Seal(keep.floor, slots_of(keep), made, stay)

    def bound(prompt: int, tokens: int) -> Bound:
        most = method.most(prompt, tokens)
        made = units(most.keep)
        again = [min(count, 1) if most.keep.appends and not (by_head and i == 0) else count for i, count in enumerate(made)]
        return Bound(most.tail, tuple(count + more * most.again for count, more in zip(made, again, strict=True)))

    return seal, bound


def _check(method: SparseMethod, shape: ModelShape, kv: tuple[KVGroup, ...]) -> None:
    """BadRequest for what does not fit the model, or one another."""
    why = method.unserved(shape) or _unkept(method, shape, kv)
    if why:
        raise BadRequest(f"{method.fingerprint} does not serve this model: {why}", param="method")


def _unkept(method: SparseMethod, shape: ModelShape, kv: tuple[KVGroup, ...]) -> str | None:
    """Why what the method declares cannot be kept; None if it can."""
    specs = method.states(shape)
    pages = method.seals_into in ("stripe", "head")
    names = [spec.name for spec in specs] + [spec.beside[0] for spec in specs if spec.beside is not None]
    if len(set(names)) < len(names):
        return "two of its states have one name"
    if pages and (not method.stores or len(kv) != 1):
        return "its sealed part is of K and V, which must lie in pages of one group"
    if method.seals_into == "states" and all(spec.part == "tail" for spec in specs):
        return "its sealed part is states, and it has none"
    for spec in specs:
        if spec.part != "tail" and method.seals_into is None:
            return f"its state {spec.name!r} is sealed, and it never seals"
        if spec.part == "both" and spec.scope != "slot":
            return f"its state {spec.name!r} is no item of a slot, so no seal can move it"
        of_head = tuple(dim for dim in spec.shape if dim != SLOT)[:2] == (shape.num_layers, shape.num_kv_heads)
        if spec.part == "both" and pages and not of_head:
            return f"its state {spec.name!r} needs dims of layers and heads, since each head keeps its own slots"
        if spec.scope == "page" and spec.part == "tail" and not method.stores:
            return f"its state {spec.name!r} is of pages of KV, which it does not keep"
    return None
