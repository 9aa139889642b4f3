"""Decode attention by FlashInfer (arXiv 2501.01005), over our pages as they lie, for rows that share one page table.

Of its kernels xqa alone takes tables and lengths from the device and plans nothing on the host, so a graph can hold it. It is
compiled once for each shape of heads, by `build` and never by a step. It splits rows by how many there are, so a row's bits
depend on its batch, which those of our own kernel do not.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentkv.engine.loader import LoadedModel
from agentkv.errors import BadModel, BadRequest

WORKSPACE = 16 << 20
"""Bytes: the library sets aside 8 MiB for its counters, and one part of a result a multiprocessor takes less than 2."""
MOST_GROUP = 16
"""Query heads of a KV head."""
CAPABILITIES = (9, 10, 12)
"""Major compute capabilities that the kernel is written for."""


class Heads(NamedTuple):
    """What a kernel is compiled for, and where it runs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, loaded: LoadedModel, page_size: int) -> Heads:
        """Those of a model."""
        c = loaded.config
        return cls(c.num_heads, c.num_kv_heads, c.head_dim, page_size, loaded.dtype, loaded.device)


class FlashInferDecode:
    """The kernel for such heads, loaded. Its workspace holds counters that are zero between launches: one stream may use it.

    BadRequest where it cannot be loaded or run.
    """

    def __init__(self, heads: Heads) -> None:
        num_heads, num_kv_heads, dim, page_size, dtype, device = heads
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        pages = torch.zeros(1, num_kv_heads, 2, page_size, dim, dtype=dtype, device=device)
        try:
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache

            self._attend: Any = trtllm_batch_decode_with_kv_cache
            self(torch.zeros(1, num_heads, dim, dtype=dtype, device=device), pages, (one - 1).view(1, 1), one, 1.0)
        except Exception as error:
            raise _failed("used", error) from error

    def __call__(self, q: Tensor, pages: Tensor, table: Tensor, lens: Tensor, scale: float) -> Tensor:
        """Attention of one query a row over all that the row holds, like q.

        q: `[num_rows, num_heads, head_dim]`, half precision. pages: one layer's view
        `[num_granules, num_kv_heads, 2, page_size, head_dim]`; what begins at a granule is a page of the library, so entries
        are its page numbers. table: int32 `[num_rows, max_pages]`, contiguous, granules. lens: int32 `[num_rows]`, contiguous,
        at least 1.
        """
        keys, values = pages.unbind(2)
        out: Tensor = self._attend(
            q.contiguous(), (keys, values), self._workspace, table, lens.view(torch.uint32), table.shape[1] * pages.shape[3],
            bmm1_scale=scale, bmm2_scale=1.0, kv_layout="HND", backend="xqa",
        )  # fmt: skip
        return out


def version() -> str | None:
    """Of the library; None where it is not installed."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def unserved(heads: Heads) -> str | None:
    """Why there is no kernel for a model with such heads on its device; None if there is."""
    num_heads, num_kv_heads, dim, page_size, dtype, device = heads
    if device.type != "cuda":
        return f"it is for NVIDIA GPUs, the model is on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        return f"it is for compute capability {', '.join(f'{each}.x' for each in CAPABILITIES)}, {device} has {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is for half precision, the model is in {str(dtype).removeprefix('torch.')}"
    if page_size not in (16, 32, 64, 128):
        return f"it is for pages of 16, 32, 64 or 128 slots, these have {page_size}"
    if dim not in (64, 128):  # its pages are whole tokens of a head apart, ours a granule
        return f"it is for heads of 64 or 128 dims, the model's have {dim}"
    group = num_heads // num_kv_heads
    return f"it is for up to {MOST_GROUP} query heads a KV head, the model has {group}" if group > MOST_GROUP else None


def built(heads: Heads) -> bool:
    """Is the kernel on disk? Compiles nothing. BadRequest where the library cannot even be imported."""
    return bool(_spec(heads).is_compiled)


def build(heads: Heads) -> None:
    """Compile the kernel, into the library's own cache. BadRequest, BadModel as `check`, or where it fails."""
    check(heads)
    spec = _spec(heads)
    try:
        spec.build_and_load()
    except Exception as error:
        raise _failed("compiled", error) from error


def check(heads: Heads) -> None:
    """BadModel where the library has no kernel for the model and device, BadRequest where it is not installed."""
    why = unserved(heads)
    if why is None and version() is None:
        raise BadRequest("FlashInfer is not installed", hint="pip install 'agentkv[cuda]'", param="attention")
    if why is not None:
        raise BadModel(f"FlashInfer's decode attention cannot be used: {why}", hint="Open the model with attention='auto'")


def _spec(heads: Heads) -> Any:
    """What the library compiles: the dtype in and out, no window, one query a row."""
    group, dtype = heads.num_heads // heads.num_kv_heads, heads.dtype
    try:
        from flashinfer.jit.xqa import gen_xqa_module

        return gen_xqa_module(dtype, dtype, heads.page_size, heads.head_dim, group, False, dtype, 1)
    except Exception as error:
        raise _failed("found", error) from error


def _failed(doing: str, error: Exception) -> BadRequest:
    what = f"FlashInfer's decode attention cannot be {doing}: {type(error).__name__}: {str(error)[-500:]}"
    hint = "It needs nvcc and ninja on the PATH; or open the model with attention='triton'"
    return BadRequest(what, hint=hint, param="attention")
