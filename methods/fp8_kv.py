"""Keys and values as eight-bit floats, one scale a token and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from agentkv.engine.core import SLOT
from agentkv.engine.sparse import ModelShape, Plain, Read, SparseMethod, StateSpec
from agentkv.engine.view import AttentionView, DeviceBatch, Part, Selection
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages, store_fp8
from agentkv.types import Exactness


@dataclass(frozen=True)
class FP8KV(SparseMethod):
    """Keys and values as eight-bit floats (e4m3), with a scale for each token and head.

    Keys are kept after rotation. The scale is amax / 448 (the largest number), so nothing saturates, and a token's codes depend
    on that token alone. Attention reads codes everywhere, the newest token's own included: chunks, batches and cached prefixes
    change nothing.

    scales: dtype of the scale behind each token's codes.
    """

    scales: Literal["float32", "bfloat16"] = "float32"

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str | None] = "arXiv 2209.05433"
    exactness: ClassVar[Exactness] = "lossy"
    stores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.scales not in ("float32", "bfloat16"):
            raise ValueError(f"scales={self.scales!r}: give 'float32' or 'bfloat16'")

    def unserved(self, model: ModelShape) -> str | None:
        """A scale must stand behind a head's codes."""
        if model.head_dim % self._dtype.itemsize:
            return f"a scale in {self.scales} does not fit behind heads of {model.head_dim} dims"
        return super().unserved(model)

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        """By slot: codes, and beside them in the same units the scales' bytes."""
        head = (model.num_layers, model.num_kv_heads, 2, SLOT)
        scales = "scales", (*head, self._dtype.itemsize)
        return (StateSpec("codes", "slot", "uint8", "append", (*head, model.head_dim), beside=scales),)

    def store(self, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        """Into the method's own pages."""
        _, places = batch.state("codes")
        store_fp8(self._payload(layer, batch), places.entries, places.offsets, k, v)

    def view(self, layer: int, selection: Selection | None, batch: DeviceBatch) -> AttentionView:
        """All of them."""
        return AttentionView((Part(self._payload(layer, batch), batch.state("codes")[1].table),))

    def reference(self, plain: Plain, layer: int) -> Read:
        """The nearest of all 256 numbers, to even at half; the token behind the prompt reads its own so too."""
        own = [plain.own[layer]] if plain.own else []
        k, v = (torch.cat((x[layer], *(pair[i].unsqueeze(0) for pair in own))) for i, x in enumerate((plain.k, plain.v)))
        heads = range(k.shape[1])
        read = ([self._nearest(x[:, head].double()) for head in heads] for x in (k, v))
        return Read([range(len(k))] * len(heads), *read)

    def _nearest(self, x: Tensor) -> Tensor:
        """x float64 `[n, head_dim]` as it is read back."""
        scale = (x.abs().amax(1, keepdim=True) / 448).to(getattr(torch, self.scales)).double()
        codes = range(127)  # of positive numbers, ascending; 127 is none
        numbers = [code * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in codes]
        size = (x / scale.masked_fill(scale == 0, 1)).abs().clamp(max=448)
        distance = (size.unsqueeze(2) - torch.tensor(numbers, dtype=torch.float64)).abs()
        nearest = distance == distance.amin(2, keepdim=True)
        even = torch.tensor([2 - code % 2 for code in codes])
        return torch.tensor(numbers, dtype=torch.float64)[(nearest * even).argmax(2)] * x.sign() * scale

    def identity(self, length: int) -> Mapping[str, Any] | None:
        """Eight bits are eight bits."""
        return None

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.scales)
        return found

    def _payload(self, layer: int, batch: DeviceBatch) -> QuantizedPages:
        """The layer's pages, as views of the units."""
        codes, scales = (batch.state(name)[0][:, layer] for name in ("codes", "scales"))
        layout = PageLayout(codes.shape[1], codes.shape[3], codes.shape[4], dtype=self._dtype)
        return QuantizedPages(codes.flatten(1), layout, scales.view(self._dtype).squeeze(-1))
