"""For each check of the kit a method that is broken in just that way. `BROKEN` names them by check."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from toys import Edges, Newest, read_at

from agentkv.engine.llm import LLM
from agentkv.engine.sealed import SealJob
from agentkv.engine.sparse import Kept, Most, Plain, Read, RowMass, SparseMethod, StateSpec
from agentkv.engine.view import AttentionView, DeviceBatch, Selection

GRANULES = 1 << 17
WRONG = 0.1
HOME = 7


def first_pages(batch: DeviceBatch) -> Tensor:
    """Granule of the first page of each row, int64."""
    table = batch.groups[0].table
    return table.entries[table.rows, 0].to(torch.int64)


@dataclass(frozen=True)
class Narrow(Edges):
    """budget: its widest options still evict."""

    def identity(self, length: int) -> Mapping[str, Any]:
        return {"budget": length // 2}


@dataclass(frozen=True)
class Misremembered(Edges):
    """reference: says one token less than it keeps."""

    def reference(self, plain: Plain, layer: int) -> Read:
        heads = super().reference(plain, layer).positions
        return read_at(plain, layer, [list(each[1:]) for each in heads])


@dataclass(frozen=True)
class Greedy(Newest):
    """reads: more than it declares."""

    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        return min(self.budget, tokens) - 1


@dataclass(frozen=True)
class Hasty(SparseMethod):
    """append: several tokens of a row at once are not those tokens one by one."""

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        return out + WRONG if not batch.prefill and max(batch.counts) > 1 else out


@dataclass(frozen=True)
class Piecemeal(SparseMethod):
    """chunk: stores chunks that end no prompt otherwise."""

    graph_safe: ClassVar[bool] = False  # it asks the host for rows

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        whole = not batch.prefill or all(span.prompt_end for span in batch.rows)
        super().store(layer, k_raw, k, v if whole else v * (1 + WRONG), batch)


@dataclass(frozen=True)
class Siblings(SparseMethod):
    """fork: mixes up rows that share their first page."""

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        if len(batch.rows) != 2:
            return out
        pages = first_pages(batch)
        return out + (pages[0] == pages[1]) * WRONG


@dataclass(frozen=True)
class Scratch(SparseMethod):
    """Keeps between steps what it should have declared as state: an int64 by first page of a row."""

    graph_safe: ClassVar[bool] = False  # it asks the host for rows

    @cached_property
    def memory(self) -> Tensor:
        return torch.zeros(GRANULES, dtype=torch.int64)

    def strays(self, batch: DeviceBatch, start: Tensor, known: Tensor) -> Tensor:
        """Which rows it takes for something that they are not. start: int64 position of their first token."""
        raise NotImplementedError

    def leaves(self, batch: DeviceBatch, end: Tensor) -> Tensor:
        """What to know of each row from now on. end: int64 position behind its last token."""
        raise NotImplementedError

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        start = torch.tensor([span.position for span in batch.rows])
        strays = (start > 0) & self.strays(batch, start, self.memory[first_pages(batch)])
        return out + (strays.any() * WRONG)

    def on_step_end(self, batch: DeviceBatch) -> None:
        end = torch.tensor([span.position + span.end - span.start for span in batch.rows])
        self.memory[first_pages(batch)] = self.leaves(batch, end)


class Backwards(Scratch):
    """rollback: is lost where a row became much shorter."""

    def strays(self, batch: DeviceBatch, start: Tensor, known: Tensor) -> Tensor:
        return known - start > 50

    def leaves(self, batch: DeviceBatch, end: Tensor) -> Tensor:
        return end


class Settled(Scratch):
    """suspend: is lost where a row comes back in other pages."""

    def strays(self, batch: DeviceBatch, start: Tensor, known: Tensor) -> Tensor:
        return known != HOME

    def leaves(self, batch: DeviceBatch, end: Tensor) -> Tensor:
        return torch.full_like(end, HOME)


class Expectant(Scratch):
    """abort: takes the next prompt for the rest of one that it never saw the end of."""

    def strays(self, batch: DeviceBatch, start: Tensor, known: Tensor) -> Tensor:
        return (known > 0) & (known != start)

    def leaves(self, batch: DeviceBatch, end: Tensor) -> Tensor:
        ended = torch.tensor([span.prompt_end or not batch.prefill for span in batch.rows])
        return torch.where(ended, 0, end)


@dataclass(frozen=True)
class Countless(SparseMethod):
    """prune: takes positions for lengths, and reads what stands behind the slots that a prune left."""

    graph_safe: ClassVar[bool] = False  # it asks the host for rows

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        part = batch.part(layer)
        if batch.prefill:
            return AttentionView((part,))
        lens = tuple(span.position + span.end - span.start for span in batch.rows)
        table = replace(part.table, host_lens=lens, lens=torch.tensor(lens, dtype=torch.int32))
        return AttentionView((replace(part, table=table),))


@dataclass(frozen=True)
class Overfull(Edges):
    """uneven: keeps as many of the smallest keys as the budget says, also where a head has fewer left."""

    def seal(self, job: SealJob) -> Kept:
        assert job.work.seal is not None
        found = [job.candidates(layer) for layer in range(job.shape.num_layers)]
        older = [each.valid & (each.positions < job.work.seal.floor) for each in found]
        norms = [each.k.norm(dim=-1).masked_fill(~mine, torch.inf) for each, mine in zip(found, older, strict=True)]
        indices = torch.stack(norms).argsort(dim=-1, stable=True)[..., : self.first].sort().values
        return Kept(indices, torch.full(indices.shape[:2], self.first, dtype=torch.int32))

    def reference(self, plain: Plain, layer: int) -> Read:
        k, length = plain.k[layer], len(plain.k[layer])
        floor = length - plain.decoded - self.budget + self.first
        best = [sorted(range(floor), key=lambda at, head=head: float(k[at, head].norm())) for head in range(k.shape[1])]
        return read_at(plain, layer, [[*sorted(each[: self.first]), *range(floor, length)] for each in best])


@dataclass(frozen=True)
class Crowded(SparseMethod):
    """batched: a batch of three is one too many."""

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        return out + WRONG if len(batch.rows) > 2 else out


@dataclass(frozen=True)
class Solitary(SparseMethod):
    """several: takes itself for the engine's first method."""

    def finish(self, layer: int, out: Tensor, batch: DeviceBatch) -> Tensor:
        return out + WRONG if batch.form else out


