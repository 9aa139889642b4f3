"""The paged kernels against their plain twins: stores, moves, decode, chunks, merges."""

from __future__ import annotations

import pytest
import torch

from agentkv.kernels import reference
from agentkv.kernels.chunk_attention import chunk_attention, token_slots
from agentkv.kernels.decode_attention import decode_attention, plan_row
from agentkv.kernels.merge_parts import merge_parts
from agentkv.kernels.move_slots import move_slots
from agentkv.kernels.store_kv import store_kv

HEADS, KV_HEADS, DIM = 6, 2, 12
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}
ORDERS = ["ascending", "strided", "two runs", "descending", "shuffled"]


def make_pages(count: int, page_size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, KV_HEADS, 2, page_size, DIM, generator=torch.Generator().manual_seed(count)).to(dtype)


def order_of(kind: str, count: int, total: int) -> list[int]:
    if kind == "ascending":
        return list(range(3, 3 + count))
    if kind == "strided":
        return list(range(0, 2 * count, 2))
    if kind == "two runs":
        return [*range(total - count // 2, total), *range(count - count // 2)]
    if kind == "descending":
        return list(range(total - 1, total - 1 - count, -1))
    return torch.randperm(total, generator=torch.Generator().manual_seed(1))[:count].tolist()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_decode_equals_the_twin(kind: str, page_size: int, dtype: torch.dtype) -> None:
    pages = make_pages(50, page_size, dtype)
    lengths = [1, page_size - 1, page_size, page_size + 1, 20 * page_size - 1, 20 * page_size]
    orders = [order_of(kind, -(-length // page_size), 50) for length in lengths]
    plans = tuple(
        plan_row(torch.tensor(order, dtype=torch.int32), length, page_size)
        for order, length in zip(orders, lengths, strict=True)
    )
    q = torch.randn(len(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    out, lse = decode_attention(q, pages, plans, 0.3)
    assert out.dtype == dtype
    for index, (order, length) in enumerate(zip(orders, lengths, strict=True)):
        want, want_lse = reference.attention(q[index : index + 1], *reference.read_row(pages, order, length), 0.3)
        assert (out[index].double() - want[0]).abs().max() <= TOLERANCE[dtype]
        assert (lse[index].double() - want_lse[0]).abs().max() <= max(TOLERANCE[dtype], 1e-5 if dtype != torch.float64 else 0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["ascending", "shuffled"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_few_queries_a_row_equal_the_twin(kind: str, page_size: int, dtype: torch.dtype) -> None:
    """Causal among themselves, across page edges, one and several queries in one call."""
    pages = make_pages(50, page_size, dtype)
    lengths, counts = [8, 9, page_size + 3, 20 * page_size + 1, 20 * page_size], (8, 1, 3, 2, 7)
    orders = [order_of(kind, -(-length // page_size), 50) for length in lengths]
    plans = tuple(
        plan_row(torch.tensor(order, dtype=torch.int32), length, page_size)
        for order, length in zip(orders, lengths, strict=True)
    )
    q = torch.randn(sum(counts), HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    out, lse = decode_attention(q, pages, plans, 0.3, counts)
    assert out.dtype == dtype
    start = 0
    for order, length, count in zip(orders, lengths, counts, strict=True):
        tokens = slice(start, start + count)
        want, want_lse = reference.attention(q[tokens], *reference.read_row(pages, order, length), 0.3)
        assert (out[tokens].double() - want).abs().max() <= TOLERANCE[dtype]
        assert (lse[tokens].double() - want_lse).abs().max() <= max(TOLERANCE[dtype], 1e-5 if dtype != torch.float64 else 0)
        start += count


def test_decode_of_a_row_is_bit_equal_alone_in_a_batch_and_at_other_places() -> None:
    """Invariant 2: the order of a row's sums depends on its own length alone."""
    page_size, count = 16, 9
    length = count * page_size - 5
    content = make_pages(count, page_size, torch.float32)
    q = torch.randn(3, HEADS, DIM)
    results = []
    for kind in ORDERS:
        order = order_of(kind, count, 50)
        pages = torch.full((50, KV_HEADS, 2, page_size, DIM), torch.nan)
        pages[order] = content
        plan = plan_row(torch.tensor(order, dtype=torch.int32), length, page_size)
        short = plan_row(torch.tensor(order, dtype=torch.int32), 7, page_size)
        alone = decode_attention(q[1:2], pages, (plan,), 0.3)
        batch = decode_attention(q, pages, (short, plan, short), 0.3)
        assert torch.equal(alone[0][0], batch[0][1])
        assert torch.equal(alone[1][0], batch[1][1])
        results.append(alone[0])
    assert all(torch.equal(results[0], each) for each in results[1:])


def test_runs_are_read_in_place_and_scattered_pages_are_not() -> None:
    def runs(entries: list[int], length: int) -> tuple[tuple[int, int, int], ...]:
        return plan_row(torch.tensor(entries, dtype=torch.int32), length, 4).runs

    assert runs([5, 9, 13, 17, 40], 19) == ((5, 4, 4),)
    assert runs([5, 9, 13, 100, 104], 20) == ((5, 4, 3), (100, 4, 2))
    assert runs([7], 4) == ((7, 1, 1),)
    assert runs(list(range(100, 0, -3)), 100) == ()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("history", "chunk"), [(0, 1), (0, 16), (0, 37), (1, 1), (15, 2), (16, 16), (33, 31), (40, 1)])
def test_chunks_equal_the_twin(history: int, chunk: int, dtype: torch.dtype) -> None:
    page_size, length = 16, history + chunk
    pages = make_pages(20, page_size, dtype)
    order = order_of("shuffled", -(-length // page_size), 20)
    table = torch.full((8,), -1, dtype=torch.int32)
    table[: len(order)] = torch.tensor(order)
    q = torch.randn(chunk, HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    out, lse = chunk_attention(q, pages, token_slots(table, length, page_size), 0.3)
    want, want_lse = reference.attention(q, *reference.read_row(pages, order, length), 0.3)
    assert (out.double() - want).abs().max() <= TOLERANCE[dtype]
    assert lse is not None
    assert (lse.double() - want_lse).abs().max() <= max(TOLERANCE[dtype], 1e-5 if dtype != torch.float64 else 0)


def test_store_writes_the_named_slots_and_no_other() -> None:
    pages = make_pages(6, 4)
    before = pages.clone()
    entries, offsets = torch.tensor([5, 0, 5]), torch.tensor([3, 0, 1])
    k, v = torch.randn(2, 3, KV_HEADS, DIM, dtype=torch.float64)
    store_kv(pages, entries, offsets, k, v)
    for index, (entry, offset) in enumerate(zip(entries.tolist(), offsets.tolist(), strict=True)):
        assert torch.equal(pages[entry, :, 0, offset], k[index])
        assert torch.equal(pages[entry, :, 1, offset], v[index])
        before[entry, :, :, offset] = pages[entry, :, :, offset]
    assert torch.equal(pages, before)


def test_moves_read_everything_before_they_write() -> None:
    """A rotation of three slots over two pages: copying one by one would lose one of them."""
    pages = make_pages(2, 4)
    before = pages.clone()
    at = (torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3]))
    to = (torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1]))
    move_slots([pages], at, to)
    for entry, offset, new_entry, new_offset in zip(*(each.tolist() for each in (*at, *to)), strict=True):
        assert torch.equal(pages[new_entry, :, :, new_offset], before[entry, :, :, offset])


@pytest.mark.parametrize("cuts", [(5,), (1, 20), (0, 29)])
def test_parts_merge_to_the_whole(cuts: tuple[int, ...]) -> None:
    q = torch.randn(1, HEADS, DIM, dtype=torch.float64)
    k, v = torch.randn(2, 30, KV_HEADS, DIM, dtype=torch.float64)
    want, want_lse = reference.attention(q, k, v, 0.3)
    outs, lses = [], []
    for start, stop in zip((0, *cuts), (*cuts, 30), strict=True):
        if start == stop:  # an empty part: finite out, no mass
            outs.append(torch.ones_like(q))
            lses.append(torch.full((1, HEADS), -torch.inf, dtype=torch.float64))
            continue
        out, lse = reference.attention(q, k[start:stop], v[start:stop], 0.3)
        outs.append(out)
        lses.append(lse)
    out, lse = merge_parts(outs, lses)
    assert (out - want).abs().max() < 1e-14
    assert (lse - want_lse).abs().max() < 1e-14
