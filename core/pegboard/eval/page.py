"""A result as a page: one file, which loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from pegboard.bench.charts import WIDTH, Axis, Chart, linear_axis
from pegboard.bench.page import Figure, template
from pegboard.eval.report import Result
from pegboard.eval.summary import difference_rows, lead, side_rows

_TICKS = WIDTH // 40
"""Layers that have a number under them, where there are many."""


def page(result: Result) -> str:
    """The page."""
    figures = [] if result.quality.divergence is None else [_layer_figure(result)]
    return template("eval_page.html.jinja").render(
        result=result,
        lead=lead(result.text, result.quality.num_tokens),
        sides=list(side_rows(result)),
        differences=list(difference_rows(result)),
        figures=figures,
    )


def _layer_figure(result: Result) -> Figure:
    assert result.quality.divergence is not None
    errors, title = result.quality.divergence.layer_errors, "Error by layer"
    if not errors:
        return Figure("layers", title, "The models' sizes differ: their layers cannot be compared.")
    *hidden, logits = errors
    percent = [100 * error for error in hidden]
    finite = [value for value in (*percent, 100 * logits) if value < float("inf")]
    y = linear_axis("mean relative error, %", 1.05 * max(finite, default=1.0))
    chart = Chart(title, _layer_axis(len(hidden)), y)
    chart.area([(float(layer), error) for layer, error in enumerate(percent)], "c1")
    chart.level(100 * logits, "c2")
    about = (
        "The mean over tokens of |A - B| / |B|, of the hidden states at the input of each decoder layer."
        " At that of layer 0 it is the embedding's."
    )
    legend = [("c1", "hidden states"), ("c2 dashed", f"logits: {100 * logits:.3g} %")]
    return Figure("layers", title, about, legend, Markup(chart.svg()))


def _layer_axis(num_layers: int) -> Axis:
    step = -(-num_layers // _TICKS)
    numbers: Sequence[int] = range(0, num_layers, step)
    ticks = tuple((float(number), str(number)) for number in numbers)
    return Axis("decoder layer", 0.0, float(max(1, num_layers - 1)), ticks)
