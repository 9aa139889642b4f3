"""`agentkv bench gpu`: every line of speed that this project must show, as ratios to rates of the same run.

`python -m agentkv.bench.gpu` needs torch, triton, transformers and msgspec alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from agentkv.bench import crossover
from agentkv.bench.added_rows import added_rows
from agentkv.bench.against_dense import against_rows
from agentkv.bench.batches import batch_rows
from agentkv.bench.capacity import capacity_rows
from agentkv.bench.conditions import machine
from agentkv.bench.continuation_row import continuation_rows
from agentkv.bench.decode_step import step_rows
from agentkv.bench.dequant_rows import dequant_rows
from agentkv.bench.expert_rows import expert_rows
from agentkv.bench.gpu_report import line, plot, write_page
from agentkv.bench.gpu_rows import Rig, Row, kernel_rows
from agentkv.bench.mixed_rows import mixed_rows
from agentkv.bench.prefill_row import prefill_rows
from agentkv.bench.prefill_run import run_rows
from agentkv.bench.selection_rows import selection_rows
from agentkv.errors import BadRequest

Tell = Callable[[str], None]
FILE = "gpu.json"
_FRAMES = 6
"""Calls of a failed row that are told."""

NOT_BUILT: tuple[str, ...] = ()
"""Lines of the table that have no row yet."""


def all_rows() -> list[Row]:
    """In the order in which they are measured."""
    kernels = [*kernel_rows(), *selection_rows(), *dequant_rows(), *expert_rows(), *prefill_rows()]
    decodes = [*step_rows(), *against_rows(), *mixed_rows(), *batch_rows(), *capacity_rows()]
    return [*kernels, *decodes, *run_rows(), *added_rows(), *continuation_rows(), *crossover.crossover_rows()]


def run_gpu(
    *,
    out: Path,
    minutes: float = 8.0,
    rows: str = "",
    repeats: int = 20,
    device: str = "cuda",
    tiny: bool = False,
    peers: bool = True,
    commit: str | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Measure what `out`/gpu.json does not have yet, and write it there after each row; returns the same. Beside it lies
    crossover.json, once that was measured.

    minutes: no row is begun after that. rows: parts of names between semicolons; rows so named are measured again, no others.
    tiny: sizes for an interpreter on a CPU, whose figures mean nothing. commit: where the source tree has no git.
    A row that fails keeps its error and is tried again next time. BadRequest where there is no such device.
    """
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest("bench gpu measures an NVIDIA GPU, and torch sees none here", hint="Run it on a machine with one")
    wanted, lines = [part.strip() for part in rows.split(";") if part.strip()], all_rows()
    for part in wanted:
        if not any(part in row.name for row in lines):
            raise BadRequest(f"no row's name has {part!r} in it", param="rows", hint="docs/bench/gpu.md has the names")
    if repeats < 1:
        raise BadRequest(f"repeats={repeats}: 1 or more", param="repeats")
    if math.isnan(minutes):
        raise BadRequest("minutes=nan: a number", param="minutes")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{out} cannot be a folder: {error.strerror}", hint="Name another folder", param="out") from None
    conditions = machine(target)
    conditions["commit"] = commit or conditions["commit"]
    before = _before(out / FILE, conditions["device"], tiny)
    rig = Rig(target, repeats, tiny, peers)
    began = time.monotonic()
    result: dict[str, Any] = {**conditions, "tiny": tiny, "ceilings": rig.measure_ceilings(), "rows": [], "not_reached": []}
    if tell is not None:
        tell(f"{conditions['device']}: copy {rig.copy:.2f} TB/s, matmul {rig.matmul:.0f} TFLOP/s")
    kept = {row.name: before[row.name] for row in lines if row.name in before}
    for row in lines:
        asked = any(part in row.name for part in wanted)
        if not asked and (wanted or "error" not in kept.get(row.name, {"error": "not measured"})):
            continue
        if time.monotonic() - began > minutes * 60:
            result["not_reached"].append(row.name)
            continue
        kept[row.name] = {**_one(row, rig), "commit": conditions["commit"]}
        result["rows"] = [kept[each.name] for each in lines if each.name in kept]
        _write(out / FILE, result)
        if tell is not None:
            tell(line(kept[row.name]))
    result["rows"] = [kept[row.name] for row in lines if row.name in kept]
    result["not_built"] = list(NOT_BUILT)
    _write(out / FILE, result)
    where = crossover.summary(result)
    if where["methods"]:
        _write(out / crossover.FILE, where)
    return result


def _one(row: Row, rig: Rig) -> dict[str, Any]:
    """Measure one row; what it allocated is given back."""
    began = time.monotonic()
    try:
        found = row.judged(row.measure(rig))
    except Exception as error:  # noqa: BLE001 - one row's failure must not cost the others
        found = {"name": row.name, "target": row.target, "met": False, "error": _told(error)}
    rig.free()
    return {**found, "seconds": time.monotonic() - began, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _told(error: Exception) -> str:
    """What was raised, and the last calls that led there, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[: -_FRAMES - 1 : -1]
    where = ", ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames)
    return f"{type(error).__name__}: {str(error)[:1000]} ({where})"


def _before(path: Path, device: str, tiny: bool) -> dict[str, dict[str, Any]]:
    """Rows by name of an earlier run on such a device. BadRequest where the file is of another: it would be lost."""
    if not path.exists():
        return {}
    try:
        earlier = json.loads(path.read_text())
        of, rows = (earlier["device"], earlier["tiny"]), {row["name"]: row for row in earlier["rows"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise BadRequest(f"{path} is no result of this command", hint="Name another folder", param="out") from None
    if of != (device, tiny):
        raise BadRequest(f"{path} was measured on another device: {of[0]}", hint="Name another folder", param="out")
    return rows


def _write(path: Path, result: dict[str, Any]) -> None:
    """Replace the file whole."""
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(path)


def main(arguments: Iterable[str] | None = None) -> None:
    """The command without the package's own command line."""
    parser = argparse.ArgumentParser(prog="python -m agentkv.bench.gpu", description=run_gpu.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json and gpu.png; rows that it has are kept")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", default="", help="parts of names, between semicolons: measure these again, and no others")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for an interpreter")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--doc", type=Path, help="a page; the table goes between its two marks")
    parser.add_argument("--commit", help="where the source tree has no git")
    given = parser.parse_args(None if arguments is None else list(arguments))
    options = vars(given)
    peers = not options.pop("no_peers")
    page = options.pop("doc")
    result = run_gpu(**options, peers=peers, tell=lambda text: print(text, flush=True))
    plot(result, given.out / "gpu.png")
    if page is not None:
        write_page(result, page)


if __name__ == "__main__":
    main()
