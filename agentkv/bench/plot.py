"""A line chart with error bars as SVG text, without any library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
WIDTH, HEIGHT, LEFT, TOP = 300, 180, 46, 28


@dataclass(frozen=True)
class Line:
    """One line: its name and for each place of the axis (value, low, high) between 0 and 1, or None where there is none."""

    name: str
    points: tuple[tuple[float, float, float] | None, ...]


@dataclass(frozen=True)
class Panel:
    """One chart: a title, the names along the axis, and its lines."""

    title: str
    axis: tuple[str, ...]
    lines: tuple[Line, ...]


def svg(panels: Sequence[Panel], across: int, below: str, note: str = "") -> str:
    """Panels in rows of `across`, with one legend and a note behind it; `below` names the horizontal axis."""
    rows = -(-len(panels) // across)
    wide, high = WIDTH + LEFT + 20, HEIGHT + TOP + 44
    names = [line.name for line in panels[0].lines]
    size = f'width="{across * wide}" height="{rows * high + 30}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % across * wide + LEFT},{i // across * high + TOP})">')
        parts += [
            *_frame(panel, below),
            *(mark for j, line in enumerate(panel.lines) for mark in _line(line, panel, j)),
            "</g>",
        ]
    for j, name in enumerate(names):
        x, y = LEFT + j * 150, rows * high + 16
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[j % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{escape(name)}</text>')
    if note:
        parts.append(f'<text x="{LEFT + len(names) * 150}" y="{rows * high + 16}" fill="#555">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(panel: Panel, i: int) -> float:
    return (i + 0.5) * WIDTH / len(panel.axis)


def _frame(panel: Panel, below: str) -> list[str]:
    parts = [f'<text x="{WIDTH / 2}" y="-10" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>']
    for tick in (0, 25, 50, 75, 100):
        y = HEIGHT * (1 - tick / 100)
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4}" text-anchor="end">{tick} %</text>')
    for i, name in enumerate(panel.axis):
        parts.append(f'<text x="{_x(panel, i):.1f}" y="{HEIGHT + 15}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 31}" text-anchor="middle" fill="#555">{escape(below)}</text>')
    return parts


def _line(line: Line, panel: Panel, number: int) -> list[str]:
    colour, parts, path = COLOURS[number % len(COLOURS)], [], []
    for i, point in enumerate(line.points):
        if point is None:
            continue
        x = _x(panel, i) + 3 * (number - (len(panel.lines) - 1) / 2)  # side by side, so that equal lines stay visible
        y, low, high = (HEIGHT * (1 - value) for value in point)
        path.append(f"{x:.1f},{y:.1f}")
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    return [f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}"/>', *parts]
