"""Pages whose keys could score highest with the query are read, the others stay where they are (arXiv 2406.10774)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from agentkv.engine.choosing import PageBudget
from agentkv.engine.sparse import ModelShape, Plain, Read, SparseMethod, StateSpec
from agentkv.engine.view import DeviceBatch, PageFill, Selection
from agentkv.kernels.page_bounds import layer_bounds
from agentkv.kernels.page_scores import page_scores
from agentkv.types import Exactness


@dataclass(frozen=True)
class Quest(SparseMethod):
    """Each decode step reads the newest page and the full pages with the greatest upper bound of a key's score.

    A page is the engine's page of KV: the paper has 16 slots (`Runtime(page_size=16)`), on a CPU there are 128 if nothing else
    is asked. Of equal pages the earlier is read. Prompts are read in full.

    budget: most tokens that a KV head reads: the newest page, and as many full ones as fit beside it. dense_layers: first
    layers, which read everything. reduce: over the query heads of a KV head, whose pages are loaded once (the paper's models
    have one each). heads: each KV head has its own pages (the paper), or all share them. The evaluation script of the paper's
    code differs from its kernels, which are meant here: there the newest page competes, and three pages are the least.
    """

    budget: int = 2048
    dense_layers: int = 2
    reduce: Literal["max", "sum"] = "max"
    heads: Literal["each", "all"] = "each"

    family: ClassVar[str] = "dynamic"
    paper: ClassVar[str | None] = "arXiv 2406.10774"
    exactness: ClassVar[Exactness] = "lossy"

    def __post_init__(self) -> None:
        for name, value, least in (("budget", self.budget, 1), ("dense_layers", self.dense_layers, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: an int of {least} or more")
        if self.reduce not in ("max", "sum"):
            raise ValueError(f"reduce={self.reduce!r}: 'max' or 'sum'")
        if self.heads not in ("each", "all"):
            raise ValueError(f"heads={self.heads!r}: 'each' or 'all'")

    def unserved(self, model: ModelShape) -> str | None:
        """A page is the least that is read."""
        if model.windowed:
            return "it has layers that see a window only"
        if self.budget < model.page_size:
            return f"budget={self.budget} is less than a page of KV, {model.page_size} slots: give more, or smaller pages"
        return None

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """Least and greatest value of each channel of a page's keys."""
        shape = model.num_layers, model.num_kv_heads, 2, model.head_dim
        return (StateSpec("bounds", "page", model.dtype, "append", shape),)

    def on_pages(self, pages: PageFill) -> None:
        """Bounds of full pages."""
        units, targets = pages.state("bounds")
        layer_bounds([pages.pages(layer) for layer in range(units.shape[1])], pages.entries, units, targets)

    def select(self, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Selection | None:
        """The best full pages, and the newest. Where no row has more than the budget, all."""
        table = batch.table_of(layer)
        if batch.prefill or layer < self.dense_layers or max(table.host_lens) <= self.budget:
            return None
        units, places = batch.state("bounds")
        if "budget" not in batch.scratch:  # the same in every layer
            batch.scratch["budget"] = PageBudget(table, self.budget, units.shape[2], self.heads == "each")
            batch.scratch["lines"] = batch.scratch["budget"].lines(places.table)
        budget: PageBudget = batch.scratch["budget"]
        lines: Tensor = batch.scratch["lines"]
        scores = page_scores(q, units[:, layer], lines, budget.first, budget.full, reduce=self.reduce)
        return budget.best(scores if self.heads == "each" else scores.amax(1, keepdim=True))

    def small(self, length: int) -> Mapping[str, Any]:
        """One dense layer, since small models have few."""
        return {"budget": length // 2, "dense_layers": 1}

    def most_read(self, layer: int, prompt: int, tokens: int) -> int:
        """The budget."""
        return tokens if layer < self.dense_layers else min(tokens, self.budget)

    def reference(self, plain: Plain, layer: int) -> Read:
        """Page by page, channel by channel."""
        k, v, size = plain.k[layer], plain.v[layer], plain.page_size
        length, num_kv_heads = k.shape[:2]
        pages = length // size
        fit = (self.budget - (length + 1 - pages * size)) // size
        if layer < self.dense_layers or pages <= fit:
            return super().reference(plain, layer)
        bounds = []
        for head in range(num_kv_heads):
            group = plain.query[layer].view(num_kv_heads, -1, k.shape[2])[head].tolist()
            of_pages = [k[page * size : (page + 1) * size, head].T.tolist() for page in range(pages)]
            by_query = [
                [sum(max(x * y for y in channel) for x, channel in zip(q, page, strict=True)) for q in group]
                for page in of_pages
            ]
            bounds.append([max(each) if self.reduce == "max" else sum(each) for each in by_query])
        if self.heads == "all":
            bounds = [[max(each) for each in zip(*bounds, strict=True)]] * num_kv_heads
        positions = []
        for each in bounds:
            best = sorted(range(pages), key=lambda page, each=each: (-each[page], page))[:fit]  # type: ignore[misc]
            positions.append([at for at in range(length) if at // size in best or at >= pages * size])
        return Read(positions, *([x[seen, head] for head, seen in enumerate(positions)] for x in (k, v)))
