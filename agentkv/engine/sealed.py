"""Sealed parts on the device: what attention reads of them in a step, and the job of writing one between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentkv.engine.sparse import ModelShape
from agentkv.engine.view import Part
from agentkv.engine.work import SealWork


class SealedRows(Protocol):
    """The sealed parts of a batch's rows. max_slots: most slots of a row in a layer and head, known on the host; host_slots:
    the same by row; bounds: the same int64 `[num_rows]` on the device, exact in a captured step, too. A row without a sealed
    part has length 0."""

    max_slots: int
    host_slots: tuple[int, ...]
    bounds: Tensor

    def part(self, layer: int) -> Part:
        """What attention reads in the layer: every query of a row sees all of the row's slots."""
        ...

    def lens(self, layer: int) -> Tensor:
        """Slots held, int32 `[num_rows, num_kv_heads]`."""
        ...

    def all_lens(self) -> Tensor:
        """The same of all layers, int32 `[num_rows, num_layers, num_kv_heads]`."""
        ...

    def positions(self, layer: int) -> Tensor:
        """Logical position of each slot, ascending, int32 `[num_rows, num_kv_heads, max_slots]`; anything behind `lens`."""
        ...

    def state(self, name: str) -> tuple[Tensor, Tensor]:
        """Units of a sealed state `[num_granules, *shape]`, and each row's units int64 `[num_rows, max_units]`; anything behind
        those that the row has."""
        ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a seal chooses from in one layer: the slots of the old sealed part, if it is one of K and V, then the tokens of the
    tail.

    positions: int32 `[num_kv_heads, n]`, logical. valid: bool `[num_kv_heads, n]`: heads may have fewer sealed slots than
    others; whole: the host knows that all are. tail: index from which the tail's tokens stand; the last is the newest.
    gather: K (0) or V (1); k and v ask for it anew each time.
    """

    gather: Callable[[int], Tensor]
    positions: Tensor
    valid: Tensor
    tail: int
    whole: bool = False

    @property
    def k(self) -> Tensor:
        """`[num_kv_heads, n, head_dim]`."""
        return self.gather(0)

    @property
    def v(self) -> Tensor:
        """The same of values."""
        return self.gather(1)


class SealJob(Protocol):
    """One sequence's seal, as the method sees it. Nothing here waits for the device."""

    work: SealWork
    shape: ModelShape

    def candidates(self, layer: int) -> Candidates:
        """What the layer may keep: see Candidates. EngineFault where the method does not store K and V in the model's pages."""
        ...

    def tail(self, layers: range, at: Tensor) -> tuple[Tensor, Tensor]:
        """K and V `[num_layers, num_kv_heads, n, head_dim]` of tokens of the tail, int64 `[n]`, in several layers at once.
        EngineFault as above, and where the tail is empty."""
        ...

    def positions(self) -> Tensor:
        """Logical position of each of the tail's tokens, ascending, int32 `[tail tokens]`."""
        ...

    def queries(self, layer: int) -> Tensor:
        """The newest queries of the prompt `[w, num_heads, head_dim]`, rotated, oldest first; w is the method's query window,
        or as many as have been forwarded since the last seal, where those are fewer."""
        ...

    def observed(self, layers: range) -> Tensor | None:
        """Attention that these queries give to each candidate, by layer and query head, summed over the queries: float32
        `[num_layers, num_heads, n]`. None where it is not read from the pages: for that the candidates are those of the tail
        alone, on a GPU, with a query at least."""
        ...

    def items(self, name: str) -> Tensor:
        """Items of slot state that belong to the candidates, in their order: `[*shape with the candidates at SLOT]`. State of
        the tail alone has items of the tail's tokens alone, sealed state of the sealed slots alone."""
        ...

    def old(self, name: str) -> tuple[Tensor, Tensor]:
        """Units of a sealed state `[num_granules, *shape]`, and the old part's int64 `[num_units]`."""
        ...

    def new(self, name: str) -> tuple[Tensor, Tensor]:
        """The same of the part that is to be written; the first `work.seal.keeps` are the old part's."""
        ...