@dataclass(frozen=True)
class Scribbler(SparseMethod):
    """shared: counts visits in append state of a row's first slot, whoever shares it."""

    def states(self, model: Any) -> tuple[StateSpec, ...]:
        return (StateSpec("visits", "slot", "int64", "append"),)

    def on_step_begin(self, batch: DeviceBatch) -> None:
        units, places = batch.state("visits")
        units[places.entries, places.offsets] = units.new_zeros(())
        table = places.table
        units[table.entries[table.rows, 0].to(torch.int64), 0] += 1


class Counter(SparseMethod):
    """hidden: counts steps in its class."""

    seen: ClassVar[list[int]] = [0]

    def on_step_begin(self, batch: DeviceBatch) -> None:
        self.seen[0] += 1


class Thief(SparseMethod):
    """units: takes one from the arena and tells nobody."""

    def on_step_begin(self, batch: DeviceBatch) -> None:
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), LLM):
            assert frame.f_back is not None
            frame = frame.f_back
        llm = frame.f_locals["self"]
        if "stolen" not in vars(llm):
            vars(llm)["stolen"] = llm.arena.allocate(llm.pools.pools[0].cls, 1)


@dataclass(frozen=True)
class Modest(Edges):
    """memory: says that it holds one token less than it does."""

    def most(self, prompt: int, tokens: int) -> Most:
        return super().most(prompt, tokens)._replace(tail=self.budget - self.first - 1 + tokens - prompt)

    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        return super().most_read(layer, prompt, tokens) + 1


class Claimant(SparseMethod):
    """evicts: says so, and holds everything."""

    evicts: ClassVar[bool] = True


@dataclass(frozen=True)
class Possessive(SparseMethod):
    """reuse: stores a prompt otherwise behind a prefix that somebody else has read."""

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        span = batch.rows[0]
        behind = batch.prefill and span.prompt_end and span.position > 0 and span.position % 16 == 0 and batch.counts[0] > 16
        super().store(layer, k_raw, k, v * (1 + WRONG) if behind else v, batch)


@dataclass(frozen=True)
class Short(Edges):
    """counts: one head keeps fewer slots than it said, though counts_on_host."""

    def seal(self, job: SealJob) -> Kept:
        kept = super().seal(job)
        kept.counts[:, 0] -= 1
        return kept

    def reference(self, plain: Plain, layer: int) -> Read:
        heads = [list(each) for each in super().reference(plain, layer).positions]
        heads[0].remove(self.first - 1)
        return read_at(plain, layer, heads)


@dataclass(frozen=True)
class Fickle(SparseMethod):
    """graph: does something more in every other step."""

    def on_step_end(self, batch: DeviceBatch) -> None:
        if batch.rows[0].position % 2:
            batch.positions.sum()


@dataclass(frozen=True)
class Curious(SparseMethod):
    """needs: looks at unrotated keys, and has not asked for them."""

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        super().store(layer, k_raw, k + 0 * k_raw, v, batch)


@dataclass(frozen=True)
class Impatient(SparseMethod):
    """waits: for a value, in one of several ways."""

    graph_safe: ClassVar[bool] = False

    way: str = "item"

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        positions = batch.positions
        ways = {
            "item": lambda: positions.max().item(),
            "tolist": lambda: positions.tolist(),
            "numpy": lambda: positions.numpy(),
            "nonzero": lambda: torch.nonzero(positions),
            "where": lambda: torch.where(positions > 1),
            "bool": lambda: bool(positions[0] > 1),
            "int": lambda: int(positions[0]),
            "mask": lambda: positions[positions > 1],
            "unique": lambda: positions.unique(),
            "repeat": lambda: positions.repeat_interleave(torch.ones_like(positions)),
            "number": lambda: operator.setitem(q.clone(), torch.zeros_like(positions), 0.0),
        }
        if self.way == "sized":
            q.clone()[torch.zeros_like(positions)] = q.new_zeros(())
            q.clone()[:, 0] = 0.0
            positions.repeat_interleave(2)
            positions.repeat_interleave(torch.ones_like(positions), output_size=len(positions))
        else:
            ways[self.way]()


BROKEN: dict[str, type[SparseMethod]] = {
    "budget": Narrow,
    "reference": Misremembered,
    "reads": Greedy,
    "append": Hasty,
    "chunk": Piecemeal,
    "fork": Siblings,
    "rollback": Backwards,
    "suspend": Settled,
    "prune": Countless,
    "uneven": Overfull,
    "abort": Expectant,
    "batched": Crowded,
    "several": Solitary,
    "shared": Scribbler,
    "hidden": Counter,
    "units": Thief,
    "memory": Modest,
    "evicts": Claimant,
    "reuse": Possessive,
    "counts": Short,
    "graph": Fickle,
    "needs": Curious,
    "waits": Impatient,
}
