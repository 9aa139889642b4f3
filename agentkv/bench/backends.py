"""From a run of `agentkv bench gpu` to what `agentkv doctor` tells of a GPU, and to the tables of docs/gpu.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from agentkv import runtime_crossover
from agentkv.bench.crossover import summary
from agentkv.errors import BadRequest
from agentkv.runtime_backends import DATA

_DECODE, _CHUNK = "paged decode attention ", "chunked prefill attention, "
_PEERS = {
    "cuda_cores_us": "FlashInfer {}",
    "tensor_cores_us": "FlashInfer {} with tensor cores",
    "tensor_cores_fa2_us": "FlashInfer {} with tensor cores, fa2",
    "xqa_us": "FlashInfer {} xqa",
    "xqa_in_place_us": "FlashInfer {} xqa in place",
    "fa2_us": "FlashInfer {} fa2",
    "fa3_us": "FlashInfer {} fa3",
}
"""Key of a peer's times in a row -> its name by version."""
BEGIN, END = "<!-- made by: agentkv bench backends docs/bench/gpu.json --doc docs/gpu.md -->", "<!-- end of what was made -->"


def facts(result: dict[str, Any], source: str) -> dict[str, Any]:
    """Of a gpu.json: device, date, commit, versions, source, ceilings, and operations: by operation and peer the ratio of the
    peer's median time to ours by shape."""
    operations: dict[str, dict[str, dict[str, float]]] = {"decode": {}, "prompt chunks": {}}
    version = result["versions"].get("flashinfer-python") or ""
    for row in _rows(result):
        for prefix, operation in ((_DECODE, "decode"), (_CHUNK, "prompt chunks")):
            if row["name"].startswith(prefix):
                for key, name in _PEERS.items():
                    if key in (row["peer"] or {}):
                        ratios = operations[operation].setdefault(name.format(version), {})
                        ratios[row["name"].removeprefix(prefix)] = median(row["peer"][key]) / row["median_us"]
    dates = [row["date"] for row in _rows(result)] or [result["date"]]
    versions = {name: version for name, version in result["versions"].items() if version}
    ceilings = {name: {key: each[key] for key in ("value", "unit")} for name, each in result["ceilings"].items()}
    kept = {"device": result["device"], "date": max(dates), "commit": result["commit"], "versions": versions}
    return {**kept, "source": source, "ceilings": ceilings, "operations": operations}


def write(
    path: Path, *, doc: Path | None = None, data: Path = DATA, crossovers: Path = runtime_crossover.DATA
) -> dict[str, Any]:
    """Add the facts of a gpu.json to `data`, in place of earlier ones of the same GPU, and write its tables between the marks
    of `doc`. Where it says from where on methods pay, that takes the place of what `crossovers` says. BadRequest where a file
    is not what it should be."""
    try:
        result = json.loads(path.read_text())
        made, lines, tiny = facts(result, str(path)), list(tables(result)), result["tiny"]
        pays = summary(result)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BadRequest(f"{path} is no gpu.json: {why}", hint="It is written by: agentkv bench gpu --out DIR") from None
    if tiny:
        raise BadRequest(f"{path} was measured in sizes for tests", hint="Run: agentkv bench gpu --out DIR, on a GPU")
    known = json.loads(data.read_text()) if data.exists() else {}
    if doc is not None:
        before, mark, rest = _page(doc).partition(BEGIN)
        _, end, after = rest.partition(END)
        if not mark or not end:
            raise BadRequest(f"{doc} lacks the lines {BEGIN!r} and {END!r}", param="doc")
        doc.write_text("\n".join((before + BEGIN, "", *lines, "", END)) + after)
    data.write_text(json.dumps({**known, made["device"]: made}, indent=1) + "\n")
    if pays["methods"]:
        crossovers.write_text(json.dumps(pays, indent=1) + "\n")
    return made


def _page(doc: Path) -> str:
    try:
        return doc.read_text()
    except (OSError, ValueError) as error:
        raise BadRequest(f"{doc} cannot be read: {error}", param="doc") from None


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Markdown: the machine, and every row with what was reached and wanted."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    copy, matmul = (result["ceilings"][name]["value"] for name in ("copy", "matmul"))
    yield f"{result['device']}, {result['date'][:10]}, {versions}. Ceilings of that run: copy {copy:.2f} TB/s (bytes read and"
    yield f"written), matmul {matmul:.0f} TFLOP/s in bfloat16."
    yield ""
    yield "| what | median | reached | wanted | beside a peer |"
    yield "|---|---|---|---|---|"
    for row in _rows(result):
        if row["name"].startswith("crossover"):
            continue
        reached = f"{row['value']:.3g} {row['unit']}"
        yield f"| {' | '.join((row['name'], _time(row['median_us']), reached, _wanted(row), _peer(row)))} |"


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if "error" not in row]


def _time(us: float) -> str:
    return f"{us:,.0f} µs" if us < 1e4 else f"{us / 1e3:,.1f} ms" if us < 1e6 else f"{us / 1e6:,.2f} s"


def _wanted(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return "-"
    text = f"{'at most' if row['at_most'] else 'at least'} {row['target']:g}"
    if row["met"]:
        return text
    but = row.get("short") or "the peer's gain not reached"
    return f"{text}; {but}" if row["value_met"] else f"{text}: not reached"


def _peer(row: dict[str, Any]) -> str:
    if row["gain"] is None:
        return "-"
    text, fastest = f"{row['gain']:.2f}x as fast as {row['peer']['name']}", row.get("beside_its_fastest_kernel")
    if fastest is None:
        return text
    times = {median(row["peer"][key]): name for key, name in _PEERS.items() if key in row["peer"]}
    kernel = times[min(times)].removeprefix("FlashInfer {}").strip() or "of the wrapper"
    return f"{text}'s wrapper, {fastest:.2f}x its fastest kernel ({kernel})"
