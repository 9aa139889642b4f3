"""attend(q, view): attention over the parts of a view, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agentkv.engine.chunks import attend_own, attend_whole
from agentkv.engine.decodes import attend_beside, attend_by_library, attend_heads, attend_rows
from agentkv.engine.extends import attend_tiles
from agentkv.engine.tables import RowTable
from agentkv.engine.view import AttentionView, DeviceBatch, Part
from agentkv.kernels.merge_parts import merge_parts


@dataclass(frozen=True, slots=True)
class Attended:
    """out: `[num_tokens, num_heads, head_dim]`. lse: natural log-sum-exp of the scaled scores over all that each query saw,
    `[num_tokens, num_heads]` float32 (float64 in float64); None where it was not asked and would have cost."""

    out: Tensor
    lse: Tensor | None


def attend(q: Tensor, view: AttentionView, batch: DeviceBatch, scale: float, *, lse: bool = False) -> Attended:
    """Attention of the batch's queries `[num_tokens, num_heads, head_dim]` over the view.

    A part in which a row or a head holds nothing adds nothing. Nothing here waits for the device. TypeError for a bias on the
    step's own tokens in prefill.
    """
    *earlier, last = view.parts
    if not earlier:
        return Attended(*_attend_part(q, last, batch, scale, True, lse))
    out, lse_of_last = _attend_part(q, last, batch, scale, True, True)
    assert lse_of_last is not None
    together = attend_beside(q, earlier[0], batch, scale, (out, lse_of_last)) if len(earlier) == 1 else None
    if together is not None:
        return Attended(*together)
    done = [*(_attend_part(q, part, batch, scale, False, True) for part in earlier), (out, lse_of_last)]
    lses = [each for _, each in done if each is not None]
    return Attended(*merge_parts([each for each, _ in done], lses))


def _attend_part(q: Tensor, part: Part, batch: DeviceBatch, scale: float, own: bool, lse: bool) -> tuple[Tensor, Tensor | None]:
    """own: are the step's tokens among the part's slots, if it is one of rows?"""
    table = part.table
    if batch.tiles is not None:
        return attend_tiles(q, part, batch.tiles, batch, scale)
    if not batch.prefill:
        if isinstance(table, RowTable):
            out = attend_by_library(q, part, table, batch, scale) if own and not lse else None
            return attend_rows(q, part, table, batch, scale, own) if out is None else (out, None)
        return attend_heads(q, part, table, batch, scale)
    if own and isinstance(table, RowTable):
        return attend_own(q, part, table, batch, scale, lse)
    return attend_whole(q, part, batch, scale)
