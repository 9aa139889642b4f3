"""Bounds of pages and the scores from them, against loops over keys."""

from __future__ import annotations

import pytest
import torch
from devices import NoWaiting

from agentkv.kernels.page_bounds import page_bounds
from agentkv.kernels.page_scores import page_scores


def made(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [None, [4, 1, 3]])
def test_bounds_are_the_extremes_of_each_channel(dtype: torch.dtype, counts: list[int] | None) -> None:
    pages, bounds = made(7, 2, 2, 4, 5, dtype=dtype), torch.full((6, 2, 2, 5), 9.0, dtype=dtype)
    entries, targets = torch.tensor([6, 0, 3]), torch.tensor([2, 5, 0])
    with NoWaiting():
        page_bounds(pages, entries, bounds, targets, None if counts is None else torch.tensor(counts, dtype=torch.int32))
    for index, (entry, target) in enumerate(zip(entries.tolist(), targets.tolist(), strict=True)):
        held = counts[index] if counts else 4
        for head in range(2):
            for channel in range(5):
                values = [float(pages[entry, head, 0, slot, channel]) for slot in range(held)]
                assert bounds[target, head, :, channel].tolist() == [min(values), max(values)]
    assert (bounds[[1, 3, 4]] == 9).all()


def bounds_of(pages: torch.Tensor) -> torch.Tensor:
    bounds = torch.empty(len(pages), pages.shape[1], 2, pages.shape[4], dtype=pages.dtype)
    page_bounds(pages, torch.arange(len(pages)), bounds, torch.arange(len(pages)))
    return bounds


@pytest.mark.parametrize("reduce", ["max", "sum", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_scores_equal_loops(reduce: str, dtype: torch.dtype, tolerance: float) -> None:
    pages, q = made(6, 2, 2, 4, 5, dtype=dtype), made(2, 6, 5, dtype=dtype)
    bounds = bounds_of(pages)
    table = torch.tensor([[3, 1, 5, 0], [-1, 2, 4, 1 << 30]], dtype=torch.int32)
    first, last = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4, 3], dtype=torch.int32)
    with NoWaiting():
        got = page_scores(q, bounds, table, first, last, reduce=reduce)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(2):
        for place in range(4):
            for head in range(2):
                if not int(first[row]) <= place < int(last[row]):
                    assert (got[row, :, place] == -torch.inf).all()
                    continue
                low, high = bounds[int(table[row, place]), head].double()
                members = q[row, head * 3 : head * 3 + 3].double()
                each = [sum(max(float(m[d] * low[d]), float(m[d] * high[d])) for d in range(5)) for m in members]
                want = {"max": max(each), "sum": sum(each)}.get(reduce)
                mine = got[row, head, place] if want is not None else got[row, head * 3 : head * 3 + 3, place]
                wanted = torch.tensor(each if want is None else want, dtype=torch.float64)
                assert (mine.double() - wanted).abs().max() < tolerance


def test_no_key_scores_more_than_its_page_and_pages_of_one_key_score_exactly() -> None:
    pages, q = made(40, 1, 2, 8, 16), made(1, 2, 16)
    table, ends = torch.arange(40).view(1, 40), torch.tensor([40], dtype=torch.int32)
    scores = page_scores(q, bounds_of(pages), table, ends * 0, ends, reduce="none")[0]
    products = torch.einsum("hd,psd->hps", q[0], pages[:, 0, 0])
    assert (scores >= products.amax(-1) - 1e-12).all()
    single = page_scores(q, bounds_of(pages[:, :, :, :1]), table, ends * 0, ends, reduce="none")[0]
    assert torch.allclose(single, products[..., 0])


@pytest.mark.parametrize("reduce", ["max", "sum", "none"])
def test_a_row_is_the_same_alone_bit_for_bit(reduce: str) -> None:
    bounds, q = bounds_of(made(200, 2, 2, 4, 32, dtype=torch.float32)), made(3, 8, 32, dtype=torch.float32)
    table = torch.arange(600).view(3, 200) % 200
    last = torch.tensor([200, 3, 70], dtype=torch.int32)
    together = page_scores(q, bounds, table, last * 0, last, reduce=reduce)
    for row, count in enumerate(last.tolist()):
        mine = slice(row, row + 1)
        alone = page_scores(q[mine], bounds, table[mine, :count], last[mine] * 0, last[mine], reduce=reduce)
        assert torch.equal(alone[0], together[row, :, :count])
