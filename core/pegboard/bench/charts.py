"""Charts as inline SVG: axes with ticks, lines, areas, bars. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

WIDTH, HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 14, 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        label: what it shows, and its unit.
        low, high: values at its ends.
        ticks: values with their texts.
        logarithmic: equal steps are equal ratios.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; values beyond are at the ends."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(label: str, high: float) -> Axis:
    """From 0 to the next round number."""
    high = high if high > 0 else 1.0
    rough = high / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    count = math.ceil(high / step * 0.999)
    ticks = tuple((step * index, f"{step * index:,.10g}") for index in range(count + 1))
    return Axis(label, 0.0, step * count, ticks)


def time_axis(duration_s: float) -> Axis:
    """The whole run, in seconds."""
    rounded = linear_axis("seconds since the start", duration_s)
    high = duration_s or 1.0
    return Axis(rounded.label, 0.0, high, tuple(tick for tick in rounded.ticks if tick[0] <= high))


def logarithmic_axis(label: str, low: float, high: float) -> Axis:
    """From and to a 1, 2 or 5 with zeros."""
    marks = [m * 10.0**e for e in range(-6, 10) for m in (1, 2, 5)]
    first = max((mark for mark in marks if mark <= low), default=marks[0])
    last = min((mark for mark in marks if mark >= max(high, first * 1.01)), default=marks[-1])
    within = [mark for mark in marks if first <= mark <= last]
    if len(within) > 8:
        within = [mark for mark in within if f"{mark:e}".startswith("1")]
    return Axis(label, first, last, tuple((mark, f"{mark:,.10g}") for mark in within), True)


def category_axis(label: str, names: Sequence[str]) -> Axis:
    """A place for each name: that of number i is from i to i + 1."""
    ticks = tuple((index + 0.5, name) for index, name in enumerate(names))
    return Axis(label, 0.0, float(len(names)), ticks)


class Chart:
    """A chart to draw into.

    Args:
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        box = f"0 0 {WIDTH} {HEIGHT}"
        self._svg = ET.Element("svg", {"viewBox": box, "role": "img", "aria-label": title})
        self._draw_axes()

    def line(self, points: Sequence[Point], color: str) -> None:
        """A line through the points."""
        self._add("path", d=f"M{self._path(points)}", **{"class": f"line {color}"})

    def area(self, points: Sequence[Point], color: str) -> None:
        """A line, and the area between it and the bottom."""
        first, last = points[0][0], points[-1][0]
        closed = [(first, 0.0), *points, (last, 0.0)]
        self._add("path", d=f"M{self._path(closed)}Z", **{"class": f"area {color}"})
        self.line(points, color)

    def bar(self, low: float, high: float, value: float, color: str, text: str) -> None:
        """A bar from one place to another, with a text at its top."""
        left, right, top = self._across(low), self._across(high), self._up(value)
        size = {"width": f"{right - left:.1f}", "height": f"{self._up(0.0) - top:.1f}"}
        self._add(
            "rect", x=f"{left:.1f}", y=f"{top:.1f}", rx="2", **size, **{"class": f"bar {color}"}
        )
        self._text((left + right) / 2, top - 4, text, "middle")

    def level(self, value: float, color: str) -> None:
        """A dashed line at a height."""
        self.line([(self._x.low, value), (self._x.high, value)], f"dashed {color}")

    def mark(self, value: float, color: str) -> None:
        """A dashed line at a place from bottom to top."""
        self.line([(value, self._y.low), (value, self._y.high)], f"dashed {color}")

    def svg(self) -> str:
        """The element's text."""
        return ET.tostring(self._svg, encoding="unicode")

    def _draw_axes(self) -> None:
        bottom, left = HEIGHT - _BOTTOM, _LEFT
        for value, text in self._y.ticks:
            height = self._up(value)
            self._add("path", d=f"M{left},{height:.1f}H{WIDTH - _RIGHT}", **{"class": "grid"})
            self._text(left - 6, height + 4, text, "end")
        for value, text in self._x.ticks:
            place = self._across(value)
            self._add("path", d=f"M{place:.1f},{bottom}v4", **{"class": "axis"})
            self._text(place, bottom + 17, text, "middle")
        self._add("path", d=f"M{left},{_TOP}V{bottom}H{WIDTH - _RIGHT}", **{"class": "axis"})
        self._text((left + WIDTH - _RIGHT) / 2, HEIGHT - 6, self._x.label, "middle", "label")
        middle = (_TOP + bottom) / 2
        turned = self._text(0, 0, self._y.label, "middle", "label")
        turned.set("transform", f"translate(12 {middle:.1f}) rotate(-90)")

    def _across(self, value: float) -> float:
        return _LEFT + self._x.place(value) * (WIDTH - _LEFT - _RIGHT)

    def _up(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self._y.place(value) * (HEIGHT - _TOP - _BOTTOM)

    def _path(self, points: Sequence[Point]) -> str:
        return "L".join(f"{self._across(x):.1f},{self._up(y):.1f}" for x, y in points)

    def _text(self, x: float, y: float, text: str, anchor: str, style: str = "tick") -> ET.Element:
        place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": style}
        element = self._add("text", **place)
        element.text = text
        return element

    def _add(self, tag: str, **attributes: str) -> ET.Element:
        return ET.SubElement(self._svg, tag, attributes)
