"""A few layers read everything and say which tokens the layers between them read (OmniKV, ICLR 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.choosing import best_slots
from agentkv.engine.preparation import Observers, Preparation, check_observers, read_observers, write_observers
from agentkv.engine.sparse import ModelShape, Needs, Plain, Read, SparseMethod
from agentkv.engine.view import AttentionView, DeviceBatch, RowMass, Selection
from agentkv.kernels.layer_coverage import choose_observers, coverage, mean_coverage
from agentkv.kernels.slot_mass import slot_mass, slot_peaks
from agentkv.types import Exactness


def places(num_layers: int) -> tuple[int, ...]:
    """Observers of a model that was not profiled: the paper's 2, 8 and 18 of 32 layers, scaled."""
    return tuple(sorted({num_layers * place // 32 for place in (2, 8, 18)}))


@dataclass(frozen=True)
class OmniKV(SparseMethod):
    """Each decode step, layers behind an observer read the tokens that it scored highest.

    Observers attend to everything, layers before the first too. What one chooses holds until the next, for all heads. Of equal
    tokens the earlier is read.

    budget: tokens that are read, sinks and recent ones included; or a share of what is held (the paper's code: 0.067 of the
    prompt). observers: layers, () for `places`. prepared: a file of `agentkv methods prepare omnikv`, instead of observers.
    wait: layers behind each observer that read everything too (the paper's code: 1, while it loads). score: of a token, the
    most that a query head gives: "probability" (the paper's code: softmax_before_last), or "logit" (its default, last).
    sinks: first tokens that are always read. recent: newest tokens that are, in place of the whole answer as in the paper's
    code, whose reading grows with it: here older tokens of the answer compete.
    """

    budget: int | float = 2048
    observers: tuple[int, ...] = ()
    prepared: str | Observers | None = None
    wait: int = 0
    score: Literal["probability", "logit"] = "probability"
    sinks: int = 0
    recent: int = 32

    family: ClassVar[str] = "dynamic"
    paper: ClassVar[str | None] = "OmniKV, ICLR 2025"
    exactness: ClassVar[Exactness] = "lossy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "observers", check_observers(self.observers))
        for name, value, least in (("wait", self.wait, 0), ("sinks", self.sinks, 0), ("recent", self.recent, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: an int of {least} or more")
        least, budget = self.sinks + self.recent, self.budget
        if isinstance(budget, bool) or not (budget >= least if isinstance(budget, int) else 0 < budget <= 1):
            raise ValueError(f"budget={budget!r}: tokens, at least sinks + recent = {least}, or a share of 0.0 to 1.0")
        if self.score not in ("probability", "logit"):
            raise ValueError(f"score={self.score!r}: 'probability' or 'logit'")
        if self.observers and self.prepared is not None:
            raise ValueError("observers and prepared: give one of them")
        if isinstance(self.prepared, str):
            # so that the fingerprint says what is in the file
            object.__setattr__(self, "prepared", read_observers(self.prepared))

    @property
    def needs(self) -> Needs:
        """What probabilities are made with."""
        return Needs(lse=True)

    def unserved(self, model: ModelShape) -> str | None:
        """Observers are layers of this model, and see everything."""
        if model.windowed:
            return "it has layers that see a window only"
        if isinstance(self.prepared, Observers) and self.prepared.model != model.fingerprint:
            return "prepared: the file was made for another model; make one with `agentkv methods prepare omnikv`"
        if self._observers(model.num_layers)[-1] >= model.num_layers:
            return f"observers={self._observers(model.num_layers)}: its layers are 0 to {model.num_layers - 1}"
        return None

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        """What the layer's observer chose."""
        chosen: Selection | None = batch.scratch.get("chosen")
        return None if chosen is None or self._observer(layer, len(batch.group_of)) is None else chosen

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """An observer's scores are kept, if they can be."""
        (part,) = super().view(layer, selection, batch).parts
        if selection is None and self._observes(layer, batch):
            batch.scratch["record"] = []
            part = replace(part, record=batch.scratch["record"])
        return AttentionView((part,))

    def on_attention_end(
        self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, mass: Sequence[RowMass] | None, batch: DeviceBatch
    ) -> None:
        """An observer chooses, unless no row has more than its budget."""
        if not self._observes(layer, batch):
            return
        assert lse is not None
        pages, table = batch.pages(layer), batch.table_of(layer)
        # one number for all heads leaves their logits in order
        tops = lse if self.score == "probability" else lse.amax(1, keepdim=True).expand_as(lse)
        recorded = batch.scratch.pop("record")
        if recorded:
            scores = slot_peaks(recorded[0], tops, table.lens)
        else:
            heads, _ = table.visible(pages.shape[1])
            lines = heads.entries, heads.rows, heads.lens
            scores = slot_mass(q, pages, *lines, tops, batch.scale, max_len=heads.max_slots, reduce="max").amax(1)
        most = max(self._tokens(length) for length in table.host_lens)
        counts = torch.full_like(table.lens, most)
        if isinstance(self.budget, float):
            counts = (table.lens.double() * self.budget).ceil().clamp(min=self.sinks + self.recent).to(torch.int32)
        batch.scratch["chosen"] = best_slots(
            scores, most, counts, table, pages.shape[1], protect_first=self.sinks, protect_last=self.recent
        )

    def small(self, length: int) -> Mapping[str, Any]:
        """The first of few layers observes."""
        options = {"budget": length // 2, "sinks": 2, "recent": 4}
        return options if self.prepared else options | {"observers": (0,)}

    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        """The budget, where it is known by the options which layers observe."""
        known = self.observers or (self.prepared.layers if isinstance(self.prepared, Observers) else ())
        return tokens if self._behind(layer, known) is None else min(tokens, self._tokens(tokens))

    def reference(self, plain: Plain, layer: int) -> Read:
        """Scores of each query head one by one, sorted in Python."""
        layers, length = len(plain.k), len(plain.k[layer])
        named = self.prepared.layers if isinstance(self.prepared, Observers) else self.observers
        named = named or tuple(int(layers * part / 32) for part in (2, 8, 18))
        observer = max((each for each in named if each <= layer), default=layer)
        budget = self.budget
        if isinstance(budget, float):
            budget = max(self.sinks + self.recent, ceil((length + 1) * budget))
        if observer + self.wait >= layer or budget > length:
            return super().reference(plain, layer)
        k, query = torch.cat([plain.k[observer], plain.own[observer][0].unsqueeze(0)]), plain.query[observer]
        group, scores = len(query) // k.shape[1], [-torch.inf] * (length + 1)
        for head, one in enumerate(query):
            given = k[:, head // group] @ one * plain.scale
            given = given if self.score == "logit" else torch.softmax(given, 0)
            scores = [max(pair) for pair in zip(scores, given.tolist(), strict=True)]
        kept = {*range(self.sinks), *range(length + 1 - self.recent, length + 1)}
        best = sorted(set(range(length)) - kept, key=lambda at: (-scores[at], at))
        seen = sorted({*kept, *best[: budget - len(kept)]} - {length})
        heads = range(plain.k[layer].shape[1])
        return Read([seen for _ in heads], *([x[seen, head] for head in heads] for x in (plain.k[layer], plain.v[layer])))

    def _observers(self, num_layers: int) -> tuple[int, ...]:
        if isinstance(self.prepared, Observers):
            return self.prepared.layers
        return self.observers or places(num_layers)

    def _observes(self, layer: int, batch: DeviceBatch) -> bool:
        """Does the layer choose in this step?"""
        if batch.prefill or layer not in self._observers(len(batch.group_of)):
            return False
        return any(length > self._tokens(length) for length in batch.table_of(layer).host_lens)

    def _observer(self, layer: int, num_layers: int) -> int | None:
        return self._behind(layer, self._observers(num_layers))

    def _behind(self, layer: int, observers: tuple[int, ...]) -> int | None:
        """Whose choice the layer reads; None where it reads everything."""
        before = [each for each in observers if each <= layer]
        return before[-1] if before and layer - before[-1] > self.wait else None

    def _tokens(self, length: int) -> int:
        """Tokens that are read of so many."""
        if isinstance(self.budget, int):
            return self.budget
        return max(self.sinks + self.recent, ceil(length * self.budget))


def prepare(
    model: Preparation,
    texts: Sequence[Sequence[int]],
    out: Path,
    *,
    full: int | None = None,
    share: float = 0.067,
    tokens: int = 1024,
) -> dict[str, Any]:
    """Write the observers of a model to `out` (JSON): of all choices of `full` layers that read everything (observers, and the
    layers before the first), those that leave the others most of their own attention (`coverage`). The paper found its by hand.

    texts: the first is read, at most `tokens` of it; none: a text that the model draws. full: None is as many as `places` has.
    share: of the tokens that other layers read. It says: coverage, of the attention of their least covered heads, in the mean;
    unprofiled: with `places`. ValueError for options out of range and a model with layers that see a window only.
    """
    num_layers = model.shape.num_layers
    usual = places(num_layers)
    full = usual[0] + len(usual) if full is None else full
    if not isinstance(full, int) or not 1 <= full < num_layers:
        raise ValueError(f"full={full!r}: 1 to {num_layers - 1} of {num_layers} layers")
    if not 0 < share < 1:
        raise ValueError(f"share={share!r}: between 0.0 and 1.0")
    if not 32 <= tokens <= max(1024, model.window) or any(len(text) < 32 for text in texts[:1]):
        raise ValueError(f"tokens={tokens!r}: 32 or more, of a text that has as many, at most the model's {model.window:,}")
    if model.shape.windowed:
        raise ValueError("the model has layers that see a window only")
    ids = texts[0][:tokens] if texts else model.sample(min(tokens, model.window))
    cover = coverage(model.traces(ids), model.shape.scale, share)
    layers, found = choose_observers(cover, full)
    made = {"coverage": found, "unprofiled": mean_coverage(cover, usual), "tokens": len(ids)}
    write_observers(out, Observers(model.shape.fingerprint, tuple(layers)), made)
    return {"out": str(out), "observers": list(layers), **made}
