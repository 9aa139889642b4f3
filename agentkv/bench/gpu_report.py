"""Rows of `agentkv bench gpu` for people: a line each, and a plot."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from agentkv.errors import BadRequest

MARK, MARK_END = "<!-- rows -->", "<!-- /rows -->"


def line(row: dict[str, Any]) -> str:
    """One row: what was reached, what was wanted, what the peer took."""
    if "error" in row:
        return f"{row['name']:60} failed: {row['error'][:200]}"
    sign = "<=" if row["at_most"] else ">="
    but = row.get("short") or "a peer's gain"
    verdict = "met" if row["met"] else f"met, but for {but}" if row["value_met"] else "NOT MET"
    wanted = "reported" if row["target"] is None else f"wanted {sign} {row['target']:.3g}"
    text = f"{row['name']:60} {row['median_us']:10.1f} us {row['value']:8.3f} {row['unit']}, {wanted}"
    if row["gain"] is not None:
        wanted = f", wanted {row['gain_target']:g}" if row["gain_target"] else ""
        text += f"; {_beside(row)}{wanted}"
    for cell in row.get("sweep", row.get("cells", [])):
        text += "\n    " + ", ".join(
            f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in cell.items()
        )
    for name, by_length in row.get("largest", {}).items():
        text += f"\n    largest batch, {name}: {by_length}"
    for name, way in row.get("ways", {}).items():
        shown = f"{way['tflop_per_s']:.0f} TFLOP/s, first call {way['first_ms']:.0f} ms" if "us" in way else way["error"][:120]
        text += f"\n    {name}: {shown}"
    for name, found in row.get("maps", {}).items():
        library, ours = median(found["library_us"]), median(found["ours_us"])
        text += f"\n    {name}: torch {library:.1f} us, ours {ours:.1f} us with tiles {found['best']}"
    if "bytes_allow" in row:
        text += f"\n    dense {row['dense']['median_us']:.0f} us ({row['dense']['how']}); bytes allow {row['bytes_allow']:.2f}x"
    if "eager_median_us" in row:
        text += f"\n    {row['how']}; eager {row['eager_median_us']:.0f} us; bytes {row['bytes_us']:.0f} us"
        text += f"; {row['why_no_graph'][:200]}" if "why_no_graph" in row else ""
    for kernel in row.get("kernels", {}).get("longest", [])[:12]:
        text += f"\n    {kernel['us']:9.1f} us {kernel['launches']:5} x {kernel['kernel'][:80]}"
    return f"{text}  {verdict} ({row['seconds']:.0f} s)"


def markdown(result: dict[str, Any]) -> str:
    """A page's tables: a line for each row, and for those that miss what they should reach, where their time goes."""
    lines = ["| what | reached | wanted | met | took | bytes alone |", "|---|---|---|---|---|---|"]
    missed = list[str]()
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | failed: {row['error'].splitlines()[0][:120]} | {_wanted(row)} | no | | |")
            continue
        alone = f"{row['bytes_us'] / 1e3:.2f} ms" if "bytes_us" in row else ""
        gain = "" if row["gain"] is None else f"; {_beside(row)}"
        short = f"; {row['short']}" if row.get("short") else ""
        reached = f"{row['value']:.3g} {row['unit']}{gain}{short}"
        met = "" if row["target"] is None else "yes" if row["met"] else "no"
        lines.append(f"| {row['name']} | {reached} | {_wanted(row)} | {met} | {row['median_us'] / 1e3:.2f} ms | {alone} |")
        longest = row.get("kernels", {}).get("longest", [])
        if met == "no" and longest:
            total = row["kernels"]["us"]
            parts = (f"{each['kernel'][:48]} {each['us'] / total:.0%} ({each['launches']})" for each in longest[:6])
            missed.append(
                f"- {row['name']}, {total / 1e3:.2f} ms of {row['kernels']['launches']} launches: {'; '.join(parts)}."
            )
    return "\n".join([*lines, "", *missed])


def _beside(row: dict[str, Any]) -> str:
    """A peer that has several kernels is told of twice: its better mode, and the fastest of all."""
    fastest = row.get("beside_its_fastest_kernel")
    return f"{row['gain']:.2f}x {row['peer']['name']}" + ("" if fastest is None else f", {fastest:.2f}x its fastest kernel")


def _wanted(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return "reported"
    gain = f", {row['gain_target']:g}x" if row.get("gain_target") else ""
    return f"{'at most' if row.get('at_most') else 'at least'} {row['target']:.3g}{gain}"


def write_page(result: dict[str, Any], page: Path) -> None:
    """Replace what stands between a page's marks. BadRequest where it has none."""
    before, _, rest = page.read_text().partition(f"{MARK}\n")
    _, end, after = rest.partition(MARK_END)
    if not end:
        raise BadRequest(f"{page} has no {MARK} and {MARK_END}", param="doc")
    page.write_text(f"{before}{MARK}\n{markdown(result)}\n{end}{after}")


def plot(result: dict[str, Any], path: Path) -> bool:
    """Each row over its target, as bars; the file's ending says what it is (.png, .svg). False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in result["rows"] if "error" not in row and row["target"] is not None]
    figure = Figure(figsize=(9, 1.2 + 0.34 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    reached = [row["target"] / row["value"] if row["at_most"] else row["value"] / row["target"] for row in rows]
    colours = ["lightskyblue" if row["met"] else "sandybrown" for row in rows]
    panel.barh([row["name"] for row in rows], reached, color=colours)
    for place, row in enumerate(rows):
        panel.text(0.02, place, f"{row['value']:.2f} {row['unit']}", va="center", fontsize=7)
    panel.axvline(1.0, color="black", linewidth=1)
    panel.invert_yaxis()
    panel.tick_params(labelsize=7)
    panel.set_xlabel("reached, over what was wanted", fontsize=8)
    copy = result["ceilings"]["copy"]["value"]
    figure.suptitle(f"{result['device']}, {result['date'][:10]}, copy {copy:.2f} TB/s", fontsize=9)
    figure.savefig(path, dpi=150)
    return True
