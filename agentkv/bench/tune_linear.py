"""Tiles of linear maps of a few tokens on this GPU: which are fastest for each shape, and are they faster than the library?

First how the kernel is compiled, with one token; then, of the best, how rows are shared and how far ahead weights are fetched;
then the best of all with 8 tokens. A token's result may not depend on how many there are, so one tile serves both.
`python -m agentkv.bench.tune_linear --out FOLDER`.
"""

# mypy: disable-error-code="no-untyped-call"
# (kernels and torch's operations)

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from agentkv.bench.conditions import machine
from agentkv.bench.device_times import graph_of, times
from agentkv.bench.gpu_rows import Rig
from agentkv.bench.tuning_command import failures, run_tuner
from agentkv.kernels.gate import gate

if TYPE_CHECKING:
    from agentkv.kernels.linear_triton import Tile

FEW, MANY = 1, 8
FILE = "tune-linear.json"
ROTATED = 400 << 20
"""Bytes of weights that go by before one is read again: many times the cache."""
CHECKED = 8192
"""Results, the last ones, that are compared with float64."""
WRONG = 0.01
"""What a tile is off by at most, see `Drawn.error`: bfloat16 rounds by a third of that."""
WORTH = 0.98
"""A tile is in the table where it takes at most so much of the library's time, with FEW and with MANY tokens together."""


class Shape(NamedTuple):
    """A linear map of a model, packed as the engine packs it."""

    out_size: int
    in_size: int
    of: str
    gated: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        from agentkv.kernels.linear_triton import shape_name

        return shape_name(self.out_size, self.in_size, self.gated)


SHAPES = (
    Shape(6144, 2560, "qwen3-4b queries, keys and values"),
    Shape(2560, 4096, "qwen3-4b attention's output"),
    Shape(19456, 2560, "qwen3-4b gate and up", gated=True),
    Shape(2560, 9728, "qwen3-4b down"),
    Shape(151936, 2560, "qwen3-4b logits"),
    Shape(6144, 4096, "llama-3.1-8b queries, keys and values"),
    Shape(4096, 4096, "llama-3.1-8b attention's output"),
    Shape(28672, 4096, "llama-3.1-8b gate and up", gated=True),
    Shape(4096, 14336, "llama-3.1-8b down"),
    Shape(128256, 4096, "llama-3.1-8b logits"),
    Shape(5120, 2048, "qwen3-30b-a3b queries, keys and values"),
    Shape(2048, 4096, "qwen3-30b-a3b attention's output"),
    Shape(151936, 2048, "qwen3-30b-a3b logits"),
)
FLAT = tuple(product((32, 64), (128, 256), (1,), (3, 4, 5, 6)))
DEEP = tuple(product((16, 32), (64, 128), (2, 4), (4, 5, 6)))
"""outs, ins, ways, stages."""
SHARES = ((1, 0), (1, 4), (1, 8), (1, 16), (2, 0), (2, 8), (4, 0))
"""split, ahead."""


