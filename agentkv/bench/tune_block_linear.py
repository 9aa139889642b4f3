"""Tiles of block-FP8 linear maps of few rows on this GPU: which are fastest for each shape and number of rows?

All are compared with float64 before they count. Up to 16 rows share a tile, so that a row's result does not depend on how many
there are; more have tiles of their own.
`python -m agentkv.bench.tune_block_linear --out FOLDER`.
"""

# mypy: disable-error-code="no-untyped-call"
# (kernels and torch's operations)

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentkv.bench.conditions import machine
from agentkv.bench.device_times import graph_of, times
from agentkv.bench.expert_rows import MAPS, drawn_blocks
from agentkv.bench.gpu_rows import Rig
from agentkv.bench.tuning_command import failures, run_tuner
from agentkv.kernels.block_fp8 import BLOCK, dequantize_blocks

if TYPE_CHECKING:
    from agentkv.kernels.block_linear_triton import Tile

FILE = "tune-block-linear.json"
Map = tuple[int, int]
"""Outputs and inputs."""
MEASURED = {16: (1, 8), 64: (64,), 128: (128,), 32: (32,)}
"""By the most rows that a tile is for, those that it is measured with."""
ROTATED = 160 << 20
"""Bytes of weights that go by before one is read again: many times the cache."""
WRONG = 6e-3
"""What a tile is off by at most, see `Drawn.error`: rounding to bfloat16 is a third of that."""
_WORKERS = 14
_PROGRAMS = 80, 2500  # fewer leave the GPU idle
_SHARED = 220 << 10  # bytes of a multiprocessor


def few_tiles() -> Iterator[Tile]:
    """For up to 16 rows."""
    from agentkv.kernels.block_linear_triton import Tile

    cuts = ((2, 2), (4, 4), (8, 4), (8, 8), (16, 4), (16, 8))
    for outs, (ways, warps), split in product((16, 32, 64), cuts, (1, 2, 3, 4, 5, 8)):
        yield Tile(8, outs, ways, 0, warps, split)
    for outs, ways, stages, split in product((16, 32), (2, 4, 8), (3, 5), (1, 2, 4, 5)):
        yield Tile(8, outs, ways, stages, ways, split)
    for stages, split, turn in product((2, 3), (1, 2, 4), (1, 2, 4)):
        yield Tile(8, 64, 1, stages, 4, split, turn)


