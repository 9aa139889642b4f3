"""A chunk's attention over pages on a GPU, by every route, against the plain twin."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from devices import numpy_scalars, only_interpreted, only_without_gpu, pass_interpreted
from torch import Tensor

from agentkv.kernels import reference

pytest.importorskip("triton")


class Case(NamedTuple):
    num_tokens: int
    length: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


CASES = [
    Case(1, 1, 4, 2, 1, 16),
    Case(20, 20, 4, 4, 2, 12),
    Case(33, 90, 16, 6, 2, 16),
    Case(40, 64, 16, 2, 2, 32),
    Case(7, 200, 128, 4, 1, 16),
]


def inputs(case: Case, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """q, pages in random order, the row's entries."""
    generator = torch.Generator().manual_seed(case.length)
    num_pages = -(-case.length // case.page_size)
    shape = (num_pages + 3, case.num_kv_heads, 2, case.page_size, case.head_dim)
    pages = torch.randn(shape, generator=generator).to(dtype)
    entries = torch.randperm(num_pages + 3, generator=generator)[:num_pages].to(torch.int32)
    for slot in range(case.length, num_pages * case.page_size):
        pages[entries[slot // case.page_size], :, :, slot % case.page_size] = torch.nan  # nothing was written there
    q = torch.randn(case.num_tokens, case.num_heads, case.head_dim, generator=generator) * spread
    return q.to(dtype), pages, entries


def expected(case: Case, q: Tensor, pages: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    k, v = reference.read_row(pages, entries.tolist(), case.length)
    return reference.attention(q, k, v, case.head_dim**-0.5)


@only_interpreted
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_over_pages_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    numpy_scalars(monkeypatch)
    from agentkv.kernels.paged_prefill import Tiles, paged_prefill

    q, pages, entries = inputs(case, spread=4.0)
    tiles = Tiles(queries=16, keys=32, warps=4, stages=2)
    out, lse = paged_prefill(q, pages, entries, case.length, case.head_dim**-0.5, route="pages", tiles=tiles)
    want, want_lse = expected(case, q, pages, entries)
    assert (out.double() - want).abs().max() < 1e-5
    assert (lse.double() - want_lse).abs().max() < 1e-5


def library(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """What the libraries' attention computes, in float64: causal from the lower right."""
    group = q.shape[1] // k.shape[0]
    keys, values = (each.double().repeat_interleave(group, 0) for each in (k, v))
    scores = torch.einsum("thd,hsd->ths", q.double(), keys) * scale
    if causal:
        slots, own = torch.arange(k.shape[1]), torch.arange(len(q)) + k.shape[1] - len(q)
        scores = scores.masked_fill((slots > own.unsqueeze(1)).unsqueeze(1), -torch.inf)
    out = torch.einsum("ths,hsd->thd", scores.softmax(-1), values)
    return out.to(q.dtype), scores.logsumexp(-1).to(torch.float32)


@only_interpreted
@pytest.mark.parametrize("route", ["flash", "cudnn"])
@pytest.mark.parametrize("case", CASES)
def test_what_libraries_do_and_the_rest_behind_it_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, case: Case, route: Any
) -> None:
    numpy_scalars(monkeypatch)
    from agentkv.kernels import paged_prefill as module

    wholes = []

    def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        wholes.append(k.shape[1])
        return library(q, k, v, scale)

    monkeypatch.setattr(module, "_flash", partial(library, causal=True))
    monkeypatch.setattr(module, "_cudnn", cudnn)
    monkeypatch.setattr(module, "HISTORY_STEP", 24)
    q, pages, entries = inputs(case)
    tiles = module.Tiles(queries=16, keys=32, warps=4, registers=None)
    out, lse = module.paged_prefill(q, pages, entries, case.length, case.head_dim**-0.5, route=route, tiles=tiles)
    want, want_lse = expected(case, q, pages, entries)
    assert (out.double() - want).abs().max() < 1e-5
    assert (lse.double() - want_lse).abs().max() < 1e-5
    whole = (case.length - case.num_tokens) // 24 * 24
    assert wholes == ([whole] if route == "cudnn" and whole else [])


@only_interpreted
def test_merging_where_a_side_has_no_key_in_the_interpreter() -> None:
    from agentkv.kernels.merge_parts_triton import merge_two

    outs = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    lses = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).transpose(1, 2)  # as libraries lay them out
    lses[0, 0], lses[1, 1], lses[:, 2] = -torch.inf, -torch.inf, -torch.inf
    out, lse = merge_two((outs[0], outs[1]), (lses[0], lses[1]))
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0)
    assert (out.double() - (outs.double() * weights.unsqueeze(-1)).sum(0)).abs().max() < 1e-6
    assert torch.allclose(lse, torch.logsumexp(lses, 0), atol=1e-6)


@only_without_gpu
def test_cases_pass_interpreted() -> None:
    pass_interpreted(__file__, 3 * len(CASES) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["pages", "flash", "cudnn", None])
@pytest.mark.parametrize(
    "case",
    [
        Case(300, 2900, 16, 8, 2, 128),
        Case(512, 4700, 16, 4, 4, 64),
        Case(700, 2800, 16, 8, 2, 128),
        Case(600, 2700, 16, 4, 1, 256),
        Case(64, 64, 16, 8, 2, 128),
        Case(1, 99, 16, 8, 2, 64),
    ],
)
def test_every_route_on_a_gpu(case: Case, route: Any) -> None:
    from agentkv.kernels.paged_prefill import paged_prefill

    q, pages, entries = inputs(case, torch.bfloat16)
    given = q.cuda(), pages.cuda(), entries.cuda()
    out, lse = paged_prefill(*given, case.length, case.head_dim**-0.5, route=route)
    k, v = reference.read_row(pages, entries.tolist(), case.length)
    want, want_lse = library(q.double(), k.transpose(0, 1), v.transpose(0, 1), case.head_dim**-0.5, causal=True)
    assert (out.cpu().double() - want).norm() < 0.01 * want.norm()
    assert (lse.cpu() - want_lse).abs().max() < 0.01