def tiles() -> list[Tile]:
    """The first round: those that leave room for two programs on a multiprocessor, or nearly."""
    from agentkv.kernels.linear_triton import Tile

    found = []
    for outs, ins, ways, stages in (*FLAT, *DEEP):
        shared = stages * (outs + 8) * ins * ways * 2
        if (24 << 10) <= shared <= (150 << 10):
            found.append(Tile(outs, ins, ways, stages, max(outs // 16, 1) if ways == 1 else ways))
    return [tile._replace(warps=min(tile.warps, 8)) for tile in found]


def fits(tile: Tile, shape: Shape) -> bool:
    """Do the columns divide, and are there as many lines to fetch ahead?"""
    count, rest = divmod(shape.in_size, tile.split)
    return not rest and not count % (tile.ins * tile.ways) and tile.ahead * 64 <= count and not (shape.gated and tile.split > 1)


class Drawn:
    """Weights and tokens of one shape. pool: what all weights are cut of."""

    def __init__(self, shape: Shape, pool: Tensor) -> None:
        size = shape.out_size * shape.in_size
        copies = max(2, min(16, ROTATED // (2 * size)))
        self.weights = pool[: copies * size].view(copies, shape.out_size, shape.in_size)
        self.x = torch.randn(MANY, shape.in_size, dtype=pool.dtype, device=pool.device)
        self.gated = shape.gated
        self.wanted = self._wanted(CHECKED)
        self.bytes = 2 * size

    def _wanted(self, count: int) -> Tensor:
        """The last results, in float64."""
        parts = [half[-count:] for half in self.weights[0].chunk(2 if self.gated else 1)]
        first, *second = [self.x.double() @ half.double().T for half in parts]
        return functional.silu(first) * second[0] if second else first

    def library(self, count: int) -> Callable[[Tensor], Tensor]:
        """The library's product, and the gate behind it."""
        x = self.x[:count]
        return lambda weight: gate(functional.linear(x, weight)) if self.gated else functional.linear(x, weight)

    def ours(self, x: Tensor, tile: Tile) -> Callable[[Tensor], Tensor]:
        """What is measured."""
        from agentkv.kernels.linear_triton import stream

        return lambda weight: stream(x, weight, None, tile, gated=self.gated)

    def us(self, work: Callable[[Tensor], Tensor], repeats: int) -> float:
        """Microseconds of one product, out of a replay over all weights."""
        replay = graph_of(lambda: [work(weight) for weight in self.weights], self.x.device)
        return median(times(replay, self.x.device, repeats)) / len(self.weights)

    def error(self, got: Tensor) -> float:
        """How far a product with the first weights is off, relative to all of it."""
        wanted = self.wanted[: len(got)]
        return float((got[:, -CHECKED:].double() - wanted).norm() / wanted.norm())


def measured(drawn: Drawn, tile: Tile, count: int, repeats: int) -> dict[str, Any]:
    """One tile with so many tokens; an error where it does not run or is wrong."""
    row: dict[str, Any] = {"tile": tile._asdict(), "tokens": count}
    try:
        work = drawn.ours(drawn.x[:count], tile)
        row["error"] = drawn.error(work(drawn.weights[0]))
        if not row["error"] < WRONG:
            return row | {"why_not": "wrong"}
        row["us"] = drawn.us(work, repeats)
    except Exception as error:  # noqa: BLE001 - too much shared memory, for one
        return row | {"why_not": f"{type(error).__name__}: {error}"[:200]}
    return row


def same_bits(drawn: Drawn, tile: Tile) -> bool:
    """Is the first token's result the same alone, among 8, and among 16?"""
    weight, twice = drawn.weights[0], torch.cat((drawn.x, drawn.x.flip(0)))
    alone = drawn.ours(drawn.x[:1], tile)(weight)
    return all(torch.equal(drawn.ours(x, tile)(weight)[:1], alone) for x in (drawn.x, twice))


def compile_all(asked: Sequence[Tile], pool: Tensor) -> None:
    """Have the kernels of all tiles compiled at once; those that do not run are told of when they are measured."""
    from agentkv.kernels.linear_triton import stream

    x, weight = pool.new_zeros(1, 8192), pool.new_zeros(128, 8192)

    def run(tile: Tile) -> None:
        with suppress(Exception):
            stream(x, weight, None, tile)

    with ThreadPoolExecutor(12 if pool.is_cuda else 1) as workers:
        list(workers.map(run, asked))


def tune_shape(shape: Shape, pool: Tensor, rig: Rig) -> dict[str, Any]:
    """All rounds for one shape."""
    drawn = Drawn(shape, pool)
    library = [drawn.us(drawn.library(count), rig.repeats) for count in (FEW, MANY)]
    rows = _ranked(drawn, (tile for tile in tiles() if fits(tile, shape)), FEW, rig)
    shared = [_tile(row)._replace(split=split, ahead=ahead) for row in rows[:6] for split, ahead in SHARES[1:]]
    rows = sorted([*rows, *_ranked(drawn, (tile for tile in shared if fits(tile, shape)), FEW, rig)], key=_us)
    many = _ranked(drawn, (_tile(row) for row in rows[:8] if "us" in row), MANY, rig)
    few = {_tile(row): row["us"] for row in rows if "us" in row}
    ways = sorted(((few[_tile(row)] + row["us"], row) for row in many if "us" in row), key=lambda pair: pair[0])
    found: dict[str, Any] = {
        "shape": shape.name,
        "of": shape.of,
        "bytes": drawn.bytes,
        "library_us": library,
        "rows": [*rows, *many],
    }
    if ways:
        both, row = ways[0]
        best = _tile(row)
        us = [few[best], row["us"]]
        found |= {"best": best._asdict(), "us": us, "same_bits": same_bits(drawn, best), "taken": both <= WORTH * sum(library)}
        found["share_of_copy"] = [drawn.bytes / each / 1e6 / rig.copy for each in us]
    found["library_share_of_copy"] = [drawn.bytes / each / 1e6 / rig.copy for each in library]
    return found


def _ranked(drawn: Drawn, asked: Iterable[Tile], count: int, rig: Rig) -> list[dict[str, Any]]:
    return sorted((measured(drawn, tile, count, rig.repeats) for tile in asked), key=_us)


def _us(row: dict[str, Any]) -> float:
    found: float = row.get("us", float("inf"))
    return found


def _tile(row: dict[str, Any]) -> Tile:
    from agentkv.kernels.linear_triton import Tile

    return Tile(**row["tile"])


def tune(
    *, out: Path, minutes: float = 2.0, repeats: int = 5, device: str = "cuda", tiny: bool = False,
    shapes: Sequence[Shape] = SHAPES, tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Every shape that is begun in time; `out`/tune-linear.json has all, `out`/linear.json what the kernel reads. tiny:
    for an interpreter."""
    rig = Rig(torch.device(device), repeats, tiny, peers=False)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**machine(rig.device), "ceilings": rig.measure_ceilings(), "shapes": []}
    dtype = torch.bfloat16 if rig.device.type == "cuda" else torch.float32  # an interpreter has no products of the former
    pool = torch.empty(max(2 * s.out_size * s.in_size for s in shapes) + ROTATED // 2, dtype=dtype, device=rig.device)
    pool.normal_()
    compile_all([tile._replace(ahead=ahead) for tile in tiles() for ahead in {ahead for _, ahead in SHARES}], pool)
    began = time.monotonic()
    for shape in shapes:
        if time.monotonic() - began > minutes * 60:
            break
        found = tune_shape(shape, pool, rig)
        result["shapes"].append(found)
        (out / FILE).write_text(json.dumps(result, indent=1) + "\n")
        table = {each["shape"]: each["best"] for each in result["shapes"] if each.get("taken")}
        (out / "linear.json").write_text(json.dumps({result["device"]: table}, indent=1) + "\n")
        if tell is not None:
            tell("\n".join(_lines(found)))
    return result


def _lines(found: dict[str, Any]) -> list[str]:
    """Shape, library and the best, then the fastest of each round."""
    share = " ".join(f"{each:.1%}" for each in found["library_share_of_copy"])
    lines = [f"{found['shape']} {found['of']}: library {share} of copy with {FEW} and {MANY} tokens"]
    if "best" in found:
        ours = " ".join(f"{each:.1%}" for each in found["share_of_copy"])
        lines.append(f"  {ours} {tuple(found['best'].values())} same bits {found['same_bits']}, taken {found['taken']}")
    shown = [row for row in found["rows"] if "us" in row]
    for count in (FEW, MANY):
        lines += [f"    {count}: {row['us']:.2f} us {tuple(row['tile'].values())}" for row in shown if row["tokens"] == count][
            :6
        ]
    return lines + failures(found["rows"])


def main() -> None:
    """The command."""
    run_tuner(tune, "tune_linear", __doc__, f"{FILE} and linear.json", minutes=2.0, repeats=5)


if __name__ == "__main__":
    main()
