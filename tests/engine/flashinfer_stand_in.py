"""What stands in for FlashInfer on a CPU: the same arguments, and the arithmetic of its kernel's addresses, in float64."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


class StandIn:
    """calls: (rows, pages of a row's table) of each. specs: what was asked for to be compiled, by its arguments. compiled: is
    everything on disk?"""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.specs: list[tuple[Any, ...]] = []
        self.compiled = False

    def attend(
        self, query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace: Tensor, tables: Tensor, lens: Tensor, most: int,
        *, bmm1_scale: float, bmm2_scale: float, kv_layout: str, backend: str,
    ) -> Tensor:  # fmt: skip
        """Its kernel takes pointers, and three strides of the keys in whole tokens of a head, for the values too."""
        keys, values = kv_cache
        rows, _, dim = query.shape
        _, num_kv_heads, page_size, _ = keys.shape
        assert (kv_layout, backend, bmm2_scale) == ("HND", "xqa", 1.0)
        assert query.is_contiguous()
        assert workspace.dtype == torch.uint8
        assert (workspace == 0).all() if not self.calls else True
        assert tables.is_contiguous()
        assert tables.dtype == torch.int32
        assert (lens.dtype, lens.shape, lens.is_contiguous()) == (torch.uint32, (rows,), True)
        assert tables.shape == (rows, most // page_size)
        assert keys.stride() == values.stride()
        assert all(stride % dim == 0 for stride in keys.stride()[:3])
        assert keys.stride(3) == 1
        self.calls.append((rows, tables.shape[1]))
        of_page, of_head, of_token = (stride // dim for stride in keys.stride()[:3])
        slots = torch.arange(most)
        seen = slots < lens.view(torch.int32).unsqueeze(1)
        pages = torch.where(seen, tables[:, slots // page_size], 0).to(torch.int64)
        heads = pages.unsqueeze(1) * of_page + (slots % page_size) * of_token + torch.arange(num_kv_heads).view(-1, 1) * of_head
        live = seen.view(rows, 1, -1, 1)  # what lies behind a row's end is never loaded
        k, v = (torch.where(live, self._from(each, heads, dim), 0.0) for each in (keys, values))
        q = query.double().view(rows, num_kv_heads, -1, dim)
        scores = (q @ k.mT * bmm1_scale).masked_fill(~seen.view(rows, 1, 1, -1), -torch.inf)
        out: Tensor = scores.softmax(-1) @ v
        return out.view(query.shape).to(query.dtype)

    @staticmethod
    def _from(cache: Tensor, heads: Tensor, dim: int) -> Tensor:
        """Vectors that many tokens of a head behind the pointer, float64 `[rows, num_kv_heads, slots, dim]`."""
        first = cache.storage_offset()
        size = cache.untyped_storage().nbytes() // cache.dtype.itemsize
        flat = cache.as_strided((size,), (1,), 0)
        return flat[(first + heads * dim).unsqueeze(-1) + torch.arange(dim)].double()

    def spec(self, *arguments: Any) -> SimpleNamespace:
        """What it compiles for these arguments."""

        def build() -> None:
            self.specs.append(arguments)
            self.compiled = True

        return SimpleNamespace(is_compiled=self.compiled, build_and_load=build)


def install(patch: pytest.MonkeyPatch, version: str = "0.6.3") -> StandIn:
    """As if it were installed, and served this machine."""
    from agentkv.engine import attention_flashinfer

    made = StandIn()
    names = {"flashinfer": {}, "flashinfer.jit": {}, "flashinfer.jit.xqa": {"gen_xqa_module": made.spec}}
    names["flashinfer.decode"] = {"trtllm_batch_decode_with_kv_cache": made.attend}
    for name, members in names.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        patch.setitem(sys.modules, name, module)
    patch.setattr(attention_flashinfer, "version", lambda: version)
    patch.setattr(attention_flashinfer, "unserved", lambda heads: None)
    return made
