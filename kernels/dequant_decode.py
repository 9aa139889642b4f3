"""Attention of a few query tokens a row over pages of quantised keys and values, in plain torch: CPU, and the oracle on a GPU.

No value is read on the host, and a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkv.kernels.quantized_pages import QuantizedPages, read_pages
from agentkv.kernels.running_softmax import RunningSoftmax, row_spans, row_tiles, tile_bias, visible


def dequant_decode(
    q: Tensor,
    payload: QuantizedPages,
    entries: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    *,
    counts: Sequence[int] | None = None,
    starts: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention over the slots that each row holds, its part of a merge by log-sum-exp (`merge_parts`).

    q: `[num_tokens, num_heads, head_dim]`, row by row. entries: int32 `[max_rows, max_pages]`, granules; columns past the
    longest row cost time only. rows: int64 `[num_rows]`, lines of entries. lens: int32 `[num_rows]`, slots held.
    counts: query tokens of each row, None for one each. starts: int32 `[num_tokens]`, first slot each token sees. causal: the
    last slots of a row are its query tokens' own; False where those lie in another part and all see every slot. bias: float32
    `[num_rows, max_len]`, added to scaled scores, -inf hides a slot.

    Returns out like q and natural lse `[num_tokens, num_heads]`, float32 (float64 for it); 0 and -inf where nothing is seen.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    layout, picked = payload.layout, entries[rows]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for row, span in enumerate(row_spans(len(rows), len(q), counts)):
        state = RunningSoftmax(q[span].to(wide) * scale, layout.num_kv_heads, layout.head_dim)
        first = None if starts is None else starts[span]
        for granules, slots in row_tiles(picked[row], layout.page_size):
            k, v = (part.transpose(0, 1).flatten(1, 2) for part in read_pages(payload, granules, wide))
            extra = tile_bias(bias, row, slots)
            state.add(k, v, visible(slots, lens[row], span.stop - span.start, causal, first, extra), extra)
        out[span], lse[span] = state.result()
    return out, lse
