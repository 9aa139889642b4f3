"""Whose kernels attention uses on a GPU, and what was measured beside them: data that `agentkv bench backends` wrote."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data" / "backends.json"
TUNED = Path(__file__).resolve().parent / "kernels" / "tuned"
"""By operation a file: name of a GPU -> shape -> how its kernel is cut."""
MEASURE = "agentkv bench gpu --out DIR --minutes 8, then agentkv bench backends DIR/gpu.json"
"""What measures another GPU, and makes its figures known here."""


def backends(gpu: str) -> dict[str, Any]:
    """Of a GPU by the name that torch gives it.

    operations: each with `backend`, whose kernels it uses, and `peers`, by name the time that a peer takes over ours by shape
    (more than 1: ours is faster). measured: device, date, commit, versions and source; None where this GPU was not measured,
    and no peer has figures. tuned: by operation the shapes for which a kernel is set by measurements on this GPU.
    """
    found: dict[str, Any] = _known().get(gpu, {})
    measured = {key: found[key] for key in ("device", "date", "commit", "versions", "source")} if found else None
    rows = [
        {"operation": operation, "backend": backend, "peers": found.get("operations", {}).get(operation, {})}
        for operation, backend in USED.items()
    ]
    tables = {path.stem: json.loads(path.read_text()) for path in sorted(TUNED.glob("*.json"))}
    tuned = {operation: list(table[gpu]) for operation, table in tables.items() if gpu in table}
    return {"operations": rows, "measured": measured, "tuned": tuned}


def measured_decode(gpu: str | None, version: str, shape: tuple[int, int, int, int]) -> dict[str, float]:
    """The time that FlashInfer's xqa kernel takes over our pages, over that of our own kernel, on such a GPU, by rows; {} where
    that version was not measured so. shape: (num_heads, num_kv_heads, head_dim, page_size)."""
    num_heads, num_kv_heads, *rest = shape
    decode = _known().get(gpu or "", {}).get("operations", {}).get("decode", {})
    times: dict[str, float] = decode.get(f"FlashInfer {version} {OPTION}", {})
    heads = f" {num_heads}/{num_kv_heads}"
    return {name: ratio for name, ratio in times.items() if name.endswith(heads)} if tuple(rest) == MEASURED else {}


OPTION = "xqa in place"
"""What `attention="flashinfer"` is."""
MEASURED = (128, 16)
"""head_dim and page_size of all measurements."""
USED = {
    "decode": "Triton kernels of this package, over pages in place",
    "prompt chunks": "gathered pages; cuDNN for a long history, flash attention of torch for the rest",
}
"""Operation -> whose kernels it uses on every GPU."""


def told(found: dict[str, Any]) -> list[str]:
    """The same for people: a line an operation, and where the figures are from or how to have them."""
    lines = [f"{row['operation']}: {row['backend']}{_beside(row['peers'])}" for row in found["operations"]]
    tuned = (f"{operation} ({', '.join(shapes)})" for operation, shapes in found["tuned"].items())
    lines.append(f"tuned on this GPU: {', '.join(tuned) or 'nothing, so settings of others are used'}")
    if found["measured"] is None:
        return [*lines, f"nothing was measured on this GPU; {MEASURE}"]
    measured = found["measured"]
    with_ = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return [*lines, f"measured on an {measured['device']}, {measured['date'][:10]}, {with_}: {measured['source']}"]


def _beside(peers: dict[str, dict[str, float]]) -> str:
    texts = []
    for name, ratios in peers.items():
        least, most = min(ratios.values()), max(ratios.values())
        span = f"{least:.2f}" if len(ratios) == 1 else f"{least:.2f} to {most:.2f}"
        use = "an option" if name.endswith(OPTION) else "not used"
        texts.append(f"{name}, {use}, takes {span} times as long ({len(ratios)} shape{'s' * (len(ratios) > 1)})")
    return "".join(f"; {text}" for text in texts)


@cache
def _known() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return known
