"""The lifecycle contract between the engine and an attention method, and the calls that honour it.

A method is one frozen dataclass: its fields are its options, its class attributes say what it is. The engine asks for
capabilities, never for a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from agentkv.engine.attention import attend
from agentkv.engine.core import SLOT, WHOLE, StateGroup
from agentkv.engine.form import Held
from agentkv.engine.received import received
from agentkv.engine.view import AttentionView, DeviceBatch, PageFill, RowMass, Selection
from agentkv.engine.window_mass import WindowMass
from agentkv.errors import BadRequest, EngineFault
from agentkv.kernels.store_kv import Places, store_kv
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a method may know of a model. dtype: of K and V. page_size: slots of a page of KV. scale: of the scores before the
    softmax. windowed: has it layers that see a window only? key_norm: are keys normed by head?"""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: str
    page_size: int
    scale: float
    windowed: bool = False
    fingerprint: str = ""
    vocab_size: int = 0
    key_norm: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State that a method keeps across steps. The engine allocates it from the arena, moves slot state with the slots, gives
    everybody who runs their own copy of mutable state, sends it to tiers and counts it.

    scope: slot (an item for each token; SLOT stands for the token in `shape`), page (an item for each page of KV, made anew by
    `on_pages` when the page is full), sequence (one item). shape: dims of an item, layers and heads included; a unit of slot
    state `(num_layers, SLOT, 4)` is `[num_layers, page_size, 4]`. kind: append (written with its slot, page or sequence, never
    again), mutable. part: of the tail (written token by token), sealed (written by seals), or both: then a seal moves the
    items of the slots that it keeps. page_size: slots of a page, of sealed state that is not of the usual size. beside: of slot
    state of the tail, name and shape of a second array in the same units, which the step gives as a state of that name.
    """

    name: str
    scope: Literal["sequence", "page", "slot"]
    dtype: str
    kind: Literal["append", "mutable"]
    shape: tuple[int, ...] = (SLOT,)
    part: Literal["tail", "sealed", "both"] = "tail"
    page_size: int | None = None
    beside: tuple[str, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        if self.beside is not None and (self.part != "tail" or SLOT not in self.shape or SLOT not in self.beside[1]):
            raise BadRequest(f"state {self.name!r}: only slot state of the tail has another beside it", param="states")
        if self.page_size is not None and (self.part != "sealed" or self.scope == "sequence" or self.page_size < 1):
            raise BadRequest(f"state {self.name!r}: only pages of sealed state have a size of their own", param="states")
        if (self.scope == "slot") is not (SLOT in self.shape):
            raise BadRequest(f"state {self.name!r}: SLOT stands in the shape of slot state, and of no other", param="states")

    def group(self, page_size: int, *, sealed: bool = False) -> StateGroup:
        """Its units, beside pages of KV of that size."""
        size = getattr(torch, self.dtype).itemsize
        page = WHOLE if self.scope == "sequence" else self.page_size or page_size
        beside = () if self.beside is None else self.beside[1]
        return StateGroup(self.name, self.shape, self.dtype, size, page, sealed, self.kind == "mutable", beside=beside)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method's hooks must be given beyond q, k and v.

    query_window: the last W queries of a prompt are kept for its seal. mass_window: (window, stride) where of every `stride`
    logical positions of a prompt only the last `window` queries count towards the mass. hidden_layers: layers whose output
    on_layer_end reads.
    """

    lse: bool = False
    mass: bool = False
    mass_window: tuple[int, int] | None = None
    query_window: int = 0
    k_raw: bool = False
    q_raw: bool = False
    hidden_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """What a seal is to leave, known on the host. floor: logical position from which tokens stay in the tail; slots: most slots
    of the sealed part in a layer and head. mean: most slots of a head on average over those that share a budget, the heads of
    a layer or (across) of all layers, where heads have pages of their own; 0: slots in each. appends: what is sealed already
    stays as it is, in front: only for a method that keeps the same number of slots, `slots`, in every layer and head."""

    floor: int
    slots: int
    mean: int = 0
    across: bool = False
    appends: bool = False


