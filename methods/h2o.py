"""Heavy hitters: the tokens that received most attention so far stay, beside the newest (arXiv 2306.14048)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.core import SLOT
from agentkv.engine.form import Held
from agentkv.engine.sparse import Keep, Kept, ModelShape, Most, Needs, Plain, Read, SparseMethod, StateSpec
from agentkv.engine.view import AttentionView, DecodeMass, DeviceBatch, PagedKV, Part, RowMass, Selection
from agentkv.kernels.kept_scores import DEAD, ScorePages, grow, hiding, strike_lowest
from agentkv.kernels.reference import probabilities
from agentkv.kernels.top_positions import top_positions
from agentkv.types import Exactness

if TYPE_CHECKING:
    from agentkv.engine.sealed import SealJob

_PAGE = 16
_LEAST = 1e-6
_NEVER = 2**31 - 1
"""A budget of which no head has more."""


@dataclass(frozen=True)
class H2O(SparseMethod):
    """By layer and KV head `heavy` tokens stay of those older than the newest `recent`: whose scores are the highest. A score
    is the attention that a token received from every query so far, summed over the query heads of its KV head (the paper has
    one each). Of equal scores that of the lower position stays.

    heavy, recent: tokens, or both shares of the prompt (the paper's code: 0.1 each, at least one token). A share's budget
    stands until the next prompt. eviction: "step" (the paper): as soon as there are more, one token of each head goes in each
    decode step, at once hidden, and every `interval` steps its memory is returned; "interval": nothing goes between. window,
    stride: of every `stride` tokens of a prompt only the last `window` queries count, which costs little: a prompt that is
    shorter has no scores. window=0: every query does (the paper), which takes the products of queries and keys once more.
    """

    heavy: float = 0.1
    recent: float = 0.1
    interval: int = 128
    eviction: Literal["step", "interval"] = "step"
    window: int = 0
    stride: int = 2048

    family: ClassVar[str] = "eviction"
    paper: ClassVar[str | None] = "arXiv 2306.14048"
    evicts: ClassVar[bool] = True
    reuse: ClassVar[Literal["radix", "chain"]] = "chain"
    exactness: ClassVar[Exactness] = "lossy"
    counts_on_host: ClassVar[bool] = False
    seals_into: ClassVar[Literal["stripe", "head", "states"] | None] = "stripe"

    def __post_init__(self) -> None:
        for name, value in (("heavy", self.heavy), ("recent", self.recent)):
            if isinstance(value, bool) or not (value >= 1 if isinstance(value, int) else _LEAST <= value < 1):
                raise ValueError(f"{name}={value!r}: tokens, at least 1, or a share of the prompt, {_LEAST} to 1.0")
        if isinstance(self.heavy, int) is not isinstance(self.recent, int):
            raise ValueError(f"heavy={self.heavy!r}, recent={self.recent!r}: both are tokens, or both are shares")
        if isinstance(self.heavy, float) and self.heavy + self.recent >= 1:
            raise ValueError(f"heavy={self.heavy}, recent={self.recent}: together they are less than 1.0")
        if self.interval < 1:
            raise ValueError(f"interval={self.interval}: decode steps, at least 1")
        if isinstance(self.window, bool) or not 0 <= self.window <= self.stride:
            raise ValueError(f"window={self.window!r}: queries of each stride={self.stride}, or 0 for all")
        if self.eviction not in ("step", "interval"):
            raise ValueError(f"eviction={self.eviction!r}: step or interval")

    @property
    def needs(self) -> Needs:
        """The attention that each slot receives."""
        return Needs(mass=True, mass_window=(self.window, self.stride) if self.window else None)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """The scores."""
        return (StateSpec("score", "slot", "float32", "mutable", (model.num_layers, model.num_kv_heads, SLOT), "both"),)

    def keep(self, held: Held) -> Keep | None:
        """At a prompt's end, when a sequence outgrows its budget, and every `interval` steps."""
        standing = held.slots if held.slots and not held.prompt_end else 0
        heavy, recent = self._budget(held.tokens, standing)
        most = heavy + recent if not held.slots else 0 if held.prompt_end else recent + self.interval - 1
        return Keep(max(held.floor, held.tokens - recent), heavy) if held.tail > most else None

    def most(self, prompt: int, tokens: int) -> Most:
        """What `keep` leaves, and the steps until it is due again."""
        heavy, recent = self._budget(prompt)
        tail = recent + self.interval
        if prompt <= heavy + recent:  # sealed when it has grown
            heavy, recent = self._budget(tokens)
            tail = heavy + recent + self.interval
        return Most(min(tokens, tail), Keep(max(0, prompt - recent), min(heavy, tokens)), again=True)

    def on_step_begin(self, batch: DeviceBatch) -> None:
        """New tokens have received nothing."""
        units, places = batch.state("score")
        units[places.entries, :, :, places.offsets] = units.new_zeros(())  # a plain 0 would be copied from the host

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """Where a token may have been evicted (so there is a sealed part), the evicted ones are hidden."""
        if batch.sealed is None or self.eviction == "interval":
            return super().view(layer, selection, batch)
        sealed, (units, places) = batch.sealed.part(layer), batch.state("score")
        if not batch.prefill:
            front, back = self._scores(batch)
            assert front is not None
            sealed = replace(sealed, bias=hiding(front, layer))
            table = batch.table_of(layer).from_front
            return AttentionView((sealed, Part(PagedKV(batch.pages(layer)), table, hiding(back, layer))))
        before, own = batch.table_of(layer).apart(batch.counts)
        payload, tail = PagedKV(batch.pages(layer)), places.table.apart(batch.counts)[0]
        return AttentionView(
            (
                replace(sealed, bias=_hiding(*batch.sealed.state("score"), layer)),
                Part(payload, before, _hiding(units, tail.entries, layer)),
                Part(payload, own),
            )
        )

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        """Every slot's score grows by what it received."""
        if isinstance(mass, DecodeMass):
            front, back = self._scores(batch)
            if front is not None and mass.sealed is not None:
                grow(front, layer, mass.sealed)
            grow(back, layer, mass.tail)
            return
        if mass is not None:
            self.on_window_mass(range(layer, layer + 1), [row.of_layers() for row in mass], batch)

    def on_window_mass(self, layers: range, mass: Sequence[RowMass], batch: DeviceBatch) -> None:
        """The same in several layers."""
        units, places = batch.state("score")
        units = units[:, layers.start : layers.stop]
        for index, row in enumerate(mass):
            received = row.tail if row.sealed is None else torch.cat([row.sealed, row.tail], 2)
            slots = 0 if batch.sealed is None else batch.sealed.host_slots[index]
            if batch.sealed is not None and slots:
                olds, lines = batch.sealed.state("score")
                place = torch.arange(slots, device=received.device)
                given = received[..., :slots].permute(2, 0, 1).to(olds.dtype)
                olds[:, layers.start : layers.stop][lines[index, place // _PAGE], :, :, place % _PAGE] += given
            pages, mine = places.table.by_page(index, received[..., slots:].flatten(0, 1))
            units[pages] += mine.reshape(len(pages), *units.shape[1:]).to(units.dtype)

    def on_step_end(self, batch: DeviceBatch) -> None:
        """In each head that holds more than its budget, the lowest score older than the recent tokens dies."""
        if batch.prefill or batch.sealed is None or self.eviction == "interval":
            return
        front, back = self._scores(batch)
        assert front is not None
        bounds = batch.sealed.bounds
        if isinstance(self.heavy, int):
            heavy, recent = torch.full_like(bounds, self.heavy), torch.full_like(bounds, int(self.recent))
        else:
            heavy, recent = bounds, (bounds.double() * (self.recent / self.heavy)).to(torch.int64).clamp(min=1)
        heavy = torch.where(bounds > 0, heavy, _NEVER)  # nobody has died where no prompt was sealed
        older = (back.ends - recent.view(-1, 1, 1)).to(torch.int32)
        strike_lowest(front, back._replace(ends=older), heavy.to(torch.int32))

    def seal(self, job: SealJob) -> Kept:
        """The heavy ones among the living that are older than what stays in the tail."""
        assert job.work.seal is not None
        floor, scores = job.work.seal.floor, job.items("score")
        stay = sum(max(0, end - max(start, floor)) for start, end in job.work.runs)
        older = scores.shape[2] - stay
        if not job.candidates(0).whole:
            valid = torch.stack([job.candidates(layer).valid for layer in range(len(scores))])
            scores = scores.masked_fill(~valid, DEAD)
        scores = scores[..., :older]
        counts = (scores >= 0).sum(2, dtype=torch.int32).clamp(max=job.work.seal.slots)
        chosen = top_positions(scores, min(job.work.seal.slots, older), counts=counts)
        return Kept(chosen.to(torch.int64), counts)

    def identity(self, length: int) -> Mapping[str, Any]:
        """See SparseMethod."""
        return {"heavy": length, "recent": length}

    def small(self, length: int) -> Mapping[str, Any]:
        """A seal during the answer, too."""
        return {"interval": 8}

    def reference(self, plain: Plain, layer: int) -> Read:
        """Scores query by query and token by token, sorted in Python."""
        k, v, length = plain.k[layer], plain.v[layer], len(plain.k[layer]) - plain.decoded
        given = probabilities(plain.q[layer][:length], k[:length], plain.scale, range(1, length + 1))
        if self.window:
            given = given[:, [i for i in range(length) if i % self.stride >= self.stride - self.window]]
        heavy, recent = self.heavy, self.recent
        if isinstance(heavy, float):
            heavy = max(1, int(heavy * length))
            recent = max(1, int(heavy * (self.recent / self.heavy)))
        group, positions = len(given) // k.shape[1], []
        for head, scores in enumerate(given.sum(1).view(k.shape[1], group, length).sum(1).tolist()):
            kept, floor = list(range(length)), 0
            for count in range(length, len(k) + 1):
                tail = count - floor
                if self.eviction == "step" or tail > (recent + self.interval - 1 if floor else heavy + recent):
                    floor = count - int(recent)
                    best = sorted((at for at in kept if at < count - recent), key=lambda at: (-scores[at], at))
                    kept = sorted([*best[: int(heavy)], *(at for at in kept if at >= count - recent)])
                if count < len(k):
                    kept.append(count)
                    scores.append(0.0)
                    queries = plain.q[layer][count, head * group : (head + 1) * group].double()
                    received = torch.softmax(queries @ k[kept, head].double().T * plain.scale, 1).sum(0)
                    for at, more in zip(kept, received.tolist(), strict=True):
                        scores[at] += more
            positions.append(kept)
        return Read(positions, *([x[seen, head] for head, seen in enumerate(positions)] for x in (k, v)))

    def _scores(self, batch: DeviceBatch) -> tuple[ScorePages | None, ScorePages]:
        """Of decode rows: those of the sealed part, if there is one, and those of the tail. Found once a step."""
        if "scores" not in batch.scratch:
            units, places = batch.state("score")
            table, front = places.table.from_front, None
            widest = max(*table.host_lens, *batch.table_of(0).from_front.host_lens)  # captured, their bounds may differ
            count = -(-widest // table.page_size)
            pages = table.entries[:, :count].to(torch.int64)
            pages = torch.nn.functional.pad(pages, (0, count - pages.shape[1]))
            ends = table.lens.view(-1, 1, 1).expand(-1, *units.shape[1:3])
            if batch.sealed is not None:
                olds, lines = batch.sealed.state("score")
                front = ScorePages(olds, lines, torch.zeros_like(table.lens), batch.sealed.all_lens())
            batch.scratch["scores"] = front, ScorePages(units, pages.contiguous(), places.table.hidden, ends)
        found: tuple[ScorePages | None, ScorePages] = batch.scratch["scores"]
        return found

    def _budget(self, tokens: int, standing: int = 0) -> tuple[int, int]:
        """heavy and recent for so many tokens of a prompt. standing: slots that the last prompt's seal left."""
        if isinstance(self.heavy, int):
            return self.heavy, int(self.recent)
        heavy = standing or max(1, int(tokens * self.heavy))
        return heavy, max(1, int(heavy * (self.recent / self.heavy)))


def _hiding(units: Tensor, lines: Tensor, layer: int) -> Tensor:
    """-inf for what is dead, else 0: `[num_rows, num_kv_heads, slots]`. lines: `[num_rows, num_units]`."""
    scores = units[:, layer][lines.to(torch.int64)].transpose(1, 2).flatten(2)
    return torch.zeros_like(scores).masked_fill_(scores < 0, -torch.inf)
