"""The lifecycle contract between the engine and an attention method, and the calls that honour it.

A method is one frozen dataclass: its fields are its options, its class attributes say what it is. The engine asks for
capabilities, never for a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.attention import Attended, attend
from agentkv.engine.core import StateGroup
from agentkv.engine.view import AttentionView, DeviceBatch, PagedKV, Part
from agentkv.errors import BadRequest
from agentkv.kernels.store_kv import store_kv
from agentkv.types import Exactness


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State that a method keeps across steps. The engine allocates it from the arena, moves slot state with the slots,
    copies mutable state at each checkpoint, sends it to tiers and counts it.

    shape: dims of one item (a sequence's, a layer's, a KV head's or a slot's). kind: append (grows, never rewritten), slot
    (travels with its slot), mutable.
    """

    name: str
    scope: Literal["sequence", "layer", "head", "slot"]
    dtype: str
    kind: Literal["append", "slot", "mutable"]
    shape: tuple[int, ...] = ()

    def group(self, page_size: int) -> StateGroup:
        """Its pages, beside KV pages of that size. Raises BadRequest for what the engine does not keep yet."""
        if self.scope != "slot" or self.kind == "mutable":
            raise BadRequest(
                f"state {self.name!r}: scope {self.scope}, kind {self.kind} is not kept yet",
                hint="State with scope slot, written with its slot and not again, is",
            )
        return StateGroup(self.name, self.shape, self.dtype, getattr(torch, self.dtype).itemsize, page_size)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method's hooks must be given beyond q, k and v.

    query_window: the last W queries of a prompt are kept for on_prompt_end. hidden_layers: layers whose output
    on_layer_end reads.
    """

    lse: bool = False
    mass: bool = False
    query_window: int = 0
    k_raw: bool = False
    q_raw: bool = False
    hidden_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """Slots that attention may read, chosen without deleting the others.

    slots: int32 `[num_rows, (num_kv_heads,) count]` in each row's physical order. lens: int32 `[num_rows, (num_kv_heads)]`.
    """

    slots: Tensor
    lens: Tensor


@dataclass(frozen=True, slots=True)
class Replay:
    """A forward pass over a temporary fork whose KV is discarded.

    tokens, positions: what is forwarded, and where. reads: physical slots that may be read. on_layer(layer, q, k) receives
    each layer's rotated queries and keys.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    reads: range
    on_layer: Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class SparseMethod:
    """Base of all methods. The defaults keep every token of every layer, exactly.

    Hooks run in the order in which they stand here. `batch` holds the rows of this method's view class in one phase; token
    tensors have its tokens in front: x `[num_tokens, hidden_size]`, q `[num_tokens, num_heads, head_dim]`, k and v
    `[num_tokens, num_kv_heads, head_dim]`. A hook inside a step may not wait for the device.
    """

    family: ClassVar[str] = "full"
    paper: ClassVar[str | None] = None
    evicts: ClassVar[bool] = False
    reuse: ClassVar[Literal["radix", "chain"]] = "radix"
    exactness: ClassVar[Exactness] = "exact"
    counts_on_host: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = True
    kv_kinds: ClassVar[frozenset[str]] = frozenset({"full"})

    @property
    def needs(self) -> Needs:
        """What the hooks must be given, by the options."""
        return Needs()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Declared state, by the options."""
        return ()

    @property
    def truncates(self) -> bool:
        """Is a row without its newest tokens what it was before them? Only then may tokens be guessed ahead."""
        kept = self.exactness == "exact" and not self.evicts and self.counts_on_host
        return kept and all(state.kind == "append" for state in self.states)

    @property
    def fingerprint(self) -> str:
        """Class and every option: KV made under one fingerprint is not reused under another."""
        options = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__module__}:{type(self).__qualname__}({options})"

    def on_step_begin(self, batch: DeviceBatch) -> None:
        """Before the first layer."""

    def project(self, layer: int, x: Tensor, batch: DeviceBatch) -> None:
        """The normed hidden states that k and v are about to be made from."""

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        """Write the new tokens' KV. k_raw is k before its norm and rotation. Default: into the row's pages."""
        store_kv(batch.pages(layer), *batch.places_of(layer), k, v)

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        """Choose what to read; None reads everything held."""
        return None

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """Turn the selection into what attention reads. Default: all that the rows' pages hold."""
        if selection is not None:
            raise TypeError(f"{type(self).__name__} selects, so it must say how its selection is viewed")
        return AttentionView((Part(PagedKV(batch.pages(layer)), batch.table_of(layer)),))

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        """Attention's output `[num_tokens, num_heads, head_dim]` before the output projection."""
        return out

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Tensor | None, batch: DeviceBatch
    ) -> None:
        """Scores of a step: lse and mass where needed, else None."""

    def on_layer_end(self, layer: int, hidden: Tensor, batch: DeviceBatch) -> None:
        """The layer's output `[num_tokens, hidden_size]`."""

    def on_chunk_end(self, batch: DeviceBatch) -> None:
        """A chunk of each of the rows has been forwarded through all layers."""

    def on_prompt_end(self, batch: DeviceBatch) -> Replay | None:
        """The rows' prompts are complete (seal); a Replay asks for one more forward pass before the first token."""
        return None

    def on_step_end(self, batch: DeviceBatch) -> None:
        """After the last layer, before sampling."""

    def on_turn_end(self, rows: Sequence[int]) -> None:
        """The rows' sequences are about to be committed."""

    def due(self, lengths: Mapping[int, int]) -> tuple[int, ...]:
        """Rows whose physical length calls for timed work. A pure function of {row: length}, on the host."""
        return ()

    def maintain(self, rows: Sequence[int]) -> None:
        """Timed work between steps; may allocate."""


