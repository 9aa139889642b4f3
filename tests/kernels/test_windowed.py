"""The paged kernels where each query sees its row from a slot on: against the twin, which is given those slots alone."""

from __future__ import annotations

import pytest
import torch

from agentkv.kernels import reference
from agentkv.kernels.chunk_attention import chunk_attention, token_slots
from agentkv.kernels.decode_attention import decode_attention, plan_row

HEADS, KV_HEADS, DIM = 6, 2, 12
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}
KINDS = ["ascending", "strided", "shuffled"]


def make_row(kind: str, length: int, page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and the table row of one row, in an arena of NaN."""
    count = -(-length // page_size)
    generator = torch.Generator().manual_seed(length)
    pages = torch.full((2 * count + 3, KV_HEADS, 2, page_size, DIM), torch.nan, dtype=dtype)
    orders = {"ascending": range(2, 2 + count), "strided": range(1, 1 + 2 * count, 2)}
    order = orders.get(kind, torch.randperm(2 * count + 3, generator=generator)[:count].tolist())
    table = torch.tensor(list(order), dtype=torch.int32)
    pages[table.long()] = torch.randn(count, KV_HEADS, 2, page_size, DIM, generator=generator).to(dtype)
    return pages, table


def blank(pages: torch.Tensor, table: torch.Tensor, start: int, length: int) -> None:
    """NaN in every slot that may not be read."""
    page_size = pages.shape[3]
    for slot in (*range(start), *range(length, len(table) * page_size)):
        pages[table[slot // page_size], :, :, slot % page_size] = torch.nan


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_decode_reads_from_a_slot_on(kind: str, page_size: int, dtype: torch.dtype) -> None:
    length = 20 * page_size - 2
    edges = [0, 1, page_size - 1, page_size, page_size + 1, length - page_size - 3, length - page_size, length - 2, length - 1]
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    for start in edges:
        pages, table = make_row(kind, length, page_size, dtype)
        k, v = reference.read_row(pages, table.tolist(), length)
        blank(pages, table, start, length)
        out, lse = decode_attention(q, pages, (plan_row(table, length, page_size, start),), 0.3)
        want, want_lse = reference.attention(q, k[start:], v[start:], 0.3)
        assert (out.double() - want).abs().max() <= TOLERANCE[dtype], start
        assert (lse.double() - want_lse).abs().max() <= max(TOLERANCE[dtype], 1e-5 if dtype != torch.float64 else 0)


def test_a_windowed_decode_is_bit_equal_alone_and_in_a_batch() -> None:
    """Invariant 2: the order of a row's sums depends on its own slots alone, not on where its pages lie."""
    page_size, length, start = 16, 139, 37
    q = torch.randn(3, HEADS, DIM)
    content = torch.randn(9, KV_HEADS, 2, page_size, DIM)
    results = []
    for kind in KINDS:
        pages, table = make_row(kind, length, page_size, torch.float32)
        pages[table.long()] = content
        plan, short = plan_row(table, length, page_size, start), plan_row(table, 7, page_size, 3)
        alone = decode_attention(q[1:2], pages, (plan,), 0.3)
        batch = decode_attention(q, pages, (short, plan, short), 0.3)
        assert torch.equal(alone[0][0], batch[0][1])
        assert torch.equal(alone[1][0], batch[1][1])
        results.append(alone[0])
    assert all(torch.equal(results[0], each) for each in results[1:])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("history", "chunk", "window"),
    [(0, 1, 1), (0, 37, 5), (3, 37, 40), (40, 5, 7), (40, 17, 16), (1, 600, 3), (700, 30, 650), (600, 520, 530), (900, 300, 1)],
)
def test_chunks_see_a_window_each(history: int, chunk: int, window: int, dtype: torch.dtype) -> None:
    """Also past the blocks in which the library works, where whole blocks are hidden from a query."""
    page_size, length = 16, history + chunk
    pages, table = make_row("shuffled", length, page_size, dtype)
    k, v = reference.read_row(pages, table.tolist(), length)
    q = torch.randn(chunk, HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    starts = [max(0, slot - window + 1) for slot in range(history, length)]
    blank(pages, table, starts[0], length)
    relative = [each - starts[0] for each in starts]
    out, lse = chunk_attention(q, pages, token_slots(table, length, page_size, starts[0]), 0.3, relative)
    assert lse is not None
    for token in sorted({0, 1, chunk // 2, chunk - 1, min(255, chunk - 1), min(256, chunk - 1)} & set(range(chunk))):
        seen = slice(starts[token], history + token + 1)
        want, want_lse = reference.attention(q[token : token + 1], k[seen], v[seen], 0.3)
        assert (out[token].double() - want[0]).abs().max() <= TOLERANCE[dtype], token
        limit = max(TOLERANCE[dtype], 1e-5 if dtype != torch.float64 else 0)
        assert (lse[token].double() - want_lse[0]).abs().max() <= limit
