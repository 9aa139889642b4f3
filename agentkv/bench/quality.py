"""`agentkv bench quality`: whole answers at 8K bytes by method and budget, cell by cell into a folder.

`python -m agentkv.bench.quality` needs torch, triton, transformers and msgspec alone. The same command goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentkv.bench.budgets import Column, budgets_of, chosen, methods_name, pairs
from agentkv.bench.conditions import machine
from agentkv.bench.grid import Engine
from agentkv.bench.retrieval import FIRST, ask_all
from agentkv.errors import BadRequest
from agentkv.runtime import Runtime
from agentkv.runtime_prepare import prepare

Tell = Callable[[str], None]
PAGE_SIZE = 16
LATE = 120.0
"""Seconds after the last moment for a cell to begin in which a process must have ended."""


@dataclass(frozen=True)
class Cell:
    """Some seeds of one condition: one file."""

    column: Column
    budget: int | None
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The file's, without its suffix."""
        return f"{self.column.name}-{self.budget or 'all'}-{self.seeds[0]}"


@dataclass(frozen=True)
class Plan:
    """How cells are played. until: no cell begins after that (seconds since the epoch). commit: where the tree has no git."""

    out: Path
    engine: Engine
    concurrency: int
    until: float
    commit: str | None = None

    def file(self, cell: Cell) -> Path:
        """A cell's file."""
        return self.out / f"{cell.name}.json"

    def missing(self, cell: Cell) -> bool:
        """Is it still to be played? So is one that failed."""
        file = self.file(cell)
        return not file.exists() or "error" in json.loads(file.read_text(encoding="utf-8"))

    def write(self, cell: Cell, found: dict[str, Any]) -> None:
        """A cell's file, whole or not at all."""
        about = {"column": cell.column.name, "method": cell.column.text(cell.budget), "budget": cell.budget}
        file = self.file(cell)
        fresh = file.with_suffix(".part")
        fresh.write_text(json.dumps({**about, **found}) + "\n", encoding="utf-8")
        fresh.replace(file)


def cells(columns: Iterable[Column], budgets: Iterable[int], seeds: int, chunk: int) -> list[list[Cell]]:
    """Conditions with their cells of at most `chunk` seeds, the most telling condition first."""
    every = range(FIRST, FIRST + seeds)
    return [
        [Cell(column, budget, tuple(every[at : at + chunk])) for at in range(0, seeds, chunk)]
        for column, budget in pairs(columns, budgets)
    ]


def run_quality(
    *,
    out: Path,
    engine: Engine,
    seeds: int = 200,
    chunk: int = 50,
    concurrency: int = 60,
    seconds: float = 1e9,
    methods: str = "",
    budgets: str = "",
    commit: str | None = None,
    tell: Tell,
) -> dict[str, int]:
    """Play what `out` lacks; how many cells are `done`, `failed` and `left`.

    A condition has one runtime, and a process of its own where the engine has several workers: one that fails writes its error
    into its file and takes no other with it. BadRequest for an unknown method or budget, or a folder that cannot be made.
    """
    if seeds < 1 or chunk < 1 or concurrency < 1 or engine.workers < 1:
        raise BadRequest("seeds, chunk, concurrency and workers are at least 1")
    every = cells(chosen(methods), budgets_of(budgets), seeds, chunk)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{out} cannot be made: {error}", hint="Name a folder that can be written", param="out") from None
    plan = Plan(out, engine, concurrency, time.time() + seconds, commit)
    todo = [rest for some in every if (rest := [cell for cell in some if plan.missing(cell)])]
    if engine.workers == 1:
        for some in todo:
            play(some, plan, tell)
    else:
        with ThreadPoolExecutor(engine.workers) as pool:
            list(pool.map(partial(_in_process, plan=plan, tell=tell), todo))
    return counted([cell for some in every for cell in some], plan)


