"""The GPU decode kernel against its plain twin: here in Triton's interpreter, on a GPU as it is."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted

from agentkv.kernels import reference

pytest.importorskip("triton")


class Case(NamedTuple):
    """lens: slots a row holds, or a KV head of it. firsts: slots before these are not read."""

    lens: tuple
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    queries: int = 1
    firsts: tuple | None = None


CASES = [
    Case((1, 5, 17), 4, 6, 2, 12),
    Case((300, 16, 257), 16, 4, 4, 16),
    Case((520,), 16, 8, 2, 64),
    Case((2100, 40), 16, 8, 2, 64),
    Case((520, 70, 9), 16, 8, 2, 16, firsts=(33, 5, 8)),
    Case((300, 9, 30), 16, 4, 2, 16, queries=3),
    Case((140, 8), 128, 4, 2, 16, queries=8),
    Case(((40, 3, 170), (16, 129, 1)), 16, 6, 3, 16),
]
LARGE = [
    Case((1, 20000, 333), 16, 32, 8, 128),
    Case((70001, 130, 128, 127), 16, 32, 4, 128, queries=4),
    Case(((9000, 33, 1, 700), (5, 2048, 2049, 64)), 16, 16, 4, 128),
    Case((5000, 333, 700), 16, 4, 1, 256, firsts=(4489, 0, 189)),
]


MERGES = ["after", "overlap"]


def check(device: str, dtype: torch.dtype, tolerance: float, case: Case, merges: list[str]) -> None:
    from agentkv.kernels.paged_decode import bound_pieces, paged_decode, plan_decode, tuning

    generator = torch.Generator().manual_seed(3)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    num_rows, per_head = len(case.lens), lens.dim() == 2
    heads = case.num_kv_heads if per_head else 1
    num_pages = -(-int(lens.max()) // case.page_size)
    order = torch.randperm(num_rows * heads * num_pages, generator=generator).to(torch.int32)
    shape = (len(order), case.num_kv_heads, 2, case.page_size, case.head_dim)
    pages = torch.randn(shape, generator=generator).to(dtype)
    table = torch.full((num_rows + 2, heads, num_pages), -1, dtype=torch.int32)
    rows = torch.arange(num_rows).flip(0) + 1
    table[rows] = order.view(num_rows, heads, num_pages)
    q = torch.randn(num_rows * case.queries, case.num_heads, case.head_dim, generator=generator).to(dtype)
    firsts = torch.tensor(case.firsts, dtype=torch.int32) if case.firsts else torch.zeros_like(lens)
    for row, first in enumerate(case.firsts or ()):
        for slot in range(first):
            pages[table[rows[row], 0, slot // case.page_size], :, :, slot % case.page_size] = torch.nan  # may be freed
    plan = plan_decode(
        lens.to(device),
        rows.to(device),
        bound_pieces(lens.numel(), int(lens.sum())),
        firsts.to(device) if case.firsts else None,
    )
    tuned = tuning(case.head_dim * pages.element_size())
    given = q.to(device), pages.to(device), (table if per_head else table[:, 0]).contiguous().to(device), plan
    outs, lses = torch.empty(len(merges), *q.shape), torch.empty(len(merges), *q.shape[:2])
    for index, merge in enumerate([*merges, *merges]):  # twice by one plan, as layers do
        made = paged_decode(*given, case.head_dim**-0.5, queries=case.queries, tuned=tuned._replace(merge=merge))
        outs[index % len(merges)], lses[index % len(merges)] = made[0].cpu().float(), made[1].cpu()

    group = case.num_heads // case.num_kv_heads
    for row in range(num_rows):
        mine = slice(row * case.queries, (row + 1) * case.queries)
        for head in range(case.num_kv_heads):
            line = (row, head) if per_head else (row,)
            entries = table[rows[row], head if per_head else 0].tolist()
            k, v = reference.read_row(pages[:, head : head + 1], entries, int(lens[line]))
            first, members = int(firsts[line]), slice(head * group, (head + 1) * group)
            want, want_lse = reference.attention(q[mine, members], k[first:], v[first:], case.head_dim**-0.5)
            assert (outs[:, mine, members].double() - want).abs().max() < tolerance
            assert (lses[:, mine, members].double() - want_lse).abs().max() < max(tolerance, 1e-5)


@only_interpreted
@pytest.mark.parametrize("case", CASES)
def test_equals_the_twin_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    numpy_scalars(monkeypatch)
    check("cpu", torch.float32, 1e-5, case, MERGES[:1])


@only_interpreted
@pytest.mark.parametrize("merge", MERGES[:1])
def test_a_row_that_holds_nothing_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, merge: str) -> None:
    numpy_scalars(monkeypatch)
    from agentkv.kernels.paged_decode import Tuning, bound_pieces, paged_decode, plan_decode

    plan = plan_decode(torch.tensor([0, 3], dtype=torch.int32), torch.arange(2), bound_pieces(2, 3))
    pages, q = torch.ones(2, 2, 2, 16, 16), torch.ones(2, 4, 16)
    out, lse = paged_decode(
        q, pages, torch.tensor([[0], [1]], dtype=torch.int32), plan, 1.0, tuned=Tuning(4, 2, 32, merge=merge)
    )
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert (out[1] == 1).all()


@only_interpreted
def test_a_row_is_the_same_bit_for_bit_whatever_stands_beside_it_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs go from a piece of one row to one of another: nothing may come along, not even from keys that are no numbers."""
    numpy_scalars(monkeypatch)
    from agentkv.kernels.paged_decode import Tuning, bound_pieces, paged_decode, plan_decode

    generator = torch.Generator().manual_seed(7)
    lens, tuned = torch.tensor([300, 0, 5, 129], dtype=torch.int32), Tuning(4, 3, 64)
    pages = torch.randn(4, 19, 2, 2, 16, 16, generator=generator)
    pages[2] = torch.nan
    table = torch.arange(4 * 19, dtype=torch.int32).view(4, 19)
    q, rows = torch.randn(4, 4, 16, generator=generator), torch.arange(4)

    def decode(chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        plan = plan_decode(lens[chosen], rows[chosen], bound_pieces(4, 434))
        return paged_decode(q[chosen], pages.flatten(0, 1), table, plan, 0.25, tuned=tuned)

    out, lse = decode(slice(None))
    assert out[2].isnan().all()
    for row in (0, 1, 3):
        alone, alone_lse = decode(slice(row, row + 1))
        assert torch.equal(out[row], alone[0])
        assert torch.equal(lse[row], alone_lse[0])
        assert not out[row].isnan().any()


@only_interpreted
@pytest.mark.parametrize("head_dim", [32, 64])
def test_pages_of_granules_are_read_as_dense_ones_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """An arena's pages begin at any granule of 256 bytes, 64 numbers here: half a slot's key, or one."""
    numpy_scalars(monkeypatch)
    from agentkv.kernels.paged_decode import bound_pieces, paged_decode, plan_decode

    generator = torch.Generator().manual_seed(9)
    dense = torch.randn(5, 2, 2, 4, head_dim, generator=generator)
    unit = dense[0].numel() // 64
    granules = dense.flatten().as_strided((4 * unit + 1, *dense.shape[1:]), (64, *dense.stride()[1:]))
    q, table, rows = torch.randn(2, 4, head_dim, generator=generator), torch.tensor([[3, 0], [1, 4]]), torch.arange(2)
    plan = plan_decode(torch.tensor([7, 5], dtype=torch.int32), rows, bound_pieces(2, 12))
    want, want_lse = paged_decode(q, dense, table.to(torch.int32), plan, 0.2)
    got, got_lse = paged_decode(q, granules, (table * unit).to(torch.int32), plan, 0.2)
    assert torch.equal(got, want)
    assert torch.equal(got_lse, want_lse)


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, len(CASES) + 4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_equals_the_twin_on_a_gpu(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    check("cuda", dtype, tolerance, case, MERGES)


@pytest.mark.gpu
@pytest.mark.parametrize("merge", MERGES)
def test_a_row_alone_is_the_same_bit_for_bit_and_a_graph_takes_other_lengths(merge: str) -> None:
    from agentkv.kernels.paged_decode import Tuning, bound_pieces, paged_decode, plan_decode

    generator = torch.Generator("cuda").manual_seed(5)
    pages = torch.randn(600, 4, 2, 16, 64, device="cuda", generator=generator).bfloat16()
    table = torch.randperm(600, device="cuda", generator=generator).to(torch.int32).view(4, 150)
    q = torch.randn(4, 16, 64, device="cuda", generator=generator).bfloat16()
    lens = torch.tensor([2400, 5, 1024, 129], dtype=torch.int32, device="cuda")
    rows = torch.arange(4, device="cuda")
    bound, tuned = bound_pieces(4, 4 * 2400), Tuning(2, 2, 64, merge=merge)

    def together() -> torch.Tensor:
        return paged_decode(q, pages, table, plan_decode(lens, rows, bound), 0.125, tuned=tuned)[0]

    def alone(row: int) -> torch.Tensor:
        plan = plan_decode(lens[row : row + 1], rows[row : row + 1], bound)
        return paged_decode(q[row : row + 1], pages, table, plan, 0.125, tuned=tuned)[0][0]

    together()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = together()
    for lengths in ([2400, 5, 1024, 129], [1, 2399, 64, 777]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for row in range(4):
            assert torch.equal(captured[row], alone(row))
