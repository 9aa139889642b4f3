"""A few new tokens of several rows over pages on a GPU, tile by tile and piece by piece, against attention in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

from agentkv.kernels.query_tiles import QueryTiles, bound_tiles, cut_tiles, tile_size

pytest.importorskip("triton")


class Case(NamedTuple):
    """counts, lens: of each row its new tokens, and slots with them; no tokens: a row that only fills up. window: slots that a
    token sees, None: all."""

    counts: tuple[int, ...]
    lens: tuple[int, ...]
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


CASES = [
    Case((1,), (1,), 4, 2, 1, 16),
    Case((5, 0, 20, 3), (64, 1, 20, 90), 16, 6, 2, 16),
    Case((17, 40), (17, 100), 4, 3, 1, 12),
    Case((9, 30), (80, 61), 16, 4, 2, 32, 24),
]


class Drawn(NamedTuple):
    q: Tensor
    pages: Tensor
    table: Tensor
    lines: Tensor
    tiles: QueryTiles

    def to(self, device: str) -> Drawn:
        tiles = [each.to(device) for each in (self.tiles.firsts, self.tiles.rows, self.tiles.stops, self.tiles.lines)]
        return Drawn(*(each.to(device) for each in self[:4]), QueryTiles(self.tiles.size, *tiles))


def draw(case: Case, dtype: torch.dtype = torch.float32, spare: int = 2) -> Drawn:
    """Pages in random order, NaN in every slot that no row holds; table lines in another order than the rows."""
    generator = torch.Generator().manual_seed(sum(case.lens))
    num_rows, size = len(case.lens), case.page_size
    width = max(-(-length // size) for length in case.lens)
    shape = (num_rows * width + 3, case.num_kv_heads, 2, size, case.head_dim)
    pages = torch.full(shape, torch.nan)
    table = torch.randperm(num_rows * width + 3, generator=generator)[: num_rows * width].view(num_rows, width)
    lines = torch.randperm(num_rows, generator=generator)
    for line, length in zip(lines.tolist(), case.lens, strict=True):
        for slot in range(length):
            drawn = torch.randn(case.num_kv_heads, 2, case.head_dim, generator=generator)
            pages[table[line, slot // size], :, :, slot % size] = drawn
    group = case.num_heads // case.num_kv_heads
    tokens = tile_size(group, case.head_dim, dtype.itemsize)
    firsts, rows, stops, owners = cut_tiles(case.counts, tokens, bound_tiles(sum(case.counts), num_rows, tokens) + spare)
    ints = (torch.tensor(each) for each in (firsts, rows, stops, owners))
    q = torch.randn(sum(case.counts), case.num_heads, case.head_dim, generator=generator) * 2
    return Drawn(q.to(dtype), pages.to(dtype), table.to(torch.int32), lines, QueryTiles(tokens, *ints))


def first_of(case: Case, row: int, token: int) -> int:
    """First slot that a row's token sees."""
    own = case.lens[row] - case.counts[row] + token
    return 0 if case.window is None else max(0, own - case.window + 1)


