"""Settings of paged decode attention on this GPU: which are fastest for each shape.

First how the kernel is compiled, then, with the best of those, how many programs there are, how rows are cut and who merges.
A row's result may not depend on its batch, so what is taken in the end is one setting for all shapes of a model: the sums over
shapes say which. `python -m agentkv.bench.tune --out FOLDER`.
"""

# mypy: disable-error-code="no-untyped-call"
# (kernels and torch's operations)

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from agentkv.bench.conditions import machine
from agentkv.bench.device_times import Work, graph_of, times
from agentkv.bench.gpu_rows import Rig, layers_of, small
from agentkv.bench.paged_shapes import SHAPES, SHORT, Drawn, Shape, draw
from agentkv.bench.tuning_command import run_tuner

if TYPE_CHECKING:
    from agentkv.kernels.paged_decode import Merge


class Setting(NamedTuple):
    """One way to run the kernel. programs: of each multiprocessor. few, most, long: see `paged_decode.Cut`."""

    warps: int = 4
    stages: int = 2
    block: int = 128
    programs: int = 2
    few: int = 16
    most: int = 64
    long: int = 1024
    merge: Merge = "after"


TILES = (
    (4, 2, 128, 2), (2, 2, 64, 4), (4, 3, 64, 2), (4, 2, 64, 3), (2, 3, 64, 2), (2, 3, 32, 4), (8, 3, 128, 1), (4, 3, 128, 1),
)  # fmt: skip
"""Warps, stages, tokens of a tile, and programs, of which a multiprocessor holds so many. Its shared memory has of each one
tile less than there are stages."""
CUTS = ((16, 64, 1024), (32, 64, 512), (32, 128, 512), (64, 128, 512))
PROGRAMS = (1, 2, 3, 4)
MERGES: tuple[Merge, ...] = ("after", "overlap")


def compiled_ways() -> list[Setting]:
    """The first round: many programs with little each and few with much want different cuts."""
    return [Setting(*tile, few=few, most=most, long=long) for tile, (few, most, long) in product(TILES, (CUTS[0], CUTS[2]))]


def scheduled_ways(best: Setting, merges: Sequence[Merge] = MERGES) -> list[Setting]:
    """The second round."""
    return [
        best._replace(programs=programs, few=few, most=most, long=long, merge=merge)
        for merge, (few, most, long), programs in product(merges, CUTS, PROGRAMS)
    ]


def work_of(drawn: Drawn, setting: Setting) -> Work:
    """One decode of every layer with that setting, its work list included once."""
    from agentkv.kernels.paged_decode import Cut, Tuning, bound_pieces, paged_decode, plan_decode

    device, lens = drawn.q.device, drawn.lens
    cut = Cut(setting.few, setting.most, setting.long)
    tuned = Tuning(setting.warps, setting.stages, setting.block, setting.programs, setting.merge)
    rows, bound = torch.arange(len(lens), device=device), bound_pieces(len(lens), sum(drawn.shape.lens), cut)

    def run() -> None:
        plan = plan_decode(lens, rows, bound, cut=cut)
        for pages, table in zip(drawn.layers, drawn.tables, strict=True):
            paged_decode(drawn.q, pages, table, plan, drawn.shape.head_dim**-0.5, tuned=tuned)

    return run


def measured(drawn: Drawn, settings: Iterable[Setting], rig: Rig, until: float) -> list[dict[str, Any]]:
    """Each setting's median microseconds a layer and share of the copy rate, the fastest first; those that do not run have an
    error, those after `until` (monotonic seconds) are left out."""
    found: list[dict[str, Any]] = []
    for setting in settings:
        if time.monotonic() > until:
            break
        row: dict[str, Any] = {"setting": setting._asdict()}
        try:
            replay = graph_of(work_of(drawn, setting), rig.device)
            us = [each / len(drawn.layers) for each in times(replay, rig.device, rig.repeats)]
        except Exception as error:  # noqa: BLE001 - too much shared memory, or a launch that this GPU has not
            found.append(row | {"error": f"{type(error).__name__}: {error}"[:200]})
            continue
        found.append(row | {"us": median(us), "share": drawn.shape.kv_bytes / median(us) / 1e6 / rig.copy})
    return sorted(found, key=lambda row: row.get("us", float("inf")))


def tune(
    *, out: Path, minutes: float = 5.0, repeats: int = 10, device: str = "cuda", tiny: bool = False,
    shapes: Sequence[Shape] = (*SHAPES, *SHORT), tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Both rounds for each shape, in equal shares of the time; written to `out`/tune.json after each shape."""
    rig = Rig(torch.device(device), repeats, tiny, peers=False)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**machine(rig.device), "ceilings": rig.measure_ceilings(), "shapes": []}
    began = time.monotonic()
    for index, shape in enumerate(shapes):
        given = small(shape) if tiny else shape
        until = began + minutes * 60 * (index + 1) / len(shapes)
        drawn = draw(given, layers_of(given, tiny), rig.device)
        first = measured(drawn, compiled_ways()[: 2 if tiny else None], rig, until)
        best = Setting(**first[0]["setting"])
        second = scheduled_ways(best, MERGES[:2] if tiny else MERGES)[: 2 if tiny else None]
        ways = measured(drawn, second, rig, until)
        result["shapes"].append({"name": shape.name, "target": shape.share, "compiled": first, "scheduled": ways})
        (out / "tune.json").write_text(json.dumps(result, indent=1) + "\n")
        if tell is not None:
            tell("\n".join(_lines(shape, first, ways)))
        del drawn
        gc.collect()
    if tell is not None:
        tell("\n".join(["one setting for all shapes, its worst share over what is wanted:", *common(result)]))
    return result


def _lines(shape: Shape, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[str]:
    """The best of both rounds, and the best of each way to merge."""
    chosen = first[:4] + second[:4]
    for merge in MERGES:
        chosen += [row for row in second if row["setting"]["merge"] == merge][:1]
    shown = [f"  {row['share']:.1%} {row['us']:.1f} us {tuple(row['setting'].values())}" for row in chosen if "us" in row]
    failed = [f"  {tuple(row['setting'].values())}: {row['error'][:100]}" for row in first + second if "error" in row]
    return [f"{shape.name}, wanted {shape.share:.0%}", *shown, *failed[:3]]


def common(result: dict[str, Any]) -> list[str]:
    """By cut, programs and merge: the least share over its target (where there is none, over the best) among the shapes that
    measured it, the best first."""
    worst: dict[tuple[Any, ...], list[float]] = {}
    for shape in result["shapes"]:
        measured = [row for row in shape["scheduled"] if "share" in row]
        wanted = shape["target"] or max((row["share"] for row in measured), default=1.0)
        for row in measured:
            worst.setdefault(tuple(row["setting"].values())[3:], []).append(row["share"] / wanted)
    whole = {key: min(shares) for key, shares in worst.items() if len(shares) == len(result["shapes"])}
    best = sorted(whole.items(), key=lambda item: -item[1])[:8]
    return [f"  {share:.3f} programs, few, most, long, merge: {key}" for key, share in best]


def main() -> None:
    """The command."""
    run_tuner(tune, "tune", __doc__, "tune.json", minutes=5.0, repeats=10)


if __name__ == "__main__":
    main()
