"""Attention over quantised pages, plain torch: against loops in float64 that read the pages' bytes."""

from __future__ import annotations

import pytest
import torch
from devices import NoWaiting
from quantised_oracle import attention, read_slot
from quantised_pool import Pool, make_pool, shape_of

from agentkv.kernels.dequant_decode import dequant_decode
from agentkv.kernels.merge_parts import merge_parts
from agentkv.kernels.quantized_pages import (
    PageLayout,
    QuantizedPages,
    gather_dequantised,
    store_fp8,
    store_keys,
    store_values,
)

LAYOUTS = [
    PageLayout(2, 8, 16, bits=2, key_group=4, value_group=8),
    PageLayout(1, 16, 8, bits=4, key_group=16, value_group=4, dtype=torch.float32),
    PageLayout(2, 4, 12, bits=8, key_group=2, value_group=12),
    PageLayout(2, 16, 16),
    PageLayout(3, 4, 8, dtype=torch.float32),
    PageLayout(1, 1, 4),  # 12 bytes: not made of words
]


def oracle_kv(pool: Pool, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[num_kv_heads, length, head_dim]` float64, byte by byte."""
    layout = pool.payload.layout
    read = []
    for slot in range(int(pool.lens[row])):
        granule = int(pool.table[pool.rows[row], slot // layout.page_size])
        page = bytes(pool.payload.pages[granule].tolist())
        read.append([read_slot(page, head, slot % layout.page_size, shape_of(layout)) for head in range(layout.num_kv_heads)])
    if not read:
        return (torch.zeros(layout.num_kv_heads, 0, layout.head_dim, dtype=torch.float64),) * 2
    both = torch.tensor(read, dtype=torch.float64)
    return both[:, :, 0].transpose(0, 1), both[:, :, 1].transpose(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_loops_over_the_bytes(layout: PageLayout, causal: bool) -> None:
    """Page edges, GQA, an empty row, one to three tokens a row, first slots, and a bias that hides a run and a whole row."""
    lens = (layout.page_size * 2, 0, layout.page_size + 3, 3, 5)
    pool = make_pool(layout, lens)
    counts = (1, 1, 3, 2, 1)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(sum(counts), layout.num_kv_heads * 3, layout.head_dim, generator=generator, dtype=torch.float64)
    starts = torch.tensor([5, 0, 0, 2, 4, 0, 1, 0], dtype=torch.int32)
    bias = torch.randn(len(lens), max(lens), generator=generator)
    bias[0, 7:11] = bias[4] = -torch.inf
    out, lse = dequant_decode(
        q, pool.payload, pool.table, pool.rows, pool.lens, 0.3, counts=counts, starts=starts, bias=bias, causal=causal
    )
    assert out.dtype == lse.dtype == torch.float64
    first = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        span = slice(first, first + count)
        slots = torch.arange(length)
        ends = torch.tensor([length - count + 1 + token if causal else length for token in range(count)])
        seen = (slots >= starts[span].unsqueeze(1)) & (slots < ends.unsqueeze(1))
        want, want_lse = attention(q[span], *oracle_kv(pool, row), 0.3, seen, bias[row])
        assert torch.allclose(out[span], want, atol=1e-10, rtol=1e-10)
        assert torch.allclose(lse[span], want_lse, atol=1e-10, rtol=1e-10)
        first += count
    assert not out[1].any()
    assert lse[1].eq(-torch.inf).all()
    assert lse[7].eq(-torch.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_rows_are_the_bytes(layout: PageLayout) -> None:
    pool = make_pool(layout, (layout.page_size * 2 - 1, 3))
    for row in range(2):
        k, v = gather_dequantised(pool.payload, pool.table[pool.rows[row]], int(pool.lens[row]), torch.float64)
        want_k, want_v = oracle_kv(pool, row)
        assert torch.equal(k, want_k)
        assert torch.equal(v, want_v)
        half, _ = gather_dequantised(pool.payload, pool.table[pool.rows[row]], int(pool.lens[row]), torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert torch.allclose(half.double(), want_k, rtol=2**-8, atol=1e-6)


def test_float32_halves_and_long_rows() -> None:
    """Several tiles; a row alone, a wider table and a longer neighbour change no bit."""
    layout = PageLayout(2, 16, 16, bits=4, key_group=16, value_group=16)
    pool = make_pool(layout, (700, 33), spare=3)
    q = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))
    out, lse = dequant_decode(q, pool.payload, pool.table, pool.rows, pool.lens, 0.25)
    for row in range(2):
        k, v = gather_dequantised(pool.payload, pool.table[pool.rows[row]], int(pool.lens[row]), torch.float64)
        scores = torch.einsum("hgd,hld->hgl", q[row].double().view(2, 2, 16), k) * 0.25
        want = torch.einsum("hgl,hld->hgd", scores.softmax(-1), v).flatten(0, 1)
        assert torch.allclose(out[row].double(), want, atol=1e-5)
        assert torch.allclose(lse[row].double(), scores.logsumexp(-1).flatten(), atol=1e-5)
        used = -(-int(pool.lens[row]) // 16)
        alone = dequant_decode(
            q[row : row + 1], pool.payload, pool.table[:, :used], pool.rows[row : row + 1], pool.lens[row : row + 1], 0.25
        )
        assert torch.equal(alone[0][0], out[row])
        assert torch.equal(alone[1][0], lse[row])
    half, half_lse = dequant_decode(q.bfloat16(), pool.payload, pool.table, pool.rows, pool.lens, 0.25)
    assert half.dtype == torch.bfloat16
    assert half_lse.dtype == torch.float32
    assert torch.allclose(half.float(), out, atol=2e-2)


def test_it_is_one_part_of_a_merge() -> None:
    """Quantised history and a plain tail, merged, against attention over both at once."""
    layout = PageLayout(2, 16, 8, bits=8, key_group=16, value_group=8, dtype=torch.float32)
    pool = make_pool(layout, (32, 0))
    generator = torch.Generator().manual_seed(9)
    q, tail_k, tail_v = (torch.randn(2, heads, 8, generator=generator).double() for heads in (4, 2, 2))
    out, lse = dequant_decode(q, pool.payload, pool.table, pool.rows, pool.lens, 0.5, causal=False)
    for row in range(2):
        k, v = oracle_kv(pool, row)
        own_k, own_v = tail_k[row].unsqueeze(1), tail_v[row].unsqueeze(1)
        seen = torch.ones(1, 1, dtype=torch.bool)
        tail, tail_lse = attention(q[row : row + 1], own_k, own_v, 0.5, seen)
        merged, _ = merge_parts((out[row : row + 1], tail), (lse[row : row + 1], tail_lse))
        every = torch.ones(1, k.shape[1] + 1, dtype=torch.bool)
        want, _ = attention(q[row : row + 1], torch.cat((k, own_k), 1), torch.cat((v, own_v), 1), 0.5, every)
        assert torch.allclose(merged, want, atol=1e-10)


def test_wide_codes_are_near_dense() -> None:
    layout = PageLayout(2, 16, 16, bits=8, key_group=16, value_group=16, dtype=torch.float32)
    pool = make_pool(layout, (48,))
    q = torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, _ = dequant_decode(q, pool.payload, pool.table, pool.rows, pool.lens, 0.25)
    dense, _ = attention(q, pool.k[0].transpose(0, 1), pool.v[0].transpose(0, 1), 0.25, torch.ones(1, 48, dtype=torch.bool))
    assert (out - dense).abs().max() < 2e-2


def test_sizes_are_those_of_the_bytes() -> None:
    assert PageLayout(8, 32, 128, bits=4, key_group=32, value_group=32).page_bytes == 8 * 32 * 160
    assert PageLayout(8, 32, 128, bits=2, key_group=32, value_group=32).page_bytes == 8 * 32 * 96
    assert PageLayout(8, 16, 128, dtype=torch.float32).page_bytes == 8 * 16 * 264


def test_what_does_not_fit_is_refused() -> None:
    for given in (
        {"page_size": 8, "key_group": 3, "value_group": 4},
        {"page_size": 8, "key_group": 4, "value_group": 5},
        {"page_size": 8, "key_group": 4},
        {"page_size": 8, "bits": 4},
        {"page_size": 8, "bits": 5, "key_group": 4, "value_group": 4},
        {"page_size": 1, "head_dim": 2, "bits": 2, "key_group": 1, "value_group": 2, "dtype": torch.float32},
    ):
        with pytest.raises(ValueError, match=r"groups|bits|start"):
            PageLayout(**{"num_kv_heads": 1, "head_dim": 8, **given})
    grouped, fp8 = PageLayout(1, 4, 8, bits=4, key_group=4, value_group=4), PageLayout(1, 4, 8)
    with pytest.raises(ValueError, match="pages are uint8"):
        QuantizedPages(torch.zeros(3, grouped.page_bytes - 1, dtype=torch.uint8), grouped)
    none = torch.zeros(0, dtype=torch.int64)
    pages = [QuantizedPages(torch.zeros(1, layout.page_bytes, dtype=torch.uint8), layout) for layout in (grouped, fp8)]
    with pytest.raises(ValueError, match="store_keys"):
        store_fp8(pages[0], none, none, torch.zeros(0, 1, 8), torch.zeros(0, 1, 8))
    with pytest.raises(ValueError, match="store_fp8"):
        store_keys(pages[1], none, none, torch.zeros(0, 1, 4, 8))
    with pytest.raises(ValueError, match="store_fp8"):
        store_values(pages[1], none, none, torch.zeros(0, 1, 8))
    pool = make_pool(grouped, (4,))
    with pytest.raises(ValueError, match="counts"):
        dequant_decode(torch.zeros(3, 1, 8), pool.payload, pool.table, pool.rows, pool.lens, 1.0, counts=(2,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_read_on_the_host(layout: PageLayout) -> None:
    pool = make_pool(layout, (9, 4))
    q = torch.randn(3, layout.num_kv_heads, layout.head_dim)
    bias, starts = torch.zeros(2, 9), torch.zeros(3, dtype=torch.int32)
    places = pool.table[pool.rows, 0].long(), torch.zeros(2, dtype=torch.int64)
    token = torch.randn(2, layout.num_kv_heads, layout.head_dim)
    with NoWaiting():
        dequant_decode(q, pool.payload, pool.table, pool.rows, pool.lens, 1.0, counts=(2, 1), starts=starts, bias=bias)
        gather_dequantised(pool.payload, pool.table[2], 9)
        if layout.fp8:
            store_fp8(pool.payload, *places, token, token)
        else:
            store_keys(pool.payload, *places, token.unsqueeze(2).expand(-1, -1, layout.key_group, -1))
            store_values(pool.payload, *places, token)
