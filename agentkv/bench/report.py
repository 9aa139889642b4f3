"""An engine benchmark for people: a table for the terminal, a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentkv.errors import BadRequest

LABELS = {
    "prefill": "prefill",
    "decode": "decode",
    "end_to_end": "end to end",
    "prefill_cpu": "prefill, CPU s",
    "decode_cpu": "decode, CPU s",
}
"""Rates for people; the last two are tokens by second of processor time."""


def table(result: dict[str, Any]) -> str:
    """Median rates of both sides in tokens a second, median ratios, and each pair's ratio."""
    what = f"{result['model']}, {result['parameters'] / 1e6:.1f}M parameters, {result['dtype']}"
    lines = [f"{what}, {result['threads']} threads, {result['device']}, load {result['load']}"]
    for name, work in result["workloads"].items():
        lines.append(f"\n{name}: {work['sequences']} x {work['prompt_tokens']} prompt tokens, {work['new_tokens']} new")
        lines.append(f"  {'tok/s, median':14}{'agentkv':>10}{result['peer'][:14]:>16}{'ratio':>8}  each")
        for rate in work["ratio"]:
            mine, theirs = (work["medians"][side][rate] for side in ("agentkv", result["peer"]))
            each = " ".join(f"{ratio:.2f}" for ratio in work["ratios"][rate])
            lines.append(f"  {LABELS[rate]:14}{mine:>10.1f}{theirs:>16.1f}{work['ratio'][rate]:>8.2f}  {each}")
        lines.append(f"  same answers: {work['equal_answers']}")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Every run's rates as points over bars of the medians, a panel for each workload and rate.

    BadRequest without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequest("a plot needs matplotlib", hint="pip install 'agentkv[bench]'", param="plot") from None
    works, sides = result["workloads"], ("agentkv", result["peer"])
    rates = list(next(iter(works.values()))["ratio"])
    figure = Figure(figsize=(3.2 * len(rates), 3 * len(works)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(works), len(rates), squeeze=False)
    for line, (name, work) in zip(panels, works.items(), strict=True):
        for panel, rate in zip(line, rates, strict=True):
            panel.bar(sides, [work["medians"][side][rate] for side in sides], color=["tab:blue", "lightgray"])
            for index, side in enumerate(sides):
                values = [run[rate] for run in work["runs"][side]]
                panel.plot([index] * len(values), values, "k.", markersize=4)
            panel.set_title(f"{name}, {LABELS[rate]}: {work['ratio'][rate]:.2f}x", fontsize=9)
            panel.set_ylabel("tokens a second", fontsize=8)
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['threads']} threads, {result['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=150)
