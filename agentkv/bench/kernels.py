"""`agentkv bench kernels`: kernels on a GPU against the bytes that they must move."""

# mypy: disable-error-code="no-untyped-call"
# (torch's streams and events)

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentkv.bench.conditions import machine
from agentkv.engine.core import GRANULE
from agentkv.errors import BadRequest

PAGE, DIM = 16, 128


class Shape(NamedTuple):
    """Decode attention of rows of these lengths. share: of the copy rate, what is to be reached."""

    name: str
    lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    share: float


SHAPES = (
    Shape("8x32K 32/8", (32_768,) * 8, 32, 8, 0.88),
    Shape("8x32K 32/4", (32_768,) * 8, 32, 4, 0.85),
    Shape("2x128K 32/4", (131_072,) * 2, 32, 4, 0.82),
    Shape("1x32K 32/8", (32_768,), 32, 8, 0.72),
    Shape("1x128K 32/4", (131_072,), 32, 4, 0.78),
    Shape("32x8K 32/4", (8192,) * 32, 32, 4, 0.82),
    Shape("1x128K + 31x2K 32/4", (131_072, *(2048,) * 31), 32, 4, 0.75),
)


def run_kernels(*, repeats: int = 20, tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Paged decode attention in bf16, pages of 16 in random order, its merge included, replayed from a graph.

    Returns the conditions, the measured copy rate (bytes read and written, TB/s) and a row a shape: every repeat in
    microseconds, the median, TB/s of the KV that is read, the share of the copy rate, the target, and whether it is met.
    BadRequest without an NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise BadRequest("bench kernels measures a GPU, and torch sees none here", hint="Run it on a machine with one")
    rate = copy_rate(repeats)
    rows = []
    for shape in SHAPES:
        times = _graph_times(_decode(shape), repeats)
        median = statistics.median(times)
        speed = sum(shape.lens) * shape.num_kv_heads * 2 * DIM * 2 / median / 1e6
        row = {"name": shape.name, "us": times, "median_us": median, "tb_per_s": speed, "share": speed / rate}
        row |= {"target": shape.share, "met": speed / rate >= shape.share}
        rows.append(row)
        if tell is not None:
            tell(f"{shape.name:20} {median:8.1f} us {speed:6.2f} TB/s {speed / rate:6.1%} of copy, wanted {shape.share:.0%}")
    return {**machine(torch.device("cuda")), "copy_tb_per_s": rate, "decode_attention": rows}


def copy_rate(repeats: int, num_bytes: int = 4 << 30) -> float:
    """TB/s of a device-to-device copy, bytes read and written."""
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = _times(lambda: target.copy_(source), repeats)
    return 2 * num_bytes / statistics.median(times) / 1e6


def _decode(shape: Shape) -> Callable[[], Any]:
    """One layer's decode attention over random pages; everything is in place, so that only the kernels are timed."""
    from agentkv.kernels.paged_decode import bound_pieces, paged_decode, plan_decode

    generator = torch.Generator("cuda").manual_seed(0)
    granules = shape.num_kv_heads * 2 * PAGE * DIM * 2 // GRANULE
    counts = [length // PAGE for length in shape.lens]
    arena = torch.empty(sum(counts) * granules * GRANULE // 2, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    step = GRANULE // 2
    layout = (shape.num_kv_heads, 2, PAGE, DIM)
    pages = arena.as_strided((len(arena) // step - granules + 1, *layout), (step, 2 * PAGE * DIM, PAGE * DIM, DIM, 1))
    order = (torch.randperm(sum(counts), device="cuda", generator=generator) * granules).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
    for row, entries in enumerate(order.split(counts)):
        table[row, : len(entries)] = entries
    q = torch.randn(len(counts), shape.num_heads, DIM, device="cuda", generator=generator).bfloat16()
    lens = torch.tensor(shape.lens, dtype=torch.int32, device="cuda")
    plan = plan_decode(lens, torch.arange(len(counts), device="cuda"), bound_pieces(len(counts), sum(shape.lens)))

    def run() -> tuple[Tensor, Tensor]:
        return paged_decode(q, pages, table, plan, DIM**-0.5)

    return run


def _graph_times(work: Callable[[], Any], repeats: int) -> list[float]:
    """Microseconds of each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiled and warm
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return _times(graph.replay, repeats)


def _times(work: Callable[[], Any], repeats: int) -> list[float]:
    """Microseconds of each run on the device, after three that do not count."""
    times = []
    for number in range(repeats + 3):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(began.elapsed_time(ended) * 1e3)
    return times
