"""The compiled kernels against float64 and closed forms, and how they are built."""

from __future__ import annotations

import math
import stat
from pathlib import Path

import pytest
import torch

from agentkv.kernels import native as loader
from agentkv.kernels import reference
from agentkv.kernels.decode_attention import decode_attention, plan_row
from agentkv.kernels.linear import MOST_TOKENS, linear
from agentkv.kernels.native import native
from agentkv.kernels.paged_attention import paged_attention

compiled = pytest.mark.skipif(not native().functions, reason=native().note)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
SCALE = 0.2


def table_of(lens: list[int], page_size: int, order: str) -> torch.Tensor:
    """Pages of each row, none twice; unused entries point far outside."""
    width = max(-(-length // page_size) for length in lens)
    pages = torch.arange(len(lens) * width)
    if order == "scattered":
        pages = pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(3))]
    table = pages.view(len(lens), width).to(torch.int32)
    for row, length in enumerate(lens):
        table[row, -(-length // page_size) :] = 2**31 - 1
    return table


def make(lens: list[int], counts: list[int], heads: tuple[int, int], dim: int, page_size: int, dtype: torch.dtype, order: str):
    generator = torch.Generator().manual_seed(dim + page_size)
    table = table_of(lens, page_size, order)
    pages = torch.randn(table.numel(), heads[1], 2, page_size, dim, generator=generator).to(dtype)
    q = torch.randn(sum(counts), heads[0], dim, generator=generator).to(dtype)
    rows = torch.arange(len(lens)).flip(0)  # a row's line of the table is not its place in the batch
    return q, pages, (table.flip(0).contiguous(), rows, torch.tensor(lens, dtype=torch.int32)), table


def check(lens, counts, heads, dim, page_size, dtype, order="scattered", starts=None) -> None:
    q, pages, rows, table = make(lens, counts, heads, dim, page_size, dtype, order)
    given = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    out, lse = paged_attention(q, pages, rows, SCALE, tuple(counts), given)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    token = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        k, v = reference.read_row(pages, table[row].tolist(), length)
        for i in range(count):
            seen = slice(starts[token] if starts else 0, length - count + i + 1)
            want, want_lse = reference.attention(q[token : token + 1], k[seen], v[seen], SCALE)
            assert (out[token].double() - want[0]).abs().max() <= TOLERANCE[dtype]
            assert (lse[token].double() - want_lse[0]).abs().max() <= 1e-5
            token += 1


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [12, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
def test_attention_of_every_head_shape(dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check([1, 130, 37], [1, 1, 3], heads, dim, 128, dtype)


@compiled
@pytest.mark.parametrize("order", ["ascending", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_attention_at_the_edges_of_pages_blocks_and_pieces(page_size: int, order: str) -> None:
    edges = [1, 15, 16, 17, 127, 128, 129, 511, 512, 513, 640, 1025]
    check(edges, [1] * len(edges), (3, 1), 20, page_size, torch.float32, order)


@compiled
@pytest.mark.parametrize("count", range(1, 9))
def test_the_last_tokens_of_a_row_do_not_see_one_another(count: int) -> None:
    check([count, 128, 128 + count // 2, 515], [count, 1, count, count], (6, 2), 64, 128, torch.float32)


@compiled
def test_a_window_starts_where_it_is_told_and_nothing_before_is_read() -> None:
    lens, counts = [40, 600, 1100], [2, 3, 1]
    starts = [0, 5, 90, 127, 128, 513]
    check(lens, counts, (6, 2), 64, 128, torch.float32, starts=starts)
    q, pages, rows, table = make(lens, counts, (6, 2), 64, 128, torch.float32, "ascending")
    before = paged_attention(q, pages, rows, SCALE, tuple(counts), torch.tensor(starts, dtype=torch.int32))
    pages[table[2, 0]], pages[table[2, 3]], pages[table[1, 0], :, :, :90] = math.nan, math.nan, math.nan
    rows[0][rows[1][2], 0] = 2**31 - 1  # a page behind the window has been given away
    after = paged_attention(q, pages, rows, SCALE, tuple(counts), torch.tensor(starts, dtype=torch.int32))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@compiled
def test_equal_keys_give_the_mean_of_the_values_and_a_far_larger_score_its_own() -> None:
    """Closed forms, at scores far from 0: all keys alike, then one key that is worth e**60 times the others."""
    length, page_size = 700, 128
    table = torch.arange(6, dtype=torch.int32).unsqueeze(0)
    pages = torch.randn(6, 1, 2, page_size, 64)
    pages[:, :, 0] = 1.0
    q = torch.full((1, 1, 64), 5.0)
    rows = (table, torch.tensor([0]), torch.tensor([length], dtype=torch.int32))
    out, lse = paged_attention(q, pages, rows, 1.0)
    values = pages[:, 0, 1].reshape(-1, 64)[:length]
    assert torch.allclose(out[0, 0], values.double().mean(0).float(), atol=1e-6)
    assert lse.item() == pytest.approx(320 + math.log(length), abs=1e-4)
    pages[4, 0, 0, 60] = 1.1875  # slot 572: score 380
    out, lse = paged_attention(q, pages, rows, 1.0)
    assert torch.allclose(out[0, 0], values[572], atol=1e-6)
    assert lse.item() == pytest.approx(380, abs=1e-4)


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_is_the_same_bits_alone_in_a_batch_on_any_threads_and_in_any_pages(dtype: torch.dtype) -> None:
    lens, counts = [1300, 5, 700, 128], [1, 2, 8, 1]
    q, pages, rows, table = make(lens, counts, (6, 2), 64, 16, dtype, "scattered")
    threads = torch.get_num_threads()
    batch = paged_attention(q, pages, rows, SCALE, tuple(counts))
    moved = torch.randperm(len(pages))
    elsewhere = torch.empty_like(pages)
    elsewhere[moved] = pages
    try:
        token = 0
        for row, count in enumerate(counts):
            torch.set_num_threads(1 + row % 3)
            entries = table[row : row + 1].clone()
            entries[entries < len(pages)] = moved[entries[entries < len(pages)]].to(torch.int32)
            one = (entries, torch.tensor([0]), torch.tensor([lens[row]], dtype=torch.int32))
            alone = paged_attention(q[token : token + count], elsewhere, one, SCALE, (count,))
            assert torch.equal(alone[0], batch[0][token : token + count])
            assert torch.equal(alone[1], batch[1][token : token + count])
            token += count
    finally:
        torch.set_num_threads(threads)


@compiled
def test_the_torch_twin_agrees() -> None:
    lens = [1, 128, 129, 900]
    q, pages, rows, table = make(lens, [1] * 4, (6, 2), 64, 128, torch.float32, "ascending")
    plans = tuple(plan_row(table[row], length, 128) for row, length in enumerate(lens))
    for mine, twin in zip(paged_attention(q, pages, rows, SCALE), decode_attention(q, pages, plans, SCALE), strict=True):
        assert torch.allclose(mine, twin, atol=2e-6)


@compiled
def test_queries_may_be_strided_and_other_layouts_are_refused() -> None:
    q, pages, rows, _ = make([130, 40], [1, 1], (6, 2), 64, 128, torch.float32, "ascending")
    wide = torch.randn(2, 10, 64)
    wide[:, :6] = q
    assert torch.equal(paged_attention(wide[:, :6], pages, rows, SCALE)[0], paged_attention(q, pages, rows, SCALE)[0])
    with pytest.raises(ValueError, match="layout"):
        paged_attention(q, pages.transpose(3, 4).contiguous().transpose(3, 4), rows, SCALE)


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (5, 7), (64, 64), (100, 33), (576, 1000)])
def test_a_linear_map_equals_float64_and_no_token_sees_another(depth: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(depth)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((MOST_TOKENS, depth), (width, depth), (width,))
    )
    whole = linear(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    bound = x.double().abs() @ weight.double().abs().T + bias.double().abs()  # rounding is relative to the terms
    assert ((whole.double() - want).abs() <= bound * (1e-6 if dtype == torch.float32 else 5e-3)).all()
    for start in range(MOST_TOKENS):
        for stop in {start + 1, min(start + 3, MOST_TOKENS)}:
            assert torch.equal(linear(x[start:stop], weight, bias), whole[start:stop])
    half = depth - depth // 2
    narrow = weight[:, :half].contiguous()
    assert torch.equal(linear(x[:, :half], narrow), linear(x[:, :half].contiguous(), narrow))


@compiled
def test_a_special_value_stays_what_it_is() -> None:
    x, weight = torch.ones(1, 32), torch.ones(4, 32)
    weight[0, 3], weight[1, 3], weight[2, 20] = math.inf, math.nan, 1e38
    for dtype in TOLERANCE:
        y = linear(x.to(dtype), weight.to(dtype))[0]
        assert y[0] == math.inf
        assert y[1].isnan()
        assert y[3] == 32


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    built = native.__wrapped__()
    assert not built.functions
    assert loader.SWITCH in built.note


def test_without_a_compiler_or_with_one_that_fails_the_note_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "no C++ compiler" in native.__wrapped__().note
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    built = native.__wrapped__()
    assert not built.functions
    assert "no such header" in built.note
    assert list((tmp_path / "cache").rglob("*.so")) == []


@compiled
def test_a_damaged_library_in_the_cache_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "_COMMON", ("-O1", "-std=gnu++17", "-fPIC", "-shared"))  # sooner
    made = loader.library_path(loader.find_compiler() or "")
    made.write_bytes(b"not a library")
    assert native.__wrapped__().functions
    assert made.read_bytes().startswith(b"\x7fELF")
