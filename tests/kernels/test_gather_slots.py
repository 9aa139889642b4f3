"""Copies of slots that differ by head, slot by slot in Python."""

from __future__ import annotations

import pytest
import torch
from devices import NoWaiting

from agentkv.kernels.gather_slots import gather_heads, move_head_slots

HEADS, DIM = 3, 5


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def places(pages: torch.Tensor, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n different slots for each head, by layer pages in common or by head pages."""
    generator = torch.Generator().manual_seed(seed)
    granules, page_heads, _, page_size, _ = pages.shape
    if page_heads == HEADS:
        flat = torch.stack([torch.randperm(granules * page_size, generator=generator)[:n] for _ in range(HEADS)])
    else:
        flat = torch.randperm(granules * page_size, generator=generator)[: n * HEADS].view(HEADS, n)
    return flat // page_size, flat % page_size


@pytest.mark.parametrize("valid", ["all", "some", "none", None])
@pytest.mark.parametrize(("source_heads", "target_heads"), [(HEADS, HEADS), (HEADS, 1), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_move_equals_loops(valid: str | None, source_heads: int, target_heads: int, dtype: torch.dtype) -> None:
    n = 7
    source, target = made(9, source_heads, 2, 4, DIM, dtype=dtype), made(12, target_heads, 2, 2, DIM, dtype=dtype)
    read, write = places(source, n, 1), places(target, n, 2)
    mask = {"all": torch.ones(HEADS, n), "some": torch.arange(HEADS * n).view(HEADS, n) % 3 == 1, "none": torch.zeros(HEADS, n)}
    chosen = None if valid is None else mask[valid].bool()
    want = target.clone()
    for head in range(HEADS):
        for i in range(n):
            if chosen is None or chosen[head, i]:
                taken = source[read[0][head, i], head % source_heads, :, read[1][head, i]]
                want[write[0][head, i], head % target_heads, :, write[1][head, i]] = taken
    if chosen is not None:  # what is not valid may name anything
        read[0][~chosen], write[0][~chosen], write[1][~chosen] = -77, 1 << 40, 99
    with NoWaiting():
        move_head_slots(source, read, target, write, chosen)
    assert torch.equal(target, want)


@pytest.mark.parametrize("layout", ["shared", "by head", "head pages"])
@pytest.mark.parametrize("length", [1, 4, 5, 11])
@pytest.mark.parametrize("ragged", [False, True])
def test_gather_equals_loops(layout: str, length: int, ragged: bool) -> None:
    pages = made(20, 1 if layout == "head pages" else HEADS, 2, 4, DIM)
    entries = torch.randperm(18).view(HEADS, 6)[:, :3].to(torch.int32)
    entries = entries[0] if layout == "shared" else entries
    lens = torch.tensor([length, max(0, length - 4), 0], dtype=torch.int32) if ragged else None
    if ragged and layout != "shared":
        entries[2] = -5
    with NoWaiting():
        k, v = gather_heads(pages, entries, length, lens)
    assert k.shape == v.shape == (HEADS, length, DIM)
    assert k.is_contiguous()
    for head in range(HEADS):
        own = entries if layout == "shared" else entries[head]
        for slot in range(length):
            if lens is not None and slot >= lens[head]:
                assert not k[head, slot].any()
                assert not v[head, slot].any()
                continue
            page = pages[own[slot // 4], head % pages.shape[1]]
            assert torch.equal(k[head, slot], page[0, slot % 4])
            assert torch.equal(v[head, slot], page[1, slot % 4])


def test_nothing_to_move() -> None:
    pages = made(4, HEADS, 2, 4, DIM)
    before, none = pages.clone(), torch.empty(HEADS, 0, dtype=torch.int64)
    move_head_slots(pages, (none, none), pages, (none, none), none.bool())
    assert torch.equal(pages, before)
