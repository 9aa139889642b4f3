"""Copies of tokens' vectors on a GPU. The twin is `place_rows`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are the language's own values)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows_ptr", "places_ptr", "tokens_ptr"])
def _place_kernel(
    target_ptr, rows_ptr, places_ptr, source_ptr, tokens_ptr, row_stride, place_stride, token_stride, head_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    index = tl.program_id(0)
    head, dim = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    live = (head[:, None] < HEADS) & (dim[None, :] < DIM)
    read = tl.load(tokens_ptr + index) * token_stride + head[:, None] * head_stride + dim[None, :]
    write = tl.load(rows_ptr + index) * row_stride + tl.load(places_ptr + index) * place_stride
    tl.store(target_ptr + write + head[:, None] * DIM + dim[None, :], tl.load(source_ptr + read, mask=live), mask=live)


def write_rows(target: Tensor, rows: Tensor, places: Tensor, source: Tensor, tokens: Tensor) -> None:
    """As `place_rows`."""
    num_heads, head_dim = source.shape[1:]
    if len(tokens):
        _place_kernel[(len(tokens),)](
            target, rows, places, source, tokens, *target.stride()[:2], *source.stride()[:2], HEADS=num_heads,
            HEADS_PAD=triton.next_power_of_2(num_heads), DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
        )  # fmt: skip