class Lifecycle:
    """One step's hook calls, for each view class in turn. What the model sees of methods and memory."""

    def __init__(self, batches: Iterable[tuple[SparseMethod, SparseMethod, DeviceBatch]]) -> None:
        self._batches = tuple(batches)

    def begin(self) -> None:
        """Before the first layer."""
        for method, _, batch in self._batches:
            method.on_step_begin(batch)

    def project(self, layer: int, x: Tensor) -> None:
        """x: `[num_tokens, hidden_size]` of the whole step, normed."""
        for method, _, batch in self._batches:
            method.project(layer, x[batch.tokens], batch)

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
        selection = reader.select(layer, q, q_raw, batch)
        done: Attended = attend(q, reader.view(layer, selection, batch), batch, scale)
        out = method.finish(layer, done.out, batch)
        method.on_attention_end(layer, q, out, done.lse, done.mass, batch)
        return out

    def layer_end(self, layer: int, hidden: Tensor) -> None:
        """hidden: `[num_tokens, hidden_size]` of the whole step."""
        for method, _, batch in self._batches:
            method.on_layer_end(layer, hidden[batch.tokens], batch)

    def end(self) -> tuple[Replay, ...]:
        """After the last layer: chunk, prompt and step hooks. The replays that methods ask for."""
        replays: list[Replay] = []
        for method, _, batch in self._batches:
            if batch.prefill:
                method.on_chunk_end(batch)
            if any(span.prompt_end for span in batch.rows):
                replay = method.on_prompt_end(batch)
                replays += [replay] if replay is not None else []
            method.on_step_end(batch)
        return tuple(replays)


class SparseController:
    """Holds the methods of an engine and pairs each device batch with its own.

    method: owns storage and decode. prefill: what selects and views in prefill, the second axis; None is the same method.
    """

    def __init__(self, method: SparseMethod, prefill: SparseMethod | None = None) -> None:
        self.method = method
        self.prefill = prefill or method

    def lifecycle(self, batches: Iterable[DeviceBatch]) -> Lifecycle:
        """The hook calls of one step."""
        return Lifecycle((self.method, self.prefill if batch.prefill else self.method, batch) for batch in batches)

    def maintain(self, lengths: Mapping[int, int]) -> tuple[int, ...]:
        """Do the timed work that lengths {row: slots} make due; the rows it was done for."""
        rows = self.method.due(lengths)
        if rows:
            self.method.maintain(rows)
        return rows

    def turn_end(self, rows: Sequence[int]) -> None:
        """Before the rows' sequences are committed."""
        self.method.on_turn_end(rows)