class Most(NamedTuple):
    """The most that a sealed sequence holds: tail: tokens in its tail; keep: its sealed part; again: is it sealed while it
    decodes, so that for a moment there are two (where `keep` appends, of its last pages)? At a prompt's end what is held
    already counts by itself."""

    tail: int
    keep: Keep
    again: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """Which candidates a seal keeps: indices int64 `[num_layers, num_kv_heads, slots]` into `SealJob.candidates`, ascending in
    the first `counts` int32 `[num_layers, num_kv_heads]` of each, anything behind."""

    indices: Tensor
    counts: Tensor


class Plain(NamedTuple):
    """One sequence as plain tensors, for `reference`. By layer: q `[n, num_heads, head_dim]`, k and v
    `[n, num_kv_heads, head_dim]` of n tokens, rotated: a prompt, and the last `decoded` of them one by one behind it; query
    `[num_heads, head_dim]` of the token behind them; x `[n, hidden_size]`, normed, that k and v were made from. replays: by run
    and layer, (q, k) of its tokens. scale: of the scores. own: by layer, (k, v) `[num_kv_heads, head_dim]` of the token behind
    the n; own_x: what they were made from. page_size: slots of a page of KV."""

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    query: Sequence[Tensor]
    x: Sequence[Tensor]
    replays: Sequence[Sequence[tuple[Tensor, Tensor]]]
    scale: float
    own: Sequence[tuple[Tensor, Tensor]] = ()
    own_x: Sequence[Tensor] = ()
    page_size: int = 16
    decoded: int = 0


class Read(NamedTuple):
    """What one query reads of a history, by KV head: positions, ascending, and keys and values `[count, head_dim]` as read.

    The query's token sees its own key and value as they are; a method that reads them in another way adds them here, at
    position n."""

    positions: Sequence[Sequence[int]]
    k: Sequence[Tensor]
    v: Sequence[Tensor]


