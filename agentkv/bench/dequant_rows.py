"""Decode attention over quantised pages, against the same rows in bfloat16 in the same run."""

# mypy: disable-error-code="no-untyped-call"
# (kernels and torch's operations)

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from agentkv.bench.device_times import Work, graph_of, times
from agentkv.bench.gpu_rows import Measured, Rig, Row, decode_work, layers_of, small
from agentkv.bench.paged_shapes import PAGE, SHAPES, Shape, draw
from agentkv.engine.core import GRANULE
from agentkv.kernels.quantized_pages import PageLayout, QuantizedPages

GROUP = 32
"""Tokens of a group of keys, which is a page, and channels of a group of values."""


def dequant_rows() -> Iterator[Row]:
    """4 bits in groups of 32, and e4m3. The targets are ours: what the decode steps of 1.6 and 1.4 times need of attention."""
    whole = SHAPES[0]
    unit = "x the bfloat16 kernel's speed"
    yield Row(f"4-bit decode attention, {whole.name}", unit, 2.2, _against_bfloat16(whole, bits=4))
    yield Row(f"FP8 decode attention, {whole.name}", unit, 1.6, _against_bfloat16(whole, bits=8))


def layout_of(shape: Shape, bits: int) -> PageLayout:
    """4 bits: a scale a channel and page of keys, and one for 32 channels of a value (16 of small heads); 8: e4m3, with scales
    of float32 in pages of the model's size."""
    if bits == 8:
        return PageLayout(shape.num_kv_heads, PAGE, shape.head_dim, dtype=torch.float32)
    return PageLayout(shape.num_kv_heads, GROUP, shape.head_dim, bits, GROUP, min(GROUP, shape.head_dim))


def drawn_pages(shape: Shape, layout: PageLayout, device: torch.device) -> tuple[QuantizedPages, Tensor]:
    """One layer's pages with drawn codes and scales, and its table int32 `[num_rows, max_pages]`, pages in random order."""
    generator = torch.Generator(device).manual_seed(0)
    counts = [-(-length // layout.page_size) for length in shape.lens]
    step, total = -(-layout.page_bytes // GRANULE), sum(counts)
    arena = torch.randint(0, 256, (total, step * GRANULE), dtype=torch.uint8, device=device, generator=generator)
    drawn = QuantizedPages(arena, layout)
    if layout.fp8:
        codes, scales = drawn.slots()
        codes.bitwise_and_(0xBF)  # any sign, no NaN among them
        held = [scales]
    else:
        held = [drawn.groups().k_pairs, drawn.groups().v_pairs]
    for numbers in held:
        numbers.copy_(torch.rand(numbers.shape, device=device, generator=generator) * 0.1 + 0.01)
    count = total * step - step + 1
    pages = QuantizedPages(arena.view(-1).as_strided((count, layout.page_bytes), (GRANULE, 1)), layout)
    order = (torch.randperm(total, device=device, generator=generator) * step).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, entries in enumerate(torch.split(order, counts)):
        table[row, : len(entries)] = entries
    return pages, table


def _against_bfloat16(shape: Shape, bits: int) -> Callable[[Rig], Measured]:
    def measure(rig: Rig) -> Measured:
        given = small(shape) if rig.tiny else shape
        layers, layout = layers_of(given, rig.tiny), layout_of(given, bits)
        wide = draw(given, layers, rig.device)
        q, lens = wide.q, wide.lens
        plain = [each / layers for each in times(graph_of(decode_work(wide), rig.device), rig.device, rig.repeats)]
        del wide
        drawn = [drawn_pages(given, layout, rig.device) for _ in range(layers)]
        replay = graph_of(_work(given, q, lens, drawn), rig.device)
        us = [each / layers for each in times(replay, rig.device, rig.repeats)]
        held = sum(-(-length // layout.page_size) for length in given.lens) * layout.page_bytes
        speed = held / median(us) / 1e6
        more = {"bfloat16_us": plain, "bytes": held, "tb_per_s": speed, "of_copy": speed / rig.copy}
        return Measured(us, median(plain) / median(us), rig.copy, "TB/s", more=more)

    return measure


def _work(shape: Shape, q: Tensor, lens: Tensor, drawn: list[tuple[QuantizedPages, Tensor]]) -> Work:
    from agentkv.kernels.dequant_decode_triton import CUT, paged_dequant_decode
    from agentkv.kernels.paged_decode import bound_pieces, plan_decode

    rows, bound = torch.arange(len(lens), device=q.device), bound_pieces(len(lens), sum(shape.lens), CUT)

    def run() -> list[Tensor]:
        plan = plan_decode(lens, rows, bound, cut=CUT)
        return [paged_dequant_decode(q, pages, table, plan, shape.head_dim**-0.5)[0] for pages, table in drawn]

    return run
