"""One row of a part as contiguous keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentkv.engine.tables import RowTable
from agentkv.engine.view import PagedKV, Part
from agentkv.kernels.chunk_attention import gather_kv
from agentkv.kernels.gather_slots import gather_heads
from agentkv.kernels.low_rank_decode import LowRankPages, gather_low_rank
from agentkv.kernels.quantized_pages import QuantizedPages, gather_dequantised


class GatheredRow(NamedTuple):
    """k, v: `[num_kv_heads, length, head_dim]` from the row's first visible slot on, zeros where a head holds nothing. lens:
    int32 `[num_kv_heads]` on the device, slots held. bias: float32 `[1 or num_kv_heads, >= length]` or None."""

    k: Tensor
    v: Tensor
    lens: Tensor
    bias: Tensor | None


def gather_row(part: Part, index: int, dtype: torch.dtype) -> GatheredRow:
    """What the batch's row of that index holds in a part; length is a host bound on what its heads hold.

    TypeError where the part's bias is shorter.
    """
    table = part.table
    if isinstance(table, RowTable):
        first, length = table.first_slots[index], table.host_lens[index]
        entries, lens = table.entries[table.host_rows[index]], table.lens[index : index + 1] - first
    else:
        first, length = 0, table.bounds[index]
        entries, lens = table.entries[index], table.lens[index]
    bias = None if part.bias is None else part.bias[index, :, first:]
    if bias is not None and bias.shape[1] < length - first:
        raise TypeError(f"a bias of {bias.shape[1]} slots for a row that may hold {length - first}")
    if not isinstance(part.payload, PagedKV):
        positions = None if part.positions is None else part.positions[index]
        k, v = (each[:, first:] for each in _decoded(part.payload, entries, length, positions, dtype))
        lens = lens[:1]
    elif isinstance(table, RowTable):
        k, v = gather_kv(part.payload.pages, table.chunk_plan[index])
    else:
        return GatheredRow(*gather_heads(part.payload.pages, entries, length, lens), lens, bias)
    lens = lens.expand(k.shape[0])
    empty = (torch.arange(k.shape[1], device=k.device) >= lens.unsqueeze(1)).unsqueeze(2)
    return GatheredRow(k.masked_fill(empty, 0), v.masked_fill(empty, 0), lens, bias)


def _decoded(
    payload: QuantizedPages | LowRankPages, entries: Tensor, length: int, positions: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V `[num_kv_heads, length, head_dim]` of a payload that is decoded as it is read, in float32 until the end."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if isinstance(payload, LowRankPages):
        k, v = gather_low_rank(payload, entries, length, positions, wide)
    else:
        k, v = gather_dequantised(payload, entries, length, wide)
    return k.to(dtype), v.to(dtype)
