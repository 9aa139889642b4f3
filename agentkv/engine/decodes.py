"""Attention of decode rows over one part: one query a row, or the last token and a few guesses."""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import DeviceBatch, PagedKV, Part
from agentkv.kernels.decode_attention import decode_attention
from agentkv.kernels.dequant_decode import dequant_decode
from agentkv.kernels.low_rank_decode import LowRankPages, low_rank_decode
from agentkv.kernels.paged_attention import paged_attention, serves
from agentkv.kernels.quantized_pages import QuantizedPages
from agentkv.kernels.ragged_decode import ragged_decode


def attend_rows(q: Tensor, part: Part, table: RowTable, batch: DeviceBatch, scale: float, own: bool) -> tuple[Tensor, Tensor]:
    """out and lse over a part whose heads hold the same slots. own: a row's last slots are its queries' own, and each sees up
    to its own; otherwise every query sees all."""
    counts, payload = batch.counts, part.payload
    if not isinstance(payload, PagedKV):
        return _attend_coded(q, part, payload, table.by_query(counts, own), batch, scale)
    pages = payload.pages
    if part.bias is None and own and serves(q, pages):
        return paged_attention(q, pages, (table.entries, table.rows, table.lens), scale, counts, table.starts)
    table = table.by_query(counts, own)
    if part.bias is not None:
        return _attend_biased(q, part, pages, table, batch, scale)
    if serves(q, pages):
        return paged_attention(q, pages, (table.entries, table.rows, table.lens), scale, None, table.starts)
    if q.device.type == "cpu" or q.dtype == torch.float64:  # the GPU kernel is for at most float32
        if not table.exact:  # nor can the host say where the rows' pages lie
            return _attend_biased(q, part, pages, table, batch, scale)
        return decode_attention(q, pages, table.decode_plan, scale)
    from agentkv.kernels.paged_decode import paged_decode  # needs triton, which a CPU-only platform may lack

    scores = None
    if part.record is not None and own and all(count == 1 for count in counts):
        scores = torch.empty(*q.shape[:2], max(table.host_lens), dtype=torch.float32, device=q.device)
        part.record.append(scores)
    return paged_decode(q, pages, table.entries, table.work, scale, scores=scores)


def attend_by_library(q: Tensor, part: Part, table: RowTable, batch: DeviceBatch, scale: float) -> Tensor | None:
    """out of rows with one token each, which see all that they hold, by the library's kernel; it gives no lse. None where there
    is no such kernel, or it does not serve the part."""
    if batch.library is None or not isinstance(part.payload, PagedKV) or table.starts is not None:
        return None
    if part.bias is not None or part.record is not None or any(count != 1 for count in batch.counts):
        return None
    return batch.library(q, part.payload.pages, table.lines, table.lens, scale)


