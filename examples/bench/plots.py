"""Plots as SVG files that stand alone: panels of lines or bars under one legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from pegboard.bench.charts import (
    HEIGHT,
    WIDTH,
    Axis,
    Chart,
    Point,
    category_axis,
    linear_axis,
    logarithmic_axis,
)

COLORS = ("#2f6fb0", "#d1642a", "#3a8f5c", "#8a52a6", "#b03a48", "#7a6a20", "#2b8c99", "#777777")
NUM_COLUMNS = 2
TITLE_HEIGHT, LEGEND_HEIGHT = 22, 28


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Attributes:
        title: above it.
        x, y: its axes.
        lines: name to points; a name has one colour in all panels of a plot.
        bars: name to value, in the order of the x axis's categories.
    """

    title: str
    x: Axis
    y: Axis
    lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    bars: Mapping[str, float] = field(default_factory=dict)


def line_panel(
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, Sequence[Point]],
    *,
    logarithmic: tuple[bool, bool] = (False, False),
    high: float | None = None,
) -> Panel:
    """Lines, with axes that hold them all.

    Args:
        title: of the panel.
        labels: of the x and of the y axis.
        lines: name to points.
        logarithmic: which axes are.
        high: of the y axis, where it is not what the points reach.
    """
    axes = []
    for number, label in enumerate(labels):
        values = [point[number] for points in lines.values() for point in points]
        most = max(values) if high is None or number == 0 else high
        if logarithmic[number]:
            axes.append(logarithmic_axis(label, min(values), most))
        else:
            axes.append(linear_axis(label, most))
    return Panel(title, axes[0], axes[1], lines=lines)


def bar_panel(title: str, label: str, bars: Mapping[str, float]) -> Panel:
    """A bar for each name."""
    high = max(bars.values(), default=0.0)
    return Panel(title, category_axis("", list(bars)), linear_axis(label, high), bars=bars)


def write_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Writes an SVG file of the panels, in rows."""
    names = list(dict.fromkeys(name for panel in panels for name in (*panel.lines, *panel.bars)))
    colors = {name: f"c{number % len(COLORS)}" for number, name in enumerate(names)}
    num_columns = min(NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width, row_height = num_columns * WIDTH, HEIGHT + TITLE_HEIGHT
    height = LEGEND_HEIGHT + num_rows * row_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><style>{_style()}</style>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend([name for name in names if any(name in panel.lines for panel in panels)], colors),
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, num_columns)
        left, top = column * WIDTH, LEGEND_HEIGHT + row * row_height
        parts.append(
            f'<text x="{left + WIDTH / 2:.0f}" y="{top + 14}" text-anchor="middle" '
            f'font-weight="bold">{escape(panel.title)}</text>'
        )
        place = f'<svg x="{left}" y="{top + TITLE_HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(_chart(panel, colors).replace("<svg ", place, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join((*parts, "</svg>\n")))


def _chart(panel: Panel, colors: Mapping[str, str]) -> str:
    chart = Chart(panel.title, panel.x, panel.y)
    for name, points in panel.lines.items():
        chart.line(points, colors[name])
    for number, (name, value) in enumerate(panel.bars.items()):
        chart.bar(number + 0.15, number + 0.85, value, colors[name], f"{value:.3g}")
    return chart.svg()


def _legend(names: Sequence[str], colors: Mapping[str, str]) -> list[str]:
    parts, left = [], 16
    for name in names:
        parts.append(f'<path class="line {colors[name]}" d="M{left},16h20"/>')
        parts.append(f'<text x="{left + 26}" y="20">{escape(name)}</text>')
        left += 44 + 7 * len(name)
    return parts


def _style() -> str:
    rules = [
        ".grid{stroke:#e3e7ec;fill:none}.axis{stroke:#9aa5b1;fill:none}",
        ".tick{fill:#5c6876;font-size:11px}.label{font-size:12px}.line{fill:none;stroke-width:2}",
    ]
    for number, color in enumerate(COLORS):
        rules.append(f".line.c{number}{{stroke:{color}}}.bar.c{number}{{fill:{color}}}")
    return "".join(rules)
