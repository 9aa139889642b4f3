"""GPU kernels of quantised and low-rank keys and values: in the interpreter against their torch twins, on a GPU float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from quantised_oracle import e4m3
from quantised_pool import make_pool

from agentkv.kernels import quantize_blocks, quantize_fp8, reference
from agentkv.kernels.dequant_decode import dequant_decode
from agentkv.kernels.low_rank_decode import LowRankPages, low_rank_decode
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages, gather_dequantised, store_fp8, store_pages

pytest.importorskip("triton")


class Case(NamedTuple):
    layout: PageLayout
    lens: tuple[int, ...]
    num_heads: int
    queries: int = 1
    causal: bool = True
    biased: bool = False
    firsts: tuple[int, ...] | None = None


CASES = [
    Case(PageLayout(2, 32, 16, bits=4, key_group=32, value_group=16), (150, 0, 33), 6),
    Case(PageLayout(1, 32, 32, bits=2, key_group=16, value_group=8), (40, 7), 4, 3, biased=True),
    Case(PageLayout(2, 16, 16, bits=8, key_group=16, value_group=16, dtype=torch.float32), (130, 9), 4, 8, causal=False),
    Case(PageLayout(2, 16, 12), (70, 5), 2, 2, biased=True),
    Case(PageLayout(1, 64, 16, dtype=torch.float32), (200, 0, 64), 3, firsts=(37, 0, 3)),
    Case(PageLayout(1, 32, 16, bits=4, key_group=32, value_group=16), (70,), 2, firsts=(41,)),
]
LARGE = [
    Case(PageLayout(8, 32, 128, bits=4, key_group=32, value_group=32), (20000, 1, 0, 333), 32),
    Case(PageLayout(4, 64, 128, bits=2, key_group=64, value_group=128), (9000, 130), 32, 4, biased=True),
    Case(PageLayout(8, 16, 128), (20000, 77), 32, 2),
    Case(PageLayout(2, 16, 256, dtype=torch.float32), (700, 5), 16, firsts=(300, 0)),
]


def check_decode(device: str, dtype: torch.dtype, tolerance: float, case: Case, twin: bool) -> None:
    """twin: against `dequant_decode`; else against float64 over the gathered keys and values."""
    from agentkv.kernels.dequant_decode_triton import CUT, paged_dequant_decode
    from agentkv.kernels.paged_decode import bound_pieces, plan_decode

    pool, generator = make_pool(case.layout, case.lens), torch.Generator().manual_seed(4)
    layout, num_rows = case.layout, len(case.lens)
    q = torch.randn(num_rows * case.queries, case.num_heads, layout.head_dim, generator=generator).to(dtype)
    bias = torch.randn(num_rows, max(case.lens), generator=generator) if case.biased else None
    if bias is not None:
        bias[0, 3:37] = bias[1] = -torch.inf
    firsts = torch.tensor(case.firsts, dtype=torch.int32) if case.firsts else None
    rows, lens = pool.rows.to(device), pool.lens.to(device)
    bound = bound_pieces(num_rows, sum(case.lens), CUT)
    plan = plan_decode(lens, rows, bound, None if firsts is None else firsts.to(device), CUT)
    view = pool.payload.pages
    arena = view.as_strided((view.untyped_storage().nbytes(),), (1,)).to(device)
    payload = QuantizedPages(arena.as_strided(view.shape, view.stride()), layout)
    out, lse = paged_dequant_decode(
        q.to(device), payload, pool.table.to(device), plan, layout.head_dim**-0.5, queries=case.queries,
        bias=None if bias is None else bias.to(device), causal=case.causal,
    )  # fmt: skip
    counts = (case.queries,) * num_rows
    starts = None if firsts is None else firsts.repeat_interleave(case.queries)
    if twin:
        want, want_lse = dequant_decode(
            q, pool.payload, pool.table, pool.rows, pool.lens, layout.head_dim**-0.5,
            counts=counts, starts=starts, bias=bias, causal=case.causal,
        )  # fmt: skip
    else:
        want, want_lse = in_float64(case, pool, q, bias)
    assert (out.cpu().double() - want.double()).abs().max() < tolerance
    hidden = want_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, hidden)
    assert (lse.cpu().double() - want_lse.double()).masked_fill(hidden, 0).abs().max() < tolerance


def in_float64(case: Case, pool, q: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """One softmax a row over gathered keys and values; where no bias is given, the loops of `reference`."""
    outs, lses = [], []
    group = case.num_heads // case.layout.num_kv_heads
    for row, length in enumerate(case.lens):
        mine = q[row * case.queries : (row + 1) * case.queries].double()
        first = case.firsts[row] if case.firsts else 0
        k, v = gather_dequantised(pool.payload, pool.table[pool.rows[row]], length, torch.float64)
        k, v = k[:, first:].repeat_interleave(group, 0), v[:, first:].repeat_interleave(group, 0)
        scores = torch.einsum("thd,hld->thl", mine, k) * case.layout.head_dim**-0.5
        if bias is not None:
            scores += bias[row, first:length]
        if case.causal:
            own = torch.arange(length - case.queries, length).view(-1, 1, 1)
            scores = scores.masked_fill(torch.arange(first, length) > own, -torch.inf)
        lses.append(scores.logsumexp(-1) if length else torch.full(scores.shape[:2], -torch.inf, dtype=torch.float64))
        outs.append(torch.einsum("thl,hld->thd", scores.softmax(-1).nan_to_num(0), v))
        if bias is None and 0 < length < 1000 and first == 0 and case.causal:
            loops, _ = reference.attention(mine, k.transpose(0, 1), v.transpose(0, 1), case.layout.head_dim**-0.5)
            assert torch.allclose(loops, outs[-1], atol=1e-9)
    return torch.cat(outs), torch.cat(lses)


def check_quantise(device: str) -> None:
    """Codes, scales and zeros bit for bit, in groups of every kind, degenerate ones too."""
    from agentkv.kernels import quantize_blocks_triton

    generator = torch.Generator().manual_seed(6)
    brain = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter cuts bfloat16 off, it does not round
    for bits, group, dtype, against in (
        (2, 16, torch.float16, "stored"), (4, 32, torch.float16, "exact"), (4, 8, brain, "stored"),
        (8, 64, torch.float32, "stored"),
    ):  # fmt: skip
        x = torch.randn(2, 3, 64, 64, generator=generator) * 4
        x[0, 0], x[1, 1, :, 5] = 1.25, -2.0
        for given in (x, x.bfloat16()):
            for name in ("quantize_channels", "quantize_tokens"):
                want = getattr(quantize_blocks, name)(given, bits, group, dtype, against)
                got = getattr(quantize_blocks_triton, name)(given.to(device), bits, group, dtype, against)
                assert all(torch.equal(ours.cpu(), twin) for ours, twin in zip(got, want, strict=True)), name
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(5, 3, 12, generator=generator) * torch.logspace(-7, 3, 15).view(5, 3, 1)
        x[2, 2] = 0
        want = quantize_fp8.quantize_fp8(x, dtype)
        got = quantize_blocks_triton.quantize_fp8(x.to(device), dtype)
        assert torch.equal(got.scale.cpu(), want.scale)
        assert torch.equal(got.codes.cpu(), want.codes)
    every = torch.tensor([e4m3(code) for code in range(256) if code & 0x7F != 0x7F])
    middle = every.sort().values
    x = torch.cat((every, (middle[1:] + middle[:-1]) / 2, torch.tensor([448.0, 447.9, -448.0]))).view(1, -1)
    got = quantize_blocks_triton.quantize_fp8(x.to(device))
    assert got.scale.item() == 1
    assert torch.equal(got.codes.cpu(), quantize_fp8.quantize_fp8(x).codes)


def check_beside(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Merged in the same pass: as `merge_parts` of the two, where either holds nothing too."""
    from agentkv.kernels.dequant_decode_triton import paged_dequant_decode
    from agentkv.kernels.merge_parts import merge_parts
    from agentkv.kernels.paged_decode import bound_pieces, plan_decode

    layout, lens = PageLayout(2, 16, 16, bits=4, key_group=16, value_group=16), (150, 0, 33, 0)
    pool, generator = make_pool(layout, lens), torch.Generator().manual_seed(12)
    q, out = (torch.randn(4, 4, 16, generator=generator).to(dtype) for _ in range(2))
    lse = torch.randn(4, 4, generator=generator) + 3
    lse[2:] = -torch.inf
    own = dequant_decode(q.double(), pool.payload, pool.table, pool.rows, pool.lens, 0.25, causal=False)
    want, want_lse = merge_parts([own[0], out.double()], [own[1], lse.double()])
    plan = plan_decode(pool.lens.to(device), pool.rows.to(device), bound_pieces(4, sum(lens)))
    view = pool.payload.pages
    arena = view.as_strided((view.untyped_storage().nbytes(),), (1,)).to(device)
    payload = QuantizedPages(arena.as_strided(view.shape, view.stride()), layout)
    got, got_lse = paged_dequant_decode(
        q.to(device), payload, pool.table.to(device), plan, 0.25, causal=False, beside=(out.to(device), lse.to(device))
    )
    assert (got.cpu().double() - want).abs().max() < tolerance
    assert torch.equal(got_lse.cpu() == -torch.inf, want_lse == -torch.inf)
    assert (got_lse.cpu().double() - want_lse).masked_fill(want_lse == -torch.inf, 0).abs().max() < tolerance


