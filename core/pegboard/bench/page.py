"""A result as a page: one file, which loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from pegboard.bench.charts import (
    Chart,
    Point,
    category_axis,
    linear_axis,
    logarithmic_axis,
    time_axis,
)
from pegboard.bench.summary import (
    NAMES,
    facts,
    latency_rows,
    load,
    requests,
    statistics_of,
    targets,
)

_COLORS = {"ttft": "c1", "tpot": "c4", "itl": "c2", "e2el": "c3"}
_LEAST_SHOWN = 1e-5
"""Least latency shown, as a part of the longest: gaps of 0 s do not fit a logarithmic axis."""


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        name: its id in the page.
        title: what it shows.
        about: what has to be known to read it.
        legend: colour and meaning.
        svg: the chart; None: there is nothing to show, and `about` says why.
    """

    name: str
    title: str
    about: str
    legend: Sequence[tuple[str, str]] = ()
    svg: Markup | None = None


def template(name: str) -> Template:
    """A page's template of `bench` or `eval`, which share parts."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(f"pegboard.{of}", ".") for of in ("bench", "eval")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def page(found: Mapping[str, Any]) -> str:
    """The page of a result of `report.result`."""
    return template("page.html.jinja").render(
        found=found,
        load=load(found),
        requests=requests(found),
        tiles=_tiles(found),
        facts=list(facts(found)),
        columns=statistics_of(found),
        rows=list(latency_rows(found)),
        figures=[
            _latency_figure(found),
            _throughput_figure(found),
            _batch_figure(found),
            _kv_figure(found),
        ],
    )


def _tiles(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers to see first: name, number, unit."""
    tiles = [
        ("output", f"{found['output_throughput']:,.1f}", "tokens/s"),
        ("completed", f"{found['request_throughput']:,.2f}", "requests/s"),
    ]
    if found["request_goodput"] is not None:
        tiles.append(("goodput", f"{found['request_goodput']:,.2f}", "requests/s"))
    for latency in ("ttft", "itl", "e2el"):
        value = found[f"median_{latency}_ms"]
        if value is not None:
            text = f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
            tiles.append((f"p50 {NAMES[latency]}", text, "ms"))
    tiles.append(("failed", str(found["failed"]), f"of {found['num_prompts']}"))
    return tiles


def _latency_figure(found: Mapping[str, Any]) -> Figure:
    seconds = {
        "ttft": [value for value in found["ttfts"] if value is not None],
        "itl": [gap for gaps in found["itls"] for gap in gaps],
        "e2el": [value for value in found["e2els"] if value is not None],
    }
    ms = {name: np.sort(np.array(values)) * 1000 for name, values in seconds.items() if values}
    title = "Latency distributions"
    if not ms:
        return Figure("latency", title, "No request was completed.")
    aims = [found["goodput_targets_ms"][name] for name in ms if name in found["goodput_targets_ms"]]
    longest = max(*(values[-1] for values in ms.values()), *aims)
    shown = np.concatenate([*ms.values(), aims])
    shortest = shown[shown > longest * _LEAST_SHOWN].min(initial=longest)
    x = logarithmic_axis("milliseconds (logarithmic)", float(shortest), float(longest))
    chart = Chart(title, x, linear_axis("share at or below, %", 100))
    legend = []
    for name, values in ms.items():
        chart.line(_shares(values, x.low), _COLORS[name])
        of = f"{len(values):,} {'gaps' if name == 'itl' else 'requests'}"
        legend.append((_COLORS[name], f"{NAMES[name]} ({of})"))
        if name in found["goodput_targets_ms"]:
            chart.mark(found["goodput_targets_ms"][name], _COLORS[name])
    about = "The share that took at most so long."
    if found["goodput_targets_ms"]:
        about += f" Dashed: the targets, {targets(found)}."
    return Figure("latency", title, about, legend, Markup(chart.svg()))


def _shares(values: Any, least: float) -> list[Point]:
    """The cumulative distribution of sorted values, in at most a few hundred points."""
    shares = np.unique(np.concatenate((np.linspace(0, 100, 201), [99.5, 99.9, 99.99])))
    points = np.percentile(values, shares, method="inverted_cdf")
    steps: list[Point] = []
    for value, share in zip(points.tolist(), shares.tolist(), strict=True):
        place = max(value, least)
        steps += [(place, steps[-1][1] if steps else 0.0), (place, share)]
    return steps


def _throughput_figure(found: Mapping[str, Any]) -> Figure:
    series, title = found["output_tokens_per_s"], "Throughput over time"
    rates, width = series["rates"], series["bin_s"]
    if not any(rates):
        return Figure("throughput", title, "No token came.")
    mean = found["output_throughput"]
    y = linear_axis("output tokens/s", max(*rates, mean))
    chart = Chart(title, time_axis(found["duration"]), y)
    steps = [
        point
        for index, rate in enumerate(rates)
        for point in ((index * width, rate), ((index + 1) * width, rate))
    ]
    chart.area(steps, "c1")
    chart.level(mean, "c2")
    legend = [("c1", f"in each {width:.2g} s"), ("c2 dashed", f"completed, mean {mean:,.1f}")]
    about = "Output tokens of all requests, as they arrived."
    return Figure("throughput", title, about, legend, Markup(chart.svg()))


def _batch_figure(found: Mapping[str, Any]) -> Figure:
    histogram, title = found["batch_sizes"], "Batch sizes"
    if histogram is None:
        return Figure("batch-size", title, _NO_METRICS)
    bins = histogram["bins"]
    while len(bins) > 1 and not bins[-1][2]:
        bins = bins[:-1]
    total = sum(count for _, _, count in bins)
    shares = [100 * count / total for _, _, count in bins]
    names = [_bin_name(low, high) for low, high, _ in bins]
    sampled = histogram["of"] == "samples"
    x = category_axis("running requests" if sampled else "sequences in a step", names)
    chart = Chart(title, x, linear_axis(f"share of {histogram['of']}, %", max(shares) * 1.08))
    for index, share in enumerate(shares):
        text = f"{share:.0f}" if share >= 1 or not share else "<1"
        chart.bar(index + 0.08, index + 0.92, share, "c3", text)
    about = (
        "How many requests ran, whenever the server was asked."
        if sampled
        else ("How many sequences the engine computed together, by its own count.")
    )
    legend = [("c3", f"{total:,.0f} {histogram['of']}")]
    return Figure("batch-size", title, about, legend, Markup(chart.svg()))


def _bin_name(low: int, high: int | None) -> str:
    if high is None:
        return f"≥{low}"
    return str(low) if low == high else f"{low}–{high}"


def _kv_figure(found: Mapping[str, Any]) -> Figure:
    points = [(at["time"], 100 * at["usage"]) for at in found["kv_cache_usage"]]
    title = "KV use"
    if not points:
        return Figure("kv-use", title, _NO_METRICS)
    most = max(usage for _, usage in points)
    y = linear_axis("used KV blocks, %", most * 1.05)
    chart = Chart(title, time_axis(found["duration"]), y)
    chart.area([(0.0, points[0][1]), *points, (found["duration"], points[-1][1])], "c4")
    chart.level(most, "c2")
    legend = [("c4", f"{len(points)} looks at the server"), ("c2 dashed", f"most: {most:.3g} %")]
    about = "The used part of the fullest KV pool."
    return Figure("kv-use", title, about, legend, Markup(chart.svg()))


_NO_METRICS = "The server's /metrics told nothing of this during the run."
