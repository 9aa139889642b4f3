"""Attention over slots whose number differs by row and KV head, against loops in float64; compiled and in torch."""

from __future__ import annotations

import pytest
import torch
from devices import NoWaiting

from agentkv.kernels import reference
from agentkv.kernels.ragged_decode import ragged_decode
from agentkv.kernels.slot_mass import slot_mass

LENS = [[5, 0], [300, 17], [1, 256]]
SCALE = 0.3


def made(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Part:
    """Three rows of two KV heads with two query heads each, in shared pages or in head pages."""

    def __init__(self, dtype: torch.dtype, by_head: bool, queries: int, page_size: int = 16) -> None:
        num_pages = -(-300 // page_size)
        lines = 3 * (2 if by_head else 1)
        self.pages = made(lines * num_pages, 1 if by_head else 2, 2, page_size, 8, dtype=dtype)
        order = torch.randperm(len(self.pages), generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.rows = torch.tensor([4, 0, 2])
        shape = (5, 2, num_pages) if by_head else (5, num_pages)
        self.table = torch.full(shape, -1, dtype=torch.int32)
        self.table[self.rows] = order.view(3, *shape[1:])
        self.lens = torch.tensor(LENS, dtype=torch.int32)
        self.q = made(3 * queries, 4, 8, dtype=dtype)
        self.queries = queries

    def run(self, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return ragged_decode(
            self.q, self.pages, self.table, self.rows, self.lens, SCALE, max_len=300, queries=self.queries, bias=bias
        )

    def check(self, tolerance: float, bias: torch.Tensor | None = None) -> None:
        with NoWaiting():
            out, lse = self.run(bias)
        assert out.dtype == self.q.dtype
        for token in range(len(self.q)):
            row = token // self.queries
            for head in range(4):
                line, length = head // 2, LENS[row][head // 2]
                if not length:
                    assert not out[token, head].any()
                    assert lse[token, head] == -torch.inf
                    continue
                own = self.table[self.rows[row]]
                entries = (own[line] if own.dim() == 2 else own).tolist()
                k, v = reference.read_row(self.pages[:, line % self.pages.shape[1]].unsqueeze(1), entries, length)
                scores = k[:, 0].double() @ self.q[token, head].double() * SCALE
                if bias is not None:
                    scores = scores + bias[row, line, :length].double()
                weights = torch.exp(scores - torch.logsumexp(scores, 0))
                assert abs(float(lse[token, head]) - float(torch.logsumexp(scores, 0))) < max(tolerance, 1e-12)
                assert (out[token, head].double() - weights @ v[:, 0].double()).abs().max() < tolerance


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_loops(by_head: bool, queries: int, dtype: torch.dtype, tolerance: float) -> None:
    Part(dtype, by_head, queries).check(tolerance)


@pytest.mark.parametrize("by_head", [False, True])
def test_slots_by_name_are_those_of_a_page_each(by_head: bool) -> None:
    """Any slots of any pages, in any order: the same as if each lay in a page of one."""
    part = Part(torch.float64, by_head, 2)
    num_pages, num_heads, _, size, dim = part.pages.shape
    generator = torch.Generator().manual_seed(5)
    names = torch.stack([torch.randperm(num_pages * size, generator=generator)[:300] for _ in range(10)])
    names = names.view(5, 2, 300) if by_head else names[:5]
    single = part.pages.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, 2, 1, dim)
    lines = (part.rows, part.lens, SCALE)
    want = ragged_decode(part.q, single, names.to(torch.int32), *lines, max_len=300, queries=2)
    with NoWaiting():
        got = ragged_decode(part.q, part.pages, names, *lines, max_len=300, queries=2, by_slot=True)
    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))


@pytest.mark.parametrize("by_head", [False, True])
def test_bias(by_head: bool) -> None:
    bias = made(3, 2, 300)
    bias[1, 0, :270] = -torch.inf  # a whole block is hidden
    Part(torch.float64, by_head, 2).check(1e-12, bias)


def test_a_row_is_the_same_alone_bit_for_bit() -> None:
    part = Part(torch.float32, True, 2)
    bias = torch.zeros(3, 2, 300)
    together = part.run(bias)[0]
    for row, longest in enumerate((5, 300, 256)):
        mine = slice(row * 2, row * 2 + 2)
        alone, _ = ragged_decode(
            part.q[mine], part.pages, part.table, part.rows[row : row + 1], part.lens[row : row + 1], SCALE,
            max_len=longest, queries=2, bias=bias[row : row + 1, :, :longest],
        )  # fmt: skip
        assert torch.equal(alone, together[mine])


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_mass_by_slot_equals_loops(by_head: bool, queries: int) -> None:
    part = Part(torch.float64, by_head, queries)
    _, lse = part.run()
    given = (part.q, part.pages, part.table, part.rows, part.lens, lse, SCALE)
    with NoWaiting():
        summed = slot_mass(*given, max_len=300, queries=queries)
        most = slot_mass(*given, max_len=300, queries=queries, reduce="max")
    for row in range(3):
        own = part.table[part.rows[row]]
        for line in range(2):
            length, want = LENS[row][line], []
            entries = (own[line] if own.dim() == 2 else own).tolist()
            for token in range(row * queries, (row + 1) * queries) if length else ():
                for head in (2 * line, 2 * line + 1):
                    keys, _ = reference.read_row(part.pages[:, line % part.pages.shape[1]].unsqueeze(1), entries, length)
                    want.append(torch.softmax(keys[:, 0] @ part.q[token, head] * SCALE, 0))
            assert not summed[row, line, length:].any()
            assert not most[row, line, length:].any()
            if length:
                assert torch.allclose(summed[row, line, :length], torch.stack(want).sum(0), rtol=1e-12)
                assert torch.allclose(most[row, line, :length], torch.stack(want).amax(0), rtol=1e-12)


@pytest.mark.parametrize("queries", [1, 3])
def test_mass_of_slots_some_of_which_are_hidden(queries: int) -> None:
    """Slots that a bias hides receive nothing, however large their scores are; the others what the softmax gives them."""
    part = Part(torch.float64, True, queries)
    bias = made(3, 2, 310, dtype=torch.float32)
    bias[bias > 1] = -torch.inf
    part.pages[part.table[2, 0, 1]] = 1e4  # a page of row 2 whose scores would overflow
    bias[2, 0, 16:32] = -torch.inf
    _, lse = part.run(bias[..., :300].contiguous())
    mass = slot_mass(part.q, part.pages, part.table, part.rows, part.lens, lse, SCALE, max_len=300, queries=queries, bias=bias)
    for row in range(3):
        for line in range(2):
            length, want = LENS[row][line], torch.zeros(300, dtype=torch.float64)
            for token in range(row * queries, (row + 1) * queries) if length else ():
                for head in (2 * line, 2 * line + 1):
                    entries = part.table[part.rows[row], line].tolist()
                    keys, _ = reference.read_row(part.pages[:, :1], entries, length)
                    scores = keys[:, 0] @ part.q[token, head] * SCALE + bias[row, line, :length].double()
                    want[:length] += torch.softmax(scores, 0)
            assert torch.allclose(mass[row, line], want, rtol=1e-12)


def test_nothing_at_all() -> None:
    part = Part(torch.float32, False, 1)
    part.lens.zero_()
    out, lse = part.run()
    assert not out.any()
    assert (lse == -torch.inf).all()
