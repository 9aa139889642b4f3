"""Column sums and maxima of attention probabilities on a GPU, without the matrix: log-sum-exp first, columns second.

Every column belongs to one program, which takes the queries in order: no atomics, the same bits each time. `window_scores` and
`received_mass` have the plain twins.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MEMBERS, KEYS, SPAN = 64, 64, 2048
"""A tile's rows (query tokens times heads) and keys; keys of one partial log-sum-exp."""


@triton.jit
def _scores(
    q_ptr, k_ptr, bias_ptr, ends_ptr, scale, row, num_queries, line, key, num_keys,
    q_token_stride, q_head_stride, k_head_stride, k_token_stride,
    LINE_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 of rows (token, head of the line) and keys, -inf where a key is not seen; and which those are."""
    token, head = row // LINE_HEADS, line * LINE_HEADS + row % LINE_HEADS
    kv_head = (line * LINE_HEADS) // GROUP
    dim = tl.arange(0, DIM_PAD)
    live = token < num_queries
    q_place = token.to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_place[:, None] + dim[None, :], mask=live[:, None] & (dim[None, :] < DIM), other=0.0)
    k_place = kv_head.to(tl.int64) * k_head_stride + key.to(tl.int64) * k_token_stride
    k = tl.load(k_ptr + k_place[:, None] + dim[None, :], mask=(key[:, None] < num_keys) & (dim[None, :] < DIM), other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + kv_head.to(tl.int64) * num_keys + key, mask=key < num_keys, other=0.0)
        score += bias[None, :] * 1.4426950408889634
    end = tl.load(ends_ptr + kv_head * num_queries + token, mask=live, other=0)
    return tl.where((key[None, :] < end[:, None]) & (key[None, :] < num_keys), score, float("-inf"))


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _lse_kernel(
    q_ptr, k_ptr, ends_ptr, lse_ptr, scale, num_queries, num_keys, q_token_stride, q_head_stride, k_head_stride, k_token_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PRECISION: tl.constexpr,
    MEMBERS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp of one tile of rows over one span of keys."""
    row = tl.program_id(0) * MEMBERS + tl.arange(0, MEMBERS)
    line, span = tl.program_id(1), tl.program_id(2)
    top = tl.full([MEMBERS], -1e30, tl.float32)  # finite: a row may see nothing of a span
    sums = tl.zeros([MEMBERS], tl.float32)
    for first in range(0, SPAN, KEYS):
        key = span * SPAN + first + tl.arange(0, KEYS)
        score = _scores(
            q_ptr, k_ptr, q_ptr, ends_ptr, scale, row, num_queries, line, key, num_keys,
            q_token_stride, q_head_stride, k_head_stride, k_token_stride, GROUP, GROUP, False, DIM, DIM_PAD, PRECISION,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(score, 1))
        sums = sums * tl.exp2(top - new_top) + tl.sum(tl.exp2(score - new_top[:, None]), 1)
        top = new_top
    lse = tl.where(sums > 0, (top + tl.log2(tl.where(sums > 0, sums, 1.0))) * 0.6931471805599453, float("-inf"))
    lines = tl.num_programs(1)
    place = (span * num_queries + row // GROUP).to(tl.int64) * (lines * GROUP) + line * GROUP + row % GROUP
    tl.store(lse_ptr + place, lse, mask=row < num_queries * GROUP)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _column_kernel(
    q_ptr, k_ptr, bias_ptr, ends_ptr, lse_ptr, out_ptr, scale, num_queries, num_keys,
    q_token_stride, q_head_stride, k_head_stride, k_token_stride,
    LINE_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, MAXIMUM: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PRECISION: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One block of keys of one line (a query head, or a KV head with its group) over all queries, in order."""
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    line = tl.program_id(1)
    acc = tl.zeros([KEYS], tl.float32)
    for first in range(0, num_queries * LINE_HEADS, MEMBERS):
        row = first + tl.arange(0, MEMBERS)
        score = _scores(
            q_ptr, k_ptr, bias_ptr, ends_ptr, scale, row, num_queries, line, key, num_keys,
            q_token_stride, q_head_stride, k_head_stride, k_token_stride,
            LINE_HEADS, GROUP, HAS_BIAS, DIM, DIM_PAD, PRECISION,
        )  # fmt: skip
        place = (row // LINE_HEADS).to(tl.int64) * (tl.num_programs(1) * LINE_HEADS) + line * LINE_HEADS + row % LINE_HEADS
        lse = tl.load(lse_ptr + place, mask=row < num_queries * LINE_HEADS, other=float("-inf")) * 1.4426950408889634
        seen = lse > float("-inf")
        mass = tl.where(seen[:, None], tl.exp2(score - tl.where(seen, lse, 0.0)[:, None]), 0.0)
        acc = tl.maximum(acc, tl.max(mass, 0)) if MAXIMUM else acc + tl.sum(mass, 0)
    tl.store(out_ptr + line.to(tl.int64) * num_keys + key, acc, mask=key < num_keys)


def attention_lse(q: Tensor, k: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Natural log-sum-exp float32 `[num_queries, num_heads]` of the scaled scores; q, k and ends `[num_kv_heads, num_queries]`
    as in `received_mass`. -inf where a query sees nothing."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = k.shape
    spans = max(1, triton.cdiv(length, SPAN))
    parts = torch.empty(spans, num_queries, num_heads, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(num_queries * (num_heads // num_kv_heads), MEMBERS), num_kv_heads, spans)
    _lse_kernel[grid](
        q, k, ends.contiguous(), parts, scale * LOG2_E, num_queries, length, *_strides(q, k),
        SPAN=min(SPAN, triton.cdiv(length, KEYS) * KEYS), **_shape(q, k),
    )  # fmt: skip
    return torch.logsumexp(parts, 0)


def reduce_columns(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    ends: Tensor,
    scale: float,
    *,
    bias: Tensor | None = None,
    op: Literal["sum", "max"] = "sum",
    by_head: bool = False,
) -> Tensor:
    """What `received_mass` returns, or with `by_head` the same for each query head, float32 `[num_heads, n]`.

    ends: int32 `[num_kv_heads, num_queries]`. lse and bias: float32.
    """
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = k.shape
    lines = num_heads if by_head else num_kv_heads
    out = torch.empty(lines, length, dtype=torch.float32, device=q.device)
    _column_kernel[(triton.cdiv(length, KEYS), lines)](
        q, k, q if bias is None else bias.contiguous(), ends.contiguous(), lse.contiguous(), out, scale * LOG2_E,
        num_queries, length, *_strides(q, k), LINE_HEADS=num_heads // lines, HAS_BIAS=bias is not None, MAXIMUM=op == "max",
        **_shape(q, k),
    )  # fmt: skip
    return out


def _strides(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    return q.stride(0), q.stride(1), k.stride(0), k.stride(1)


def _shape(q: Tensor, k: Tensor) -> dict[str, Any]:
    head_dim = q.shape[2]
    return {
        "GROUP": q.shape[1] // k.shape[0],
        "DIM": head_dim,
        "DIM_PAD": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "MEMBERS": MEMBERS,
        "KEYS": KEYS,
    }