def many_tiles(most: int) -> Iterator[Tile]:
    """For more: tiles of all of them, or of half."""
    from agentkv.kernels.block_linear_triton import Tile

    cuts = ((32, 64, 4), (32, 128, 4), (32, 128, 8), (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 64, 8), (128, 128, 8))
    kinds = product(cuts, (2, 3, 4), (1, 2, 4, 6), (1, 2), (False, True))
    for (rows, outs, warps), stages, split, turn, terms in kinds:
        shared = stages * turn * (outs + 2 * rows) * BLOCK
        if rows in (most, most // 2) and shared <= _SHARED and not (terms and rows == 128):
            yield Tile(rows, outs, 1, stages, warps, split, turn, terms)


def fits(tile: Tile, each: Map) -> bool:
    """Do the outputs divide, has every program work, are there enough programs, and have their threads room for codes?"""
    out_size, blocks = each[0], each[1] // BLOCK
    count = -(-blocks // tile.split)
    turns, empty = -(-count // tile.ways), blocks <= (tile.split - 1) * count
    if out_size % tile.outs or empty or (tile.turn > 1 and blocks % (tile.split * tile.turn)):
        return False
    held = tile.outs * tile.ways * turns / tile.warps  # registers of a thread
    return _PROGRAMS[0] <= out_size // tile.outs * tile.split <= _PROGRAMS[1] and (tile.stages > 0 or 8 <= held <= 96)


def tiles(each: Map, most: int) -> list[Tile]:
    """The first round."""
    return [tile for tile in (few_tiles() if most == min(MEASURED) else many_tiles(most)) if fits(tile, each)]


class Drawn:
    """Weights of one shape, and rows for them. size: bytes of the weights."""

    def __init__(self, each: Map, device: torch.device, rotated: int) -> None:
        out_size, in_size = each
        copies = max(1, rotated // (out_size * in_size))
        self.weights = [drawn_blocks(device, out_size, in_size) for _ in range(copies)]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # an interpreter has no products of the former
        self.x = torch.randn(max(MEASURED), in_size, device=device).to(dtype)
        self.wanted = self.x.double() @ dequantize_blocks(*self.weights[0], torch.float64).T
        self.size = out_size * in_size

    def ours(self, rows: int, tile: Tile, weight: Tensor, scale: Tensor) -> Tensor:
        """What is measured."""
        from agentkv.kernels import block_linear_triton

        return block_linear_triton.few_rows(self.x[:rows], weight, scale, None, tile)

    def us(self, rows: int, tile: Tile, repeats: int) -> float:
        """Microseconds of one product, out of a replay over all weights."""
        work = partial(self.ours, rows, tile)
        replay = graph_of(lambda: [work(*each) for each in self.weights], self.x.device)
        return median(times(replay, self.x.device, repeats)) / len(self.weights)

    def error(self, got: Tensor) -> float:
        """How far a product with the first weights is off, relative to all of it."""
        wanted = self.wanted[: len(got)]
        return float((got.double() - wanted).norm() / wanted.norm())

    def same_bits(self, tile: Tile, most: int) -> bool:
        """Is a row's result the same alone, among half as many, and among all?"""
        whole = self.ours(most, tile, *self.weights[0])
        return all(torch.equal(self.ours(rows, tile, *self.weights[0]), whole[:rows]) for rows in (1, most // 2))


def measured(drawn: Drawn, tile: Tile, rows: Sequence[int], repeats: int) -> dict[str, Any]:
    """One tile: us, by number of rows, or why_not where it does not run or is wrong."""
    row: dict[str, Any] = {"tile": tile._asdict(), "rows": list(rows)}
    try:
        row["error"] = max(drawn.error(drawn.ours(count, tile, *drawn.weights[0])) for count in rows)
        if not row["error"] < WRONG:
            return row | {"why_not": "wrong"}
        row["us"] = [drawn.us(count, tile, repeats) for count in rows]
    except Exception as error:  # noqa: BLE001 - too much shared memory, for one
        return row | {"why_not": f"{type(error).__name__}: {error}"[:200]}
    return row


def compile_one(tile: Tile, out_size: int, in_size: int) -> None:
    """In a process of its own: the cache on disk keeps what it made."""
    from agentkv.kernels.block_linear_triton import ALIKE, few_rows

    weight = torch.empty(out_size, in_size, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(-(-out_size // BLOCK), in_size // BLOCK, device="cuda")
    for rows in {tile.rows, max(tile.rows, ALIKE)}:
        with suppress(Exception):  # it is told of when it is measured
            few_rows(torch.zeros(rows, in_size, dtype=torch.bfloat16, device="cuda"), weight, scale, None, tile)
            torch.cuda.synchronize()


def compile_all(asked: Iterable[tuple[Tile, Map]]) -> None:
    """In processes, all at once. Tiles that differ in what is no constant of their kernel are one."""
    jobs = {}
    for tile, each in asked:
        held = -(-(each[1] // BLOCK) // tile.split) if tile.stages == 0 else 0
        jobs[tile._replace(split=min(tile.split, 2)), held] = (tile, *each)
    with ProcessPoolExecutor(_WORKERS, mp_context=multiprocessing.get_context("spawn")) as workers:
        list(workers.map(compile_one, *zip(*jobs.values(), strict=True), chunksize=2))


def ranked(drawn: Drawn, asked: Iterable[Tile], rows: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """All tiles, fastest first."""
    return sorted((measured(drawn, tile, rows, repeats) for tile in asked), key=_us)


def _us(row: dict[str, Any]) -> float:
    found: float = sum(row.get("us", [float("inf")]))
    return found


def _tile(row: dict[str, Any]) -> Tile:
    from agentkv.kernels.block_linear_triton import Tile

    return Tile(**row["tile"])


def tune_map(drawn: Drawn, each: Map, most: int, rig: Rig) -> dict[str, Any]:
    """One map and number of rows."""
    rows = ranked(drawn, tiles(each, most), MEASURED[most], rig.repeats)
    found = {"shape": f"{each[0]}x{each[1]}", "most_rows": most, "bytes": drawn.size, "rows": rows}
    if "us" in rows[0]:
        best = _tile(rows[0])
        found |= {"best": best._asdict(), "same_bits": drawn.same_bits(best, most)}
        found["of_copy"] = [drawn.size / us / 1e6 / rig.copy for us in rows[0]["us"]]
    return found


def tune(
    *, out: Path, minutes: float = 1.0, repeats: int = 5, device: str = "cuda", tiny: bool = False,
    maps: Sequence[Map] = MAPS, tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All maps and numbers of rows that are begun in time: `out`/tune-block-linear.json has all, `out`/linear_block_fp8.json
    what the kernel reads. tiny: for an interpreter."""
    began, rig = time.monotonic(), Rig(torch.device(device), repeats, tiny, peers=False)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**machine(rig.device), "ceilings": rig.measure_ceilings(), "shapes": []}
    pools = {each: Drawn(each, rig.device, 0 if tiny else ROTATED) for each in maps}
    if rig.device.type == "cuda":
        compile_all((tile, each) for most in MEASURED for each in maps for tile in tiles(each, most))
    for most, each in product(MEASURED, maps):
        if time.monotonic() - began > minutes * 60:
            break
        found = tune_map(pools[each], each, most, rig)
        result["shapes"].append(found)
        (out / FILE).write_text(json.dumps(result, indent=1) + "\n")
        (out / "linear_block_fp8.json").write_text(json.dumps({result["device"]: table(result["shapes"])}, indent=1) + "\n")
        if tell is not None:
            tell("\n".join(_lines(found)))
    return result


def table(shapes: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By shape and the most rows, few first, the best tile."""
    made: dict[str, dict[str, Any]] = {}
    for found in sorted(shapes, key=lambda found: int(found["most_rows"])):
        if "best" in found:
            made.setdefault(found["shape"], {})[str(found["most_rows"])] = found["best"]
    return made


def _lines(found: dict[str, Any]) -> list[str]:
    """The best, then the fastest and what failed."""
    lines = [f"{found['shape']}, up to {found['most_rows']} rows"]
    if "best" in found:
        lines[0] += f": {' '.join(f'{share:.1%}' for share in found['of_copy'])} of copy, same bits {found['same_bits']}"
    shown = [row for row in found["rows"] if "us" in row][:6]
    lines += [f"    {' '.join(f'{us:.2f}' for us in row['us'])} us {tuple(row['tile'].values())}" for row in shown]
    return lines + failures(found["rows"])


def main() -> None:
    """The command."""
    run_tuner(tune, "tune_block_linear", __doc__, f"{FILE} and linear_block_fp8.json", minutes=1.0, repeats=5)


if __name__ == "__main__":
    main()
