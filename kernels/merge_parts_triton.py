"""Merge attention over two disjoint sets of keys by their log-sum-exp, in one pass on a GPU. The twin is `merge_parts`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, lse_ptr,
    a_token, a_head, a_lse_token, a_lse_head, b_token, b_head, b_lse_token, b_lse_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    live = (head[:, None] < HEADS) & (dim[None, :] < DIM)
    lse_a = tl.load(a_lse_ptr + token * a_lse_token + head * a_lse_head, mask=head < HEADS, other=0.0)
    lse_b = tl.load(b_lse_ptr + token * b_lse_token + head * b_lse_head, mask=head < HEADS, other=0.0)
    top = tl.maximum(tl.maximum(lse_a, lse_b), -1e30)  # neither may have a key
    weight_a, weight_b = tl.exp(lse_a - top), tl.exp(lse_b - top)
    total = weight_a + weight_b
    safe = tl.where(total > 0, total, 1.0)
    a = tl.load(a_ptr + token * a_token + head[:, None] * a_head + dim[None, :], mask=live).to(tl.float32)
    b = tl.load(b_ptr + token * b_token + head[:, None] * b_head + dim[None, :], mask=live).to(tl.float32)
    merged = a * (weight_a / safe)[:, None] + b * (weight_b / safe)[:, None]
    tl.store(out_ptr + token * HEADS * DIM + head[:, None] * DIM + dim[None, :], merged, mask=live)
    tl.store(lse_ptr + token * HEADS + head, tl.where(total > 0, top + tl.log(safe), float("-inf")), mask=head < HEADS)


def merge_two(outs: tuple[Tensor, Tensor], lses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys.

    outs: `[num_tokens, num_heads, head_dim]` each, last dim contiguous, finite. lses: natural log-sum-exp of the scaled scores,
    float32 `[num_tokens, num_heads]` each, -inf where a set has no key for that token. Returns the same two, contiguous.
    """
    num_tokens, num_heads, head_dim = outs[0].shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=outs[0].dtype, device=outs[0].device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=out.device)
    given = [each for part in zip(outs, lses, strict=True) for each in part]
    strides = [step for each in given for step in each.stride()[:2]]
    _merge_kernel[(num_tokens,)](
        *given, out, lse, *strides, HEADS=num_heads, HEADS_PAD=triton.next_power_of_2(num_heads), DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out, lse
