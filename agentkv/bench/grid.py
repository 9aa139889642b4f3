"""Grids of conditions, run cell by cell into a folder; a cell whose file is there is not run again.

`agentkv bench grid --out DIR`, or `python -m agentkv.bench.grid --out DIR` where only torch, transformers and msgspec are
installed, plays all that the card of `micro` and docs/pruning.md report.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentkv.bench.world import Condition, Tell, about, play
from agentkv.errors import BadRequest
from agentkv.runtime import Runtime
from agentkv.world.dialect import DIALECTS
from agentkv.world.task import FAMILIES

PARTS = ("dense", "long", "pruning", "once", "blank", "window")
LAGS = (None, 0, 1, 2, 4, 8)
WAYS = {"in_place drop": ("drop", "in_place"), "in_place edges": ("edges:128", "in_place"), "rebuild": ("drop", "rebuild")}
FIRST = 10_000  # the first seed: fresh ones


@dataclass(frozen=True)
class Cell:
    """One part of a grid that fits a minute on a GPU: its file's name and what it plays."""

    name: str
    condition: Condition


def cells(part: str, seeds: int, chunk: int) -> list[Cell]:
    """The cells of a part, about `seeds` seeds a condition (fewer in controls), in files of at most `chunk` tasks."""
    every = tuple(FAMILIES)
    dense = [(f"{d}-{f}", Condition((), (f,), d, max_bytes=16_384)) for d in DIALECTS for f in every]
    plain = Condition((), every)
    parts: dict[str, tuple[int, list[tuple[str, Condition]]]] = {
        "dense": (seeds, dense),
        "long": (seeds // 8, [(name, replace(one, min_bytes=28_000, max_bytes=32_768)) for name, one in dense]),
        "pruning": (seeds // 6, pruning(plain)),
        "once": (seeds // 2, [(str(lag), replace(plain, families=("once",), lag=lag, mode="rebuild")) for lag in (*LAGS, 10)]),
        "blank": (seeds // 10, [("all", replace(plain, blank=True))]),
        "window": (seeds // 5, [(name, replace(plain, families=(name,), window=1024)) for name in ("once", "join")]),
    }
    if part not in parts:
        raise BadRequest(f"unknown part {part!r}; known: {', '.join(PARTS)}", param="parts")
    count, conditions = parts[part]
    return [cell for name, one in conditions for cell in _chunks(f"{part}-{name}", one, max(1, count), chunk)]


def pruning(plain: Condition) -> list[tuple[str, Condition]]:
    """The lag study: no pruning, then each lag in each way, by name."""
    found = [("none", plain)]
    for way, (keep, mode) in WAYS.items():
        found += [(f"{way.replace(' ', '_')}-{lag}", replace(plain, lag=lag, keep=keep, mode=mode)) for lag in LAGS[1:]]
    return found


def _chunks(name: str, condition: Condition, seeds: int, chunk: int) -> Iterable[Cell]:
    """`seeds` seeds in cells of at most `chunk` tasks; the last number of a cell's name is its first seed's."""
    size = max(1, chunk // len(condition.families or "1"))
    for at in range(0, seeds, size):
        some = tuple(range(FIRST + at, FIRST + min(seeds, at + size)))
        yield Cell(f"{name}-{at}", replace(condition, seeds=some))


def run_cells(
    runtime: Runtime, todo: Iterable[Cell], folder: Path, concurrency: int, seconds: float, tell: Tell
) -> dict[str, int]:
    """Run the cells whose file is missing, until `seconds` are over; returns how many are done and left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{folder} cannot be made: {error}", hint="Name a folder that can be written", param="out") from None
    began, done, left = time.monotonic(), 0, 0
    for cell in todo:
        file = folder / f"{cell.name}.json"
        if file.exists():
            done += 1
        elif time.monotonic() - began >= seconds:
            left += 1
        else:
            result = {**play(runtime, cell.condition, concurrency), **about(runtime)}
            file.with_suffix(".tmp").write_text(json.dumps(result) + "\n", encoding="utf-8")
            file.with_suffix(".tmp").replace(file)
            tell(f"{cell.name}: {result['success']:.3f} of {result['n']}, {result['seconds']} s")
            done += 1
    return {"done": done, "left": left}


@dataclass(frozen=True)
class Engine:
    """What plays the cells: one process, or several on one device, which each take every so many-th cell. memory: of each."""

    model: str = "micro"
    device: str = "auto"
    memory: str | None = None
    workers: int = 1


def run_grid(
    out: Path, parts: str, engine: Engine, seeds: int, chunk: int, concurrency: int, seconds: float, tell: Tell
) -> dict[str, int]:
    """The cells of some parts (names, comma-separated); see run_cells."""
    todo = [cell for part in parts.split(",") for cell in cells(part, seeds, chunk)]
    return play_cells(todo, engine, out, concurrency, seconds, tell)


def play_cells(todo: list[Cell], engine: Engine, out: Path, concurrency: int, seconds: float, tell: Tell) -> dict[str, int]:
    """run_cells by the engine's processes: a small model leaves a GPU idle while one process plays.

    Where a cell fails, its process stops and the others go on; then the error is raised. The same command plays what is left.
    """
    missing = [cell for cell in todo if not (out / f"{cell.name}.json").exists()]
    parts = shares(missing, engine.workers)
    work = partial(_play_some, engine=engine, out=out, concurrency=concurrency, seconds=seconds)
    if len(parts) > 1:
        with ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn")) as pool:
            counts = list(pool.map(partial(work, tell=_say), parts))
    else:
        counts = [work(part, tell=tell) for part in parts]
    done = len(todo) - len(missing) + sum(count["done"] for count in counts)
    return {"done": done, "left": sum(count["left"] for count in counts)}


def shares(missing: list[Cell], workers: int) -> list[list[Cell]]:
    """Every so many-th cell for each worker, since neighbours take about as long; no share is empty."""
    return [missing[index::workers] for index in range(min(workers, len(missing)))]


def _play_some(todo: list[Cell], *, engine: Engine, out: Path, concurrency: int, seconds: float, tell: Tell) -> dict[str, int]:
    with Runtime(engine.model, db=None, device=engine.device, memory=engine.memory) as runtime:
        return run_cells(runtime, todo, out, concurrency, seconds, tell)


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """The command line without the CLI's packages; options as of `agentkv bench grid`."""
    parser = argparse.ArgumentParser(description="Grids of the agent world, cell by cell; the same command goes on.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", default="micro")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory")
    for name, value in (("workers", 1), ("seeds", 200), ("chunk", 200), ("concurrency", 100)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = vars(parser.parse_args())
    engine = Engine(**{name: given.pop(name) for name in ("model", "device", "memory", "workers")})
    print(json.dumps(run_grid(engine=engine, **given, tell=_say)))


def gathered(folder: Path, name: str) -> list[dict[str, Any]]:
    """The results of all cells of one condition, by its name without the seed."""
    results: list[dict[str, Any]] = []
    for file in sorted(folder.glob(f"{name}-*.json")):
        if file.stem[len(name) + 1 :].isdigit():
            results += json.loads(file.read_text(encoding="utf-8"))["results"]
    return results


if __name__ == "__main__":
    main()
