"""Decode attention over parts in which every KV head of a row may hold slots of its own number, in pages of its own.

All query tokens of a row see all slots: such a part lies wholly before them. Their own slots are another part, and
`merge_parts` joins the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentkv.kernels.paged_attention import paged_attention, serves

if TYPE_CHECKING:
    from agentkv.kernels.paged_decode import DecodePlan

BLOCK = 256
"""Slots of one product of the twin, whatever the rows hold: so a row's bits do not depend on its batch."""


def ragged_decode(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    *,
    max_len: int,
    queries: int = 1,
    bias: Tensor | None = None,
    plan: DecodePlan | None = None,
    by_slot: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` tokens a row over the slots that each KV head of the row holds.

    q: `[num_rows * queries, num_heads, head_dim]`, row by row. pages: one layer's view `[num_granules, num_kv_heads, 2,
    page_size, head_dim]`, or of head pages `[num_granules, 1, 2, page_size, head_dim]`. table: int32 `[max_rows, max_pages]`,
    or `[max_rows, num_kv_heads, max_pages]` where every head has pages of its own (a table of lines, row * num_kv_heads +
    head, viewed so). rows: int64 `[num_rows]`, lines of the table. lens: int32 `[num_rows, num_kv_heads]`, slots held, on the
    device. max_len: a host bound on lens. bias: float32 `[num_rows, num_kv_heads, max_len]`, added to the scaled scores.
    plan: the work list of these lens where a GPU reads them; None makes one. by_slot: the table is int64 and names slots, not
    pages, one in each column: granule * page_size + slot in the page.

    Returns out like q and lse `[num_rows * queries, num_heads]`, natural, float32 (float64 for float64); 0 and -inf where a
    head holds nothing. Slots past a head's length are not read.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = lens.shape
    table = table if table.dim() == 3 else table.unsqueeze(1).expand(-1, num_kv_heads, -1)
    # query tokens join the group of their KV head: `[num_rows, num_kv_heads, queries * group, head_dim]`
    members = (
        q.view(num_rows, queries, num_kv_heads, -1, head_dim).transpose(1, 2).reshape(num_rows, num_kv_heads, -1, head_dim)
    )
    if q.is_cuda and q.dtype != torch.float64:
        out, lse = _on_gpu(members, pages, table, rows, lens, scale, max_len, bias, plan, by_slot)
    elif bias is None and not by_slot and serves(members.flatten(0, 1), pages[:, :1]):
        out, lse = _in_place(members, pages, table, rows, lens, scale)
    else:
        out, lse = _in_blocks(members, pages, table[rows], lens, scale, max_len, bias, by_slot)
    out = out.view(num_rows, num_kv_heads, queries, -1, head_dim).transpose(1, 2).reshape(num_tokens, num_heads, head_dim)
    return out.to(q.dtype), lse.view(num_rows, num_kv_heads, queries, -1).transpose(1, 2).reshape(num_tokens, num_heads)


def _on_gpu(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    max_len: int,
    bias: Tensor | None,
    plan: DecodePlan | None = None,
    by_slot: bool = False,
) -> tuple[Tensor, Tensor]:
    from agentkv.kernels.paged_decode import bound_pieces, paged_decode, plan_decode

    lens = lens.contiguous()
    plan = plan or plan_decode(lens, rows, bound_pieces(lens.numel(), lens.numel() * max_len))
    pages = pages.expand(-1, lens.shape[1], -1, -1, -1)  # of head pages: each head finds its own at the same place
    return paged_decode(q.flatten(1, 2), pages, table, plan, scale, bias=bias, by_slot=by_slot)


def _in_place(q: Tensor, pages: Tensor, table: Tensor, rows: Tensor, lens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The compiled kernel of the CPU reads pages where they lie: one head of every row after another."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    for head in range(q.shape[1]):
        mine = pages[:, head : head + 1] if pages.shape[1] > 1 else pages
        lines = (table[:, head], rows, lens[:, head].contiguous())
        out[:, head], lse[:, head] = paged_attention(q[:, head], mine, lines, scale)
    return out, lse


def _in_blocks(
    q: Tensor, pages: Tensor, table: Tensor, lens: Tensor, scale: float, max_len: int, bias: Tensor | None, by_slot: bool
) -> tuple[Tensor, Tensor]:
    """All rows and heads together, block by block, with a running maximum. table: `[num_rows, num_kv_heads, max_pages]`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q = q.to(wide)
    page_size, last_page = pages.shape[3], table.shape[2] - 1
    heads = torch.arange(q.shape[1], device=q.device).unsqueeze(1) * (pages.shape[1] > 1)
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    sums, acc = torch.zeros_like(top), torch.zeros_like(q)
    for first in range(0, max_len, BLOCK):
        slots = torch.arange(first, first + BLOCK, device=q.device)
        hidden = slots >= lens.unsqueeze(-1)
        columns = (slots if by_slot else slots // page_size).clamp(max=last_page)
        entries, offsets = table[..., columns].to(torch.int64).masked_fill(hidden, 0), slots % page_size
        if by_slot:
            entries, offsets = entries // page_size, entries % page_size
        k, v = (pages[entries, heads, side, offsets].to(wide).masked_fill_(hidden.unsqueeze(-1), 0) for side in (0, 1))
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        if bias is not None:
            part = bias[..., first : first + BLOCK].to(wide)
            scores[..., : part.shape[-1]] += part.unsqueeze(2)
        scores.masked_fill_(hidden.unsqueeze(2), -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == -torch.inf, 0)  # nothing seen so far: exp(-inf - 0) is 0
        weights, shrink = torch.exp(scores - base), torch.exp(top - base)
        acc = acc * shrink + torch.matmul(weights, v)
        sums = sums * shrink + weights.sum(-1, keepdim=True)
        top = new_top
    lse = (top + torch.log(sums)).squeeze(-1)  # of nothing: -inf
    return acc / sums.masked_fill(sums == 0, 1), lse