@dataclass(frozen=True)
class SparseMethod:
    """Base of all methods. The defaults keep every token of every layer, exactly.

    Hooks run in the order in which they stand here. `batch` holds the rows of this method in one phase; token tensors have its
    tokens in front: x `[num_tokens, hidden_size]`, q `[num_tokens, num_heads, head_dim]`, k and v
    `[num_tokens, num_kv_heads, head_dim]`. A hook inside a step may not wait for the device.

    stores: where K and V of new tokens go: into the model's own pages, or (False) into the method's states. seals_into: what
    the sealed part is: pages of all layers and heads (stripe), pages of one head of one layer (head), both with the logical
    position of each slot, or the method's own sealed states (states). graph_safe: the hooks of a decode step may be replayed
    with other rows: they size and choose by the host's bounds only what is right for every shorter row. Where K and V lie in
    pages, also those of a few hundred tokens of prompts: there `batch.rows` names no row, nor where its tokens are.
    """

    family: ClassVar[str] = "full"
    paper: ClassVar[str | None] = None
    evicts: ClassVar[bool] = False
    reuse: ClassVar[Literal["radix", "chain"]] = "radix"
    exactness: ClassVar[Exactness] = "exact"
    counts_on_host: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = True
    kv_kinds: ClassVar[frozenset[str]] = frozenset({"full"})
    stores: ClassVar[bool] = True
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = None
    preparation: ClassVar[str | None] = None

    @property
    def needs(self) -> Needs:
        """What the hooks must be given, by the options."""
        return Needs()

    def unserved(self, model: ModelShape) -> str | None:
        """Why the method does not serve a model; None if it does."""
        if model.windowed and (self.seals_into or not self.stores):
            return "it has layers that see a window only"
        return None

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """Declared state, by the options."""
        return ()

    @property
    def truncates(self) -> bool:
        """Is a row without its newest tokens what it was before them? Only then may tokens be guessed ahead."""
        return self.exactness == "exact" and not self.evicts and self.counts_on_host and self.seals_into is None

    @property
    def fingerprint(self) -> str:
        """Class and every option: KV made under one fingerprint is not reused under another."""
        options = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__module__}:{type(self).__qualname__}({options})"

    # -- on the host: pure functions of lengths

    def keep(self, held: Held) -> Keep | None:
        """The seal that is due: at the end of a prompt, or as timed work between decode steps."""
        return None

    def most(self, prompt: int, tokens: int) -> Most:
        """The most that is held after the seal of a prompt of so many logical tokens, until there are `tokens`. Needed where
        `keep` is."""
        raise NotImplementedError

    def replay_most(self, prompt: int) -> int:
        """Most tokens of one run of `replay` behind a prompt of so many logical tokens; 0 for a method that replays nothing."""
        return 0

    def replay(self, held: Held, token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Tokens that are forwarded behind a prompt before its seal, each run for itself, to be looked at (`batch.replay`);
        their KV is taken back. token_ids: of the tail."""
        return ()

    # -- in a step

    def on_step_begin(self, batch: DeviceBatch) -> None:
        """Before the first layer."""

    def project(self, layer: int, x: Tensor, batch: DeviceBatch) -> None:
        """The normed hidden states that k and v are about to be made from."""

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        """Write the new tokens' KV. k_raw is k before its norm and rotation. Default: into the row's pages; who
        leaves it at that may not be called, see `Lifecycle.places`."""
        store_kv(batch.pages(layer), *batch.places_of(layer), k, v)

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        """Choose what to read; None reads everything held."""
        return None

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """Turn the selection into what attention reads. Default: the sealed part, if there is one, and of the tail what was
        selected, or all of it."""
        sealed = () if batch.sealed is None else (batch.sealed.part(layer),)
        return AttentionView((*sealed, batch.part(layer, selection)))

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        """Attention's output `[num_tokens, num_heads, head_dim]` before the output projection."""
        return out

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        """Scores of a step: lse `[num_tokens, num_heads]` and mass by row where needed, else None; also None where it is
        counted by windows. Of rows that decode one token each mass is a `DecodeMass`; in a captured step there are no rows
        in it."""

    def on_window_mass(self, layers: range, mass: Sequence[RowMass], batch: DeviceBatch) -> None:
        """Of a chunk where mass is counted by windows and a query counts: mass by row, of several layers at once."""

    def on_layer_end(self, layer: int, hidden: Tensor, batch: DeviceBatch) -> None:
        """The layer's output `[num_tokens, hidden_size]`."""

    def on_pages(self, pages: PageFill) -> None:
        """Pages of KV are full, or were changed by a prune: make their page state."""

    def on_chunk_end(self, batch: DeviceBatch) -> None:
        """A chunk of each of the rows has been forwarded through all layers."""

    def on_step_end(self, batch: DeviceBatch) -> None:
        """After the last layer, before sampling."""

    # -- what it should come to

    def reference(self, plain: Plain, layer: int) -> Read:
        """What the token behind a prompt, and what was decoded since, reads in a layer, by the paper's definition on plain
        tensors: an oracle, which shares no function with the rest of the method. Default: everything."""
        heads = range(plain.k[layer].shape[1])
        every = list(range(len(plain.k[layer])))
        return Read([every] * len(heads), *([each[layer][:, head] for head in heads] for each in (plain.k, plain.v)))

    def identity(self, length: int) -> Mapping[str, Any] | None:
        """Options under which sequences of up to `length` tokens read just what full attention reads: a budget of that, wide
        codes, full rank. None: there are none. Default: that `budget`, where there is such an option."""
        return {"budget": length} if self._budgeted else {}

    def small(self, length: int) -> Mapping[str, Any]:
        """Options under which a prompt of `length` tokens already shows what the method does (sixty and more; heads of 32 dims,
        pages of 16 slots): papers' defaults are for longer ones. Default: a `budget` of half of it."""
        return {"budget": length // 2} if self._budgeted else {}

    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        """Most slots, its own included, that a query reads of a head while it decodes behind a prompt of so many tokens, when
        there are `tokens`. Default: all that is held."""
        if self.seals_into is None:
            return tokens
        most = self.most(prompt, tokens)
        return most.tail + most.keep.slots

    @property
    def _budgeted(self) -> bool:
        return any(each.name == "budget" for each in fields(self))

    # -- between steps

    def seal(self, job: SealJob) -> Kept | None:
        """Choose what one sequence keeps, where the sealed part is stripes or heads; where it is states, write them."""
        raise NotImplementedError

    def prune(self, job: SealJob) -> None:
        """Where the sealed part is states: write them anew, as many slots as before, so that tokens of `job.work.removed` are
        not read. States of pages stay as they are. EngineFault where a method cannot."""
        raise EngineFault(f"{self.fingerprint} seals into states of its own, which cannot be pruned")


class Lifecycle:
    """One step's hook calls, for each view class in turn. What the model sees of methods and memory."""

    def __init__(self, batches: Iterable[tuple[SparseMethod, SparseMethod, DeviceBatch]]) -> None:
        self._batches = tuple(batches)
        self._windows = {
            batch.tokens.start: WindowMass(batch, method.needs.mass_window)
            for method, _, batch in self._batches
            if batch.prefill and method.needs.mass and method.needs.mass_window is not None
        }

    def begin(self) -> None:
        """Before the first layer."""
        for method, _, batch in self._batches:
            method.on_step_begin(batch)

    def project(self, layer: int, x: Tensor) -> None:
        """x: `[num_tokens, hidden_size]` of the whole step, normed."""
        for method, _, batch in self._batches:
            method.project(layer, x[batch.tokens], batch)

    def places(self, layer: int) -> Places | None:
        """Where K and V of the whole step are stored as they are: whoever writes them there need not call `store`. None where a
        method's own `store` does it, or there is more than one batch."""
        if len(self._batches) != 1:
            return None
        method, _, batch = self._batches[0]
        plain = type(method).store is SparseMethod.store
        return Places(batch.pages(layer), *batch.places_of(layer)) if plain else None

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor) -> None:
        """k_raw, k, v: `[num_tokens, num_kv_heads, head_dim]` of the whole step."""
        for method, _, batch in self._batches:
            method.store(layer, k_raw[batch.tokens], k[batch.tokens], v[batch.tokens], batch)

    def attend(self, layer: int, q: Tensor, q_raw: Tensor, scale: float) -> Tensor:
        """q: `[num_tokens, num_heads, head_dim]` of the whole step; the output before the output projection."""
        outs = [
            self._attend_one(layer, q[batch.tokens], q_raw[batch.tokens], scale, method, reader, batch)
            for method, reader, batch in self._batches
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_one(
        self, layer: int, q: Tensor, q_raw: Tensor, scale: float, method: SparseMethod, reader: SparseMethod, batch: DeviceBatch
    ) -> Tensor:
        if batch.recent is not None:
            batch.recent.keep(layer, q)
        selection = reader.select(layer, q, q_raw, batch)
        if selection is not None and batch.prefill:
            raise TypeError(f"{type(reader).__name__} selects in prefill, where every slot is read: return None there")
        view, needs = reader.view(layer, selection, batch), method.needs
        done = attend(q, view, batch, scale, lse=needs.lse or needs.mass)
        mass, windows = None, self._windows.get(batch.tokens.start)
        if needs.mass and done.lse is not None:
            if windows is None:
                mass = received(q, view, batch, scale, done.lse)
            else:
                for layers, counted in windows.add(layer, q, view, done.lse, scale):
                    method.on_window_mass(layers, counted, batch)
        out = method.finish(layer, done.out, batch)
        method.on_attention_end(layer, q, out, done.lse, mass, batch)
        return out

    def layer_end(self, layer: int, hidden: Tensor) -> None:
        """hidden: `[num_tokens, hidden_size]` of the whole step."""
        for method, _, batch in self._batches:
            method.on_layer_end(layer, hidden[batch.tokens], batch)

    def end(self) -> None:
        """After the last layer: page, chunk and step hooks."""
        for method, _, batch in self._batches:
            if batch.filled is not None:
                method.on_pages(batch.filled)
            if batch.prefill:
                method.on_chunk_end(batch)
            method.on_step_end(batch)


class SparseController:
    """Holds the methods of an engine, in the order of the runner's forms, and pairs each device batch with its own.

    methods: each owns storage and decode of its rows. prefill: what selects and views in prefill instead, the second axis; by
    method, None is the same method.
    """

    def __init__(self, methods: Sequence[SparseMethod], prefill: Sequence[SparseMethod | None] = ()) -> None:
        self.methods = tuple(methods)
        readers = [*prefill, *[None] * (len(self.methods) - len(prefill))]
        self.prefill = tuple(reader or method for method, reader in zip(self.methods, readers, strict=True))

    def read_by_others(self, form: int) -> bool:
        """Does another method select and view while prompts of the form are read?"""
        return self.prefill[form] != self.methods[form]

    def lifecycle(self, batches: Iterable[DeviceBatch]) -> Lifecycle:
        """The hook calls of one step."""
        readers = self.prefill, self.methods
        return Lifecycle((self.methods[batch.form], readers[not batch.prefill][batch.form], batch) for batch in batches)