def counted(every: Sequence[Cell], plan: Plan) -> dict[str, int]:
    """Cells that are done, that failed and that were not played."""
    left = sum(not plan.file(cell).exists() for cell in every)
    missing = sum(plan.missing(cell) for cell in every)
    return {"done": len(every) - missing, "failed": missing - left, "left": left}


def play(some: Sequence[Cell], plan: Plan, tell: Tell) -> None:
    """The cells of one condition, in one runtime."""
    if time.time() >= plan.until:
        return
    cell = some[0]
    try:
        engine = plan.engine
        method = cell.column.made(cell.budget, prepared(cell.column, plan))
        with Runtime(
            engine.model, method=method, db=None, device=engine.device, memory=engine.memory, page_size=PAGE_SIZE, lookup=0
        ) as runtime:
            about = {**machine(torch.device(runtime.device)), "model": runtime.model_name}
            about["commit"] = plan.commit or about["commit"]
            for cell in some:
                if time.time() >= plan.until:
                    return
                found = ask_all(runtime, cell.seeds, plan.concurrency)
                plan.write(cell, {**found, "conditions": about})
                right = [sum(row["right"][index] for row in found["results"]) for index in range(2)]
                tell(f"{cell.name}: {right[0]} and {right[1]} of {len(cell.seeds)}, {found['seconds']} s")
    except Exception as error:  # noqa: BLE001 - one condition's failure must not cost the others
        _fail(cell, plan, f"{type(error).__name__}: {error}", tell)


def prepared(column: Column, plan: Plan) -> Path | None:
    """The file that the method needs of the model, made where it is not there."""
    if column.prepared is None:
        return None
    name = methods_name(column)
    file = plan.out / f"prepared-{name}"
    if not file.exists():
        own = file.with_suffix(f".{os.getpid()}")
        prepare(name, plan.engine.model, own, None, "cpu", **column.prepared)
        own.replace(file)
    return file


def _fail(cell: Cell, plan: Plan, error: str, tell: Tell) -> None:
    plan.write(cell, {"error": error[:2000]})
    tell(f"{cell.name}: {error[:300]}")


def _in_process(some: Sequence[Cell], plan: Plan, tell: Tell) -> None:
    """`play` in a process of its own; one that dies or does not end has failed."""
    if time.time() >= plan.until:
        return
    process = multiprocessing.get_context("spawn").Process(target=play, args=(some, plan, _say), daemon=True)
    process.start()
    process.join(max(0.0, min(plan.until - time.time(), 1e6)) + LATE)
    if process.exitcode != 0:
        how = "did not end" if process.exitcode is None else f"ended with {process.exitcode}"
        process.kill()
        process.join()
        _fail(next((cell for cell in some if plan.missing(cell)), some[0]), plan, f"its process {how}", tell)


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Iterable[str] | None = None) -> None:
    """The command line without the CLI's packages; options as of `agentkv bench quality`."""
    from agentkv.bench import quality_page

    parser = argparse.ArgumentParser(prog="python -m agentkv.bench.quality", description="Retrieval by method and budget.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells' files; what it has is not played again")
    parser.add_argument("--doc", type=Path, help="write the tables into this page, and bench/quality.json beside it")
    parser.add_argument("--methods", default="", help="names, comma-separated; default: all")
    parser.add_argument("--budgets", default="", help="tokens, comma-separated, played in that order; default: all")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", help="KV memory of each worker, like 7GiB")
    for name, value in (("seeds", 200), ("chunk", 50), ("concurrency", 60), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after that")
    parser.add_argument("--commit", help="where the source tree has no git")
    given = vars(parser.parse_args(None if arguments is None else list(arguments)))
    doc = given.pop("doc")
    engine = replace(Engine(), **{name: given.pop(name) for name in ("model", "device", "memory", "workers")})
    print(json.dumps(run_quality(engine=engine, **given, tell=_say)))
    made = quality_page.report(given["out"])
    if doc is not None:
        quality_page.write(made, doc)
    for line in quality_page.bound_lines(made):
        print(line)


if __name__ == "__main__":
    main()