def expected(case: Case, drawn: Drawn, own: bool, heads: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Query by query, in float64. heads: slots held by row and KV head, where the part is no row's own."""
    out, lse = torch.zeros(drawn.q.shape, dtype=torch.float64), torch.zeros(drawn.q.shape[:2], dtype=torch.float64)
    group, before = case.num_heads // case.num_kv_heads, 0
    for row, count in enumerate(case.counts):
        slots = torch.arange(case.lens[row])
        held = drawn.pages[drawn.table[drawn.lines[row], slots // case.page_size].long(), :, :, slots % case.page_size]
        for token in range(count):
            for head in range(case.num_heads):
                first = first_of(case, row, token) if own else 0
                stop = case.lens[row] - count + token + 1 if heads is None else int(heads[row, head // group])
                k, v = held[first:stop, head // group].double().unbind(1)
                scores = k @ drawn.q[before + token, head].double() * case.head_dim**-0.5
                out[before + token, head] = scores.softmax(0) @ v
                lse[before + token, head] = scores.logsumexp(0) if len(k) else -torch.inf
        before += count
    return out, lse


def extend(case: Case, drawn: Drawn, heads: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    from agentkv.kernels.paged_extend import paged_extend

    device = drawn.q.device
    lens = torch.tensor(case.lens, dtype=torch.int32) if heads is None else heads
    starts = None
    if heads is None and case.window is not None:
        firsts = [first_of(case, row, token) for row, count in enumerate(case.counts) for token in range(count)]
        starts = torch.tensor(firsts, dtype=torch.int32, device=device)
    return paged_extend(
        drawn.q, drawn.pages, drawn.table, drawn.lines, lens.to(device), drawn.tiles, case.head_dim**-0.5, starts=starts,
        **{"most": max(case.lens)} | more,
    )  # fmt: skip


def close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], error: float) -> None:
    (out, lse), (want, want_lse) = found, wanted
    assert (out.cpu().double() - want).abs().max() <= error
    blind = want_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, blind)
    assert (lse.cpu().double() - want_lse)[~blind].abs().max() <= error


@only_interpreted
@pytest.mark.parametrize("pieces", [(1024, 16), (32, 4), (8, 2)])
@pytest.mark.parametrize("case", CASES)
def test_own_slots_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: Case, pieces: tuple[int, int]) -> None:
    numpy_scalars(monkeypatch)
    from agentkv.kernels import paged_extend as module

    monkeypatch.setattr(module, "SHORT", pieces[0])
    monkeypatch.setattr(module, "MOST", pieces[1])
    drawn = draw(case)
    found = extend(case, drawn, tuned=module.Tuning(16, 4, 2))
    close(found, expected(case, drawn, True), 1e-5)


@only_interpreted
@pytest.mark.parametrize("case", CASES[1:3])
def test_a_part_that_all_see_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Heads hold slots of their own number, one row none."""
    numpy_scalars(monkeypatch)
    from agentkv.kernels import paged_extend as module

    monkeypatch.setattr(module, "SHORT", 16)
    drawn, generator = draw(case), torch.Generator().manual_seed(0)
    heads = torch.stack([torch.randint(0, length + 1, (case.num_kv_heads,), generator=generator) for length in case.lens])
    heads[-1] = 0
    heads = heads.to(torch.int32)
    found = extend(case, drawn, heads, tuned=module.Tuning(16, 4, 2), most=int(heads.max()))
    close(found, expected(case, drawn, False, heads), 1e-5)


@only_interpreted
def test_a_row_beside_others_has_its_bits_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host's bound, and with it the number of pieces, is another."""
    numpy_scalars(monkeypatch)
    from agentkv.kernels import paged_extend as module

    monkeypatch.setattr(module, "SHORT", 16)
    case = CASES[1]
    drawn, tuned = draw(case), module.Tuning(16, 4, 2)
    together = extend(case, drawn, tuned=tuned)
    first = 0
    for row, count in enumerate(case.counts):
        alone = case._replace(counts=(count,), lens=(case.lens[row],))
        if count:
            tiles = draw(alone).tiles
            q = drawn.q[first : first + count]
            found = extend(alone, Drawn(q, drawn.pages, drawn.table, drawn.lines[row : row + 1], tiles), tuned=tuned, most=200)
            for ours, theirs in zip(found, together, strict=True):
                assert torch.equal(ours, theirs[first : first + count])
        first += count


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 3 * len(CASES) + 3)


def test_tiles_cover_every_token_once() -> None:
    counts = (3, 0, 70, 16, 1)
    firsts, rows, stops, lines = cut_tiles(counts, 16, bound_tiles(90, 5, 16))
    assert len(firsts) == len(rows) == 90 // 16 + 5
    assert stops == [3, 3, 73, 89, 90]
    assert lines == [0] * 3 + [2] * 70 + [3] * 16 + [4]
    covered = [(row, t) for first, row in zip(firsts, rows, strict=True) for t in range(first, min(first + 16, stops[row]))]
    assert sorted(covered) == [(row, token) for token, row in enumerate(lines)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        Case((64, 1, 100), (3000, 1, 100), 16, 8, 2, 128),
        Case((33, 90), (700, 1500), 16, 7, 1, 64),
        Case((40, 8), (1400, 90), 16, 4, 2, 256),
        Case((60, 31), (2100, 400), 16, 4, 4, 128, 512),
    ],
)
def test_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    drawn = draw(case, dtype)
    close(extend(case, drawn.to("cuda")), expected(case, drawn, True), 0.02 if dtype == torch.bfloat16 else 1e-4)
    if case.window is None:
        heads = torch.tensor([[length // (2 + head) for head in range(case.num_kv_heads)] for length in case.lens])
        found = extend(case, drawn.to("cuda"), heads.to(torch.int32))
        close(found, expected(case, drawn, False, heads), 0.02 if dtype == torch.bfloat16 else 1e-4)