PAGES = [
    PageLayout(2, 32, 64, bits=4, key_group=32, value_group=32),
    PageLayout(1, 16, 16, bits=2, key_group=8, value_group=4, dtype=torch.float32),
    PageLayout(3, 16, 32, bits=8, key_group=16, value_group=32),
]


def check_store_pages(device: str, layout: PageLayout) -> None:
    """The pages' bytes are those of the twin, of keys and values as a seal gathers them."""
    from agentkv.kernels.store_pages_triton import put_pages

    generator = torch.Generator().manual_seed(13)
    step = -(-layout.page_bytes // 256)
    arena = torch.randint(0, 256, (5 * step * 256,), dtype=torch.uint8, generator=generator)
    shape = (2, layout.num_kv_heads, 3 * layout.page_size, layout.head_dim)
    k, v = (torch.unflatten(x, 1, (-1, layout.page_size)).transpose(0, 1) for x in torch.randn(shape, generator=generator) * 3)
    entries = torch.tensor([3, 0, 2]) * step

    def payload(arena: torch.Tensor) -> QuantizedPages:
        count = (arena.numel() - layout.page_bytes) // 256 + 1
        return QuantizedPages(arena.as_strided((count, layout.page_bytes), (256, 1)), layout)

    for against in ("stored", "exact"):
        wanted, got = arena.clone(), arena.to(device)
        store_pages(payload(wanted), entries, k, v, against)
        put_pages(payload(got), entries.to(device), k.to(device), v.to(device), against)
        assert torch.equal(got.cpu(), wanted)


EIGHTS = [PageLayout(2, 16, 12), PageLayout(3, 4, 8, dtype=torch.float32), PageLayout(8, 16, 128, dtype=torch.float32)]


def check_store(device: str, layout: PageLayout) -> None:
    """The pages' bytes are those of the twin, of keys and values that lie among others."""
    from agentkv.kernels.store_fp8_triton import put_fp8

    generator = torch.Generator().manual_seed(11)
    count, step = 7, -(-layout.page_bytes // 256)
    arena = torch.randint(0, 256, (6 * step * 256,), dtype=torch.uint8, generator=generator)
    both = torch.randn(count, 3 * layout.num_kv_heads, layout.head_dim, generator=generator) * 5
    both[3] = 0
    k, v = both[:, : layout.num_kv_heads], both[:, layout.num_kv_heads : 2 * layout.num_kv_heads]
    entries = torch.tensor([2, 0, 0, 4, 4, 3, 1]) * step
    offsets = torch.tensor([0, 3, 1, 2, 3, 0, 1])

    def payload(arena: torch.Tensor) -> QuantizedPages:
        shape = ((arena.numel() - layout.page_bytes) // 256 + 1, layout.page_bytes)
        return QuantizedPages(arena.as_strided(shape, (256, 1)), layout)

    wanted, got = arena.clone(), arena.to(device)
    store_fp8(payload(wanted), entries, offsets, k, v)
    moved = both.to(device)
    own = moved[:, : layout.num_kv_heads], moved[:, layout.num_kv_heads : 2 * layout.num_kv_heads]
    put_fp8(payload(got), entries.to(device), offsets.to(device), *own)
    assert torch.equal(got.cpu(), wanted)


class LowRank(NamedTuple):
    """sizes: KV heads, groups, head_dim, rotated channels, ranks of K and V, page size."""

    sizes: tuple[int, int, int, int, int, int, int]
    lens: tuple[int, ...]
    group: int
    queries: int = 1
    causal: bool = True
    extras: bool = False


LOW_RANK = [
    LowRank((4, 2, 16, 16, 24, 40, 8), (50, 0, 9), 2, extras=True),
    LowRank((2, 1, 24, 8, 80, 16, 16), (130, 5), 3, 3),
    LowRank((2, 2, 16, 16, 16, 16, 16), (33, 4), 1, 2, causal=False, extras=True),
]
LOW_RANK_LARGE = [LowRank((8, 2, 128, 128, 256, 256, 16), (5000, 1, 333), 4, extras=True)]


def check_low_rank(device: str, dtype: torch.dtype, tolerance: float, case: LowRank) -> None:
    """Against the twin in float64, on the same latents."""
    from agentkv.kernels.low_rank_decode_triton import paged_low_rank_decode
    from agentkv.kernels.paged_decode import bound_pieces, plan_decode

    heads, groups, dim, rotated, rank_k, rank_v, size = case.sizes
    generator = torch.Generator().manual_seed(8)
    num_rows, num_pages = len(case.lens), -(-max(case.lens) // size)
    count = num_rows * num_pages

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def payload(dtype: torch.dtype, device: str) -> LowRankPages:
        return LowRankPages(
            *(part.to(device, dtype) for part in (*latents, *factors)), frequency.to(device),
            *((part.to(device, dtype) for part in more) if case.extras else ()),
        )  # fmt: skip

    latents = noise(count, size, groups, rank_k), noise(count, size, groups, rank_v)
    factors = noise(heads, rank_k, dim) * rank_k**-0.5, noise(heads, rank_v, dim) * rank_v**-0.5
    more = noise(heads, dim), noise(heads, dim), noise(heads, dim)
    frequency = 100.0 ** -(torch.arange(rotated // 2) / (rotated // 2))
    table = torch.randperm(count, generator=generator).to(torch.int32).view(num_rows, num_pages)
    rows, lens = torch.arange(num_rows).flip(0), torch.tensor(case.lens, dtype=torch.int32)
    q = noise(num_rows * case.queries, heads * case.group, dim)
    positions = torch.arange(num_pages * size).repeat(num_rows, 1) * 2
    bias = torch.randn(num_rows, max(case.lens), generator=generator)
    bias[0, 1:40], bias[1] = -torch.inf, 0.5
    given = {"positions": positions, "bias": bias} if case.extras else {}
    plan = plan_decode(lens.to(device), rows.to(device), bound_pieces(num_rows, sum(case.lens)))
    out, lse = paged_low_rank_decode(
        q.to(device), payload(dtype, device), table.to(device), plan, dim**-0.5,
        queries=case.queries, causal=case.causal, **{name: part.to(device) for name, part in given.items()},
    )  # fmt: skip
    want, want_lse = low_rank_decode(
        q.double(), payload(torch.float64, "cpu"), table, rows, lens, dim**-0.5,
        counts=(case.queries,) * num_rows, causal=case.causal, **given,
    )  # fmt: skip
    hidden = want_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, hidden)
    assert (lse.cpu().double() - want_lse).masked_fill(hidden, 0).abs().max() < tolerance
    assert (out.cpu().double() - want).abs().max() < tolerance


@only_interpreted
@pytest.mark.parametrize("case", LOW_RANK)
def test_low_rank_decode_equals_the_twin_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: LowRank) -> None:
    numpy_scalars(monkeypatch)
    check_low_rank("cpu", torch.float32, 5e-5, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LOW_RANK, *LOW_RANK_LARGE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_low_rank_decode_is_near_float64_on_a_gpu(case: LowRank, dtype: torch.dtype, tolerance: float) -> None:
    check_low_rank("cuda", dtype, tolerance, case)


@only_interpreted
@pytest.mark.parametrize("case", CASES)
def test_decode_equals_the_twin_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    numpy_scalars(monkeypatch)
    check_decode("cpu", torch.float32, 2e-5, case, twin=True)


@only_interpreted
@pytest.mark.parametrize("case", CASES[:4])
def test_decode_is_near_float64_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    numpy_scalars(monkeypatch)
    check_decode("cpu", torch.float32, 2e-5, case, twin=False)


@only_interpreted
def test_quantise_equals_the_twin_bit_for_bit_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_scalars(monkeypatch)
    check_quantise("cpu")


@only_interpreted
def test_what_lies_beside_is_merged_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_scalars(monkeypatch)
    check_beside("cpu", torch.float32, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 3e-2)])
def test_what_lies_beside_is_merged_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_beside("cuda", dtype, tolerance)


@only_interpreted
@pytest.mark.parametrize("layout", EIGHTS)
def test_store_equals_the_twin_byte_for_byte_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, layout: PageLayout) -> None:
    numpy_scalars(monkeypatch)
    check_store("cpu", layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", EIGHTS)
def test_store_equals_the_twin_byte_for_byte_on_a_gpu(layout: PageLayout) -> None:
    check_store("cuda", layout)


@only_interpreted
@pytest.mark.parametrize("layout", PAGES)
def test_store_of_pages_equals_the_twin_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, layout: PageLayout) -> None:
    numpy_scalars(monkeypatch)
    check_store_pages("cpu", layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", PAGES)
def test_store_of_pages_equals_the_twin_on_a_gpu(layout: PageLayout) -> None:
    check_store_pages("cuda", layout)


@only_interpreted
def test_what_kernels_do_not_serve_is_refused_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_scalars(monkeypatch)
    from agentkv.kernels import quantize_blocks_triton
    from agentkv.kernels.dequant_decode_triton import paged_dequant_decode, serves
    from agentkv.kernels.paged_decode import bound_pieces, plan_decode

    with pytest.raises(ValueError, match="powers of two"):
        quantize_blocks_triton.quantize_channels(torch.zeros(1, 1, 6, 12), 4, 3)
    pool = make_pool(PageLayout(1, 8, 8, bits=4, key_group=8, value_group=8), (8,))
    assert not serves(pool.payload.layout)
    plan = plan_decode(pool.lens, pool.rows, bound_pieces(1, 8))
    with pytest.raises(ValueError, match="powers of two"):
        paged_dequant_decode(torch.zeros(1, 1, 8), pool.payload, pool.table, plan, 1.0)


@only_without_gpu
def test_the_cases_pass() -> None:
    pass_interpreted(__file__, len(CASES) + len(CASES[:4]) + len(LOW_RANK) + len(EIGHTS) + len(PAGES) + 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 3e-2)])
def test_decode_is_near_float64_on_a_gpu(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    check_decode("cuda", dtype, tolerance, case, twin=False)


@pytest.mark.gpu
def test_quantise_equals_the_twin_bit_for_bit_on_a_gpu() -> None:
    check_quantise("cuda")