def attend_beside(
    q: Tensor, part: Part, batch: DeviceBatch, scale: float, beside: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """out and lse over an earlier part, merged with those over what lies beside it in the kernel that merges its own pieces;
    None where that is not known."""
    payload, table = part.payload, part.table
    if not isinstance(payload, QuantizedPages) or not isinstance(table, RowTable) or batch.prefill:
        return None
    if not q.is_cuda or q.dtype == torch.float64:
        return None
    from agentkv.kernels import dequant_decode_triton as coded  # needs triton, which a CPU-only platform may lack

    if not coded.serves(payload.layout) or not all(each.is_contiguous() for each in beside):
        return None
    lines = table.by_query(batch.counts, False)
    bias = _by_query(_bias(part, 1, max(lines.host_lens)), batch)
    bias = None if bias is None else bias.squeeze(1)
    return coded.paged_dequant_decode(q, payload, lines.entries, lines.work_in(coded.CUT), scale, bias=bias, beside=beside)


def attend_heads(q: Tensor, part: Part, table: HeadTable, batch: DeviceBatch, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse over a part of which every query sees all that its KV head holds."""
    counts, payload = batch.counts, part.payload
    if not isinstance(payload, PagedKV):
        return _attend_coded(q, part, payload, table.by_row(_page_size(payload)).by_query(counts, False), batch, scale)
    bias = _bias(part, table.lens.shape[1], table.max_slots)
    rows, lens, queries = table.rows, table.lens, counts[0]
    plan = table.work if q.is_cuda and q.dtype != torch.float64 and len(set(counts)) == 1 else None
    if any(count != queries for count in counts):
        rows, lens, queries = batch.owners, lens[batch.owners], 1
        bias = None if bias is None else bias[batch.owners]
    return ragged_decode(
        q, payload.pages, table.entries, rows, lens, scale, max_len=table.max_slots, queries=queries, bias=bias, plan=plan,
        by_slot=table.by_slot,
    )  # fmt: skip


def _attend_biased(
    q: Tensor, part: Part, pages: Tensor, lines: RowTable, batch: DeviceBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Lengths and starts are read on the device. Pages before a line's first visible slot are left out, slots before it in its
    page are hidden. lines: one a query."""
    table, _ = lines.visible(pages.shape[1])
    bias = _by_query(_bias(part, pages.shape[1], max(lines.host_lens)), batch)
    if lines.starts is not None:
        front = lines.starts - lines.starts % lines.page_size
        slots = torch.arange(table.max_slots, device=q.device) + front.unsqueeze(1)
        if bias is None:
            bias = torch.zeros(len(slots), pages.shape[1], table.max_slots, device=q.device)
        else:
            shown = slots.clamp(max=bias.shape[2] - 1).unsqueeze(1).expand(-1, pages.shape[1], -1)
            bias = bias.gather(2, shown.to(torch.int64))
        bias = bias.masked_fill((slots < lines.starts.unsqueeze(1)).unsqueeze(1), -torch.inf)
    plan = table.work if q.is_cuda and q.dtype != torch.float64 else None
    return ragged_decode(q, pages, table.entries, table.rows, table.lens, scale, max_len=table.max_slots, bias=bias, plan=plan)


def _attend_coded(
    q: Tensor, part: Part, payload: QuantizedPages | LowRankPages, lines: RowTable, batch: DeviceBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Payloads that are decoded as they are read. lines: one for each query."""
    bias = _by_query(_bias(part, 1, max(lines.host_lens)), batch)
    bias = None if bias is None else bias.squeeze(1)
    positions = _by_query(part.positions, batch)
    if q.is_cuda and q.dtype != torch.float64:
        out = _attend_compiled(q, payload, lines, scale, positions, bias)
        if out is not None:
            return out
    places = (lines.entries[:, : -(-max(lines.host_lens) // lines.page_size)], lines.rows, lines.lens)
    if isinstance(payload, LowRankPages):
        return low_rank_decode(q, payload, *places, scale, positions=positions, starts=lines.starts, bias=bias)
    return dequant_decode(q, payload, *places, scale, starts=lines.starts, bias=bias)


def _attend_compiled(
    q: Tensor,
    payload: QuantizedPages | LowRankPages,
    lines: RowTable,
    scale: float,
    positions: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """The same by a GPU kernel; None where it does not read such pages."""
    from agentkv.kernels import dequant_decode_triton, low_rank_decode_triton  # they need triton

    if isinstance(payload, QuantizedPages):
        if not dequant_decode_triton.serves(payload.layout):
            return None
        work = lines.work_in(dequant_decode_triton.CUT)
        return dequant_decode_triton.paged_dequant_decode(q, payload, lines.entries, work, scale, bias=bias)
    if not payload.k.dtype == payload.v.dtype == payload.k_factor.dtype:
        return None
    return low_rank_decode_triton.paged_low_rank_decode(
        q, payload, lines.entries, lines.work, scale, positions=positions, bias=bias
    )


def _page_size(payload: QuantizedPages | LowRankPages) -> int:
    return payload.k.shape[1] if isinstance(payload, LowRankPages) else payload.layout.page_size


def _bias(part: Part, num_kv_heads: int, most: int) -> Tensor | None:
    """The part's bias for so many heads, contiguous. TypeError where it does not fit them or the slots."""
    if part.bias is None:
        return None
    if part.bias.shape[1] not in (1, num_kv_heads) or part.bias.shape[2] < most:
        raise TypeError(f"a bias of shape {tuple(part.bias.shape)} for {num_kv_heads} heads of up to {most} slots")
    return part.bias.expand(-1, num_kv_heads, -1).contiguous()


def _by_query(lines: Tensor | None, batch: DeviceBatch) -> Tensor | None:
    """Lines of rows `[num_rows, ...]` as lines of queries."""
    return lines if lines is None or len(lines) == len(batch.positions) else lines[batch.owners]
