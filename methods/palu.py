"""Low-rank latents in place of keys and values, group of heads by group of heads (arXiv 2407.21118)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentkv.engine.core import SLOT
from agentkv.engine.preparation import Preparation
from agentkv.engine.sparse import ModelShape, Plain, Read, SparseMethod, StateSpec
from agentkv.engine.view import AttentionView, DeviceBatch, Part, Selection
from agentkv.kernels.low_rank_decode import LowRankPages
from agentkv.kernels.low_rank_factors import Factors, Prepared, decompose, factors, misfit, read_prepared, write_prepared
from agentkv.types import Exactness


@dataclass(frozen=True)
class Palu(SparseMethod):
    """Latents of hidden states, of which keys and values are linear maps of low rank.

    Keys are rebuilt, normed where the family norms them, and turned at their position as they are read; values are summed as
    latents. The maps act in prompts too. They are cut from the model's own, which stay for queries, and a rank is a choice at
    run time. Every layer and group has the same, the paper's "uniform": its search by gradients is not built.

    prepared: a file of `agentkv methods prepare palu MODEL OUT`. ratio: share of a group's dims that is its rank. rank_k,
    rank_v: ranks of keys and values, 0 for what the ratio says (the paper gives values more than keys).
    """

    prepared: str | Prepared = ""
    ratio: float = 0.5
    rank_k: int = 0
    rank_v: int = 0

    family: ClassVar[str] = "compression"
    paper: ClassVar[str | None] = "arXiv 2407.21118"
    exactness: ClassVar[Exactness] = "lossy"
    stores: ClassVar[bool] = False
    preparation: ClassVar[str | None] = "agentkv methods prepare palu MODEL OUT"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}: give more than 0 and at most 1")
        if isinstance(self.prepared, str) and self.prepared:
            object.__setattr__(self, "prepared", read_prepared(Path(self.prepared)))
        most = self.prepared.rank if isinstance(self.prepared, Prepared) else None
        for name, rank in (("rank_k", self.rank_k), ("rank_v", self.rank_v)):
            if rank < 0 or (most is not None and rank > most):
                raise ValueError(f"{name}={rank}: give 0 to {most or 'the rank that was prepared'}")

    def unserved(self, model: ModelShape) -> str | None:
        """It must have been prepared for this model."""
        if not isinstance(self.prepared, Prepared):
            return f"it is not prepared: give prepared=OUT of `{self.preparation}`"
        if self.prepared.model != model.fingerprint:
            return f"{self.prepared.path} was prepared for another model: prepare this one by `{self.preparation}`"
        sizes = {name: getattr(model, name) for name in ("num_layers", "num_kv_heads", "head_dim", "hidden_size", "key_norm")}
        if wrong := misfit(self.prepared, **sizes):
            return f"{self.prepared.path} does not fit it: {wrong}"
        return super().unserved(model)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """Latents of keys and of values side by side; and where each token stands, since keys are turned when they are read."""
        shape = (model.num_layers, SLOT, self._file.num_groups, sum(self._ranks))
        return (
            StateSpec("latents", "slot", model.dtype, "append", shape),
            StateSpec("positions", "slot", "int32", "append"),
        )

    def on_step_begin(self, batch: DeviceBatch) -> None:
        """Positions are the same in all layers."""
        units, places = batch.state("positions")
        units[places.entries, places.offsets] = batch.positions.to(torch.int32)

    def project(self, layer: int, x: Tensor, batch: DeviceBatch) -> None:
        """Latents of the hidden states."""
        units, places = batch.state("latents")
        latents = torch.nn.functional.linear(x, self._factors(units).down[layer])
        units[:, layer][places.entries, places.offsets] = torch.unflatten(latents, 1, units.shape[3:])

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        """Nothing: see `project`."""

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """All latents, the step's own included."""
        units, places = batch.state("latents")
        k, v = torch.split_with_sizes(units[:, layer], self._ranks, 3)
        payload = LowRankPages(k, v, **self._factors(units).of_layer(layer))
        return AttentionView((Part(payload, places.table, positions=self._positions(batch)),))

    def reference(self, plain: Plain, layer: int) -> Read:
        """A map of low rank is the model's own, projected onto the leading directions of the group's: head by head, on the
        file's tensors, in float64."""
        assert isinstance(self.prepared, Prepared)
        file = {name: (each if name == "frequency" else each[layer].double()) for name, each in self.prepared.tensors.items()}
        x = torch.cat((plain.x[layer], *([plain.own_x[layer].unsqueeze(0)] if plain.own_x else []))).double()
        (groups, most, _), heads = file["k.down"].shape, len(file["k.up"])
        read: dict[str, list[Tensor]] = {"k": [], "v": []}
        for head in range(heads):
            for side, asked in (("k", self.rank_k), ("v", self.rank_v)):
                rank = asked or min(most, max(1, int(self.ratio * (heads // groups * file["k.up"].shape[2]))))
                made = x @ file[f"{side}.down"][head * groups // heads, :rank].T @ file[f"{side}.up"][head, :rank]
                read[side].append(made + file[f"{side}.bias"][head] if f"{side}.bias" in file else made)
            k = read["k"].pop()
            if "k.norm" in file:
                k = k / (k.pow(2).mean(1, keepdim=True) + self.prepared.eps).sqrt() * file["k.norm"][head]
            angle = torch.outer(torch.arange(len(k)).float(), file["frequency"])
            (first, second), cos, sin = k.chunk(2, 1), angle.cos().double(), angle.sin().double()
            read["k"].append(torch.cat((first * cos - second * sin, second * cos + first * sin), 1))
        return Read([range(len(x))] * heads, read["k"], read["v"])

    def identity(self, length: int) -> Mapping[str, Any]:
        """Full rank."""
        return {"ratio": 1.0, "rank_k": 0, "rank_v": 0}

    def small(self, length: int) -> Mapping[str, Any]:
        """A rank at which a key is still nearer to itself than to others."""
        return {"ratio": 0.875}

    @property
    def _file(self) -> Prepared:
        assert isinstance(self.prepared, Prepared)
        return self.prepared

    @property
    def _ranks(self) -> tuple[int, int]:
        """Of keys and of values."""
        by_ratio = min(self._file.rank, max(1, int(self.ratio * self._file.group_dim)))
        return self.rank_k or by_ratio, self.rank_v or by_ratio

    def _factors(self, units: Tensor) -> Factors:
        return factors(self._file, self._ranks, units.device, units.dtype)

    def _positions(self, batch: DeviceBatch) -> Tensor | None:
        """Where the slots' tokens stand, int64 `[num_rows, max_len]`; None where no row was pruned. Once a step."""
        if all(span.position + span.end - span.start == span.kv_len for span in batch.rows):
            return None
        if "positions" not in batch.scratch:
            units, places = batch.state("positions")
            pages = -(-max(places.table.host_lens) // places.table.page_size)
            entries = places.table.entries[places.table.rows, :pages].to(torch.int64)
            batch.scratch["positions"] = units[entries].flatten(1).to(torch.int64)
        found: Tensor = batch.scratch["positions"]
        return found


def prepare(model: Preparation, texts: Sequence[Sequence[int]], out: Path, *, group_size: int | None = None) -> dict[str, Any]:
    """Write the factors of a model's key and value projections, in full rank, to `out` (safetensors).

    texts: token ids that calibrate: the error that is least is then that of their keys and values (the paper whitens by the
    hidden states' second moments); none: that of the weights, plain SVD. group_size: KV heads of a group; None: the most up
    to 4 that divide them. ValueError for a group that does not, or a model with layers that see a window only.
    """
    shape = model.shape
    group_size = next(s for s in (4, 3, 2, 1) if shape.num_kv_heads % s == 0) if group_size is None else group_size
    if group_size < 1 or shape.num_kv_heads % group_size:
        raise ValueError(f"group_size={group_size}: it must divide the {shape.num_kv_heads} KV heads")
    if shape.windowed:
        raise ValueError("the model has layers that see a window only")
    moments = model.moments(texts) if texts else [None] * shape.num_layers
    found: dict[str, list[Tensor]] = {}
    for layer, moment in enumerate(moments):
        for side, projection in (("k", model.key(layer)), ("v", model.value(layer))):
            up, down = decompose(projection.weight, group_size * shape.head_dim, moment)
            by_head = torch.unflatten(up, 2, (group_size, shape.head_dim)).transpose(1, 2).flatten(0, 1)
            found.setdefault(f"{side}.down", []).append(down)
            found.setdefault(f"{side}.up", []).append(by_head)
            for name in ("bias", "norm"):
                if (extra := getattr(projection, name)) is not None:
                    found.setdefault(f"{side}.{name}", []).append(extra)
    tensors = {name: torch.stack(parts) for name, parts in found.items()} | {"frequency": model.frequency}
    prepared = write_prepared(out, tensors, shape.fingerprint, group_size * shape.head_dim, model.eps)
    return {"out": str(out), "groups": prepared.num_groups, "rank": prepared.rank, "calibrated": bool(texts)}
