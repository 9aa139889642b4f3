"""attend(q, view): the only caller of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.engine.view import AttentionView, DeviceBatch, Part
from agentkv.kernels.chunk_attention import chunk_attention
from agentkv.kernels.decode_attention import decode_attention
from agentkv.kernels.merge_parts import merge_parts
from agentkv.kernels.paged_attention import paged_attention, serves


@dataclass(frozen=True, slots=True)
class Attended:
    """out: `[num_tokens, num_heads, head_dim]`. lse: natural log-sum-exp of the scaled scores, `[num_tokens, num_heads]`
    float32, None where the backend does not give it. mass: attention received by slot, None unless needed."""

    out: Tensor
    lse: Tensor | None
    mass: Tensor | None = None


def attend(q: Tensor, view: AttentionView, batch: DeviceBatch, scale: float) -> Attended:
    """Attention of the batch's queries `[num_tokens, num_heads, head_dim]` over the view."""
    if len(view.parts) == 1:
        return _attend_part(q, view.parts[0], batch, scale)
    done = [_attend_part(q, part, batch, scale) for part in view.parts]
    out, lse = merge_parts([each.out for each in done], [_known(each.lse) for each in done])
    return Attended(out, lse)


def _known(lse: Tensor | None) -> Tensor:
    if lse is None:
        raise NotImplementedError("this backend gives no log-sum-exp to merge parts with")
    return lse


def _attend_part(q: Tensor, part: Part, batch: DeviceBatch, scale: float) -> Attended:
    if part.bias is not None:
        raise NotImplementedError("a per-slot bias")
    return _attend_chunks(q, part, batch, scale) if batch.prefill else _attend_decodes(q, part, batch, scale)


def _attend_decodes(q: Tensor, part: Part, batch: DeviceBatch, scale: float) -> Attended:
    """One query a row, or a few: the last token and guesses."""
    table, pages, counts = part.table, part.payload.pages, batch.counts
    if serves(q, pages):
        return Attended(*paged_attention(q, pages, (table.entries, table.rows, table.lens), scale, counts, table.starts))
    table = table.by_query(counts)
    if q.device.type == "cpu" or q.dtype == torch.float64:  # the GPU kernel is for at most float32
        return Attended(*decode_attention(q, pages, table.decode_plan, scale))
    from agentkv.kernels.paged_decode import paged_decode  # needs triton, which a CPU-only platform may lack

    return Attended(*paged_decode(q, pages, table.entries, table.work, scale))


def _attend_chunks(q: Tensor, part: Part, batch: DeviceBatch, scale: float) -> Attended:
    """Row by row: a chunk is long enough to fill the device by itself."""
    if q.device.type == "cuda" and part.table.starts is None:
        from agentkv.kernels.paged_prefill import serves as serves_chunks  # needs triton, see above

        if serves_chunks(q, part.payload.pages):
            return _attend_whole_chunks(q, part, batch, scale)
    out = torch.empty_like(q)
    lses: list[Tensor | None] = []
    for span, slots, starts in zip(batch.rows, part.table.chunk_plan, part.table.chunk_starts, strict=True):
        chunk = q[span.start : span.end]
        out[span.start : span.end], lse = chunk_attention(chunk, part.payload.pages, slots, scale, starts)
        lses.append(lse)
    known = [lse for lse in lses if lse is not None]
    return Attended(out, torch.cat(known) if len(known) == len(lses) else None)


def _attend_whole_chunks(q: Tensor, part: Part, batch: DeviceBatch, scale: float) -> Attended:
    """The same on a GPU, where every token sees all before it."""
    from agentkv.kernels.paged_prefill import paged_prefill

    table = part.table
    done = [
        paged_prefill(q[span.start : span.end], part.payload.pages, table.entries[row], length, scale)
        for span, row, length in zip(batch.rows, table.host_rows, table.host_lens, strict=True)
    ]
    return Attended(torch.cat([out for out, _ in done]), torch.cat([lse for _, lse in done]))
