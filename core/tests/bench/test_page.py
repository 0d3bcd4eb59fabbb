"""The page of a result: whole, alone, and safe whatever a server says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from pegboard.bench.charts import linear_axis, logarithmic_axis
from pegboard.bench.exchange import Record
from pegboard.bench.page import page
from pegboard.bench.report import Measured, result
from pegboard.bench.server_metrics import Drafts, Histogram, Watched

SETTINGS = {
    "date": "20260101-000000",
    "pegboard_version": "0.1.0",
    "base_url": "http://127.0.0.1:1",
    "model_id": "<script>alert(1)</script>",
    "num_prompts": 4,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "input_len": "32 to 64",
    "output_len": "8",
    "dataset": None,
    "seed": 0,
}
WATCHED = Watched(
    kv_use=((0.5, 0.1), (1.5, 0.2)),
    batch_sizes=Histogram("steps", ((1, 1, 30), (2, 2, 10), (3, None, 0))),
)
FIGURES = {
    "latency": ("milliseconds (logarithmic)", "share at or below, %"),
    "throughput": ("seconds since the start", "output tokens/s"),
    "batch-size": ("sequences in a step", "share of steps, %"),
    "kv-use": ("seconds since the start", "used KV blocks, %"),
}


class Outline(HTMLParser):
    """The texts of each figure's chart, the page's tags, and whether all are closed."""

    VOID = ("meta", "br", "link", "img", "path", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.tags: set[str] = set()
        self.open: list[str] = []
        self._figure: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "figure":
            self._figure = dict(attrs)["id"] or ""
            self.texts[self._figure] = []

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._figure is not None and "svg" in self.open:
            self.texts[self._figure].append(data)


def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def found(watched: Watched = WATCHED, *, answers: bool = True) -> dict[str, Any]:
    times: list[tuple[float, int | None]] = [(0.4, 1), (0.5, 1), (0.5, 1), (0.7, 1)]
    record = Record(b"", 4, 0.1, 0.1, 0.7, times, 40, 4, "completed")
    failed = Record(b"", 4, 0.2, 0.2, 0.3)
    failed.fail("HTTP 500", "<b>no & yes</b>")
    records = [record, failed] if answers else [failed]
    return result(Measured(SETTINGS, records, 2.0, watched, {"ttft": 500.0}, (50.0, 99.0)))


def test_all_four_plots_have_axes_with_units_and_ticks() -> None:
    charts = outline(page(found())).texts
    assert list(charts) == list(FIGURES)
    for name, labels in FIGURES.items():
        assert set(labels) <= set(charts[name]), name
        assert len(charts[name]) >= 6, name


def test_drafts_are_told_where_there_were_some() -> None:
    drafts = Drafts(4, 12, 6, (1.0, 0.5, 0.0), tokens_per_step=2.2, chosen=2.4)
    text = page(found(Watched(drafts=drafts)))
    assert "4 verified, of 3.00 tokens (mean); 2.40 a step and sequence, which gave 2.20" in text
    assert "100 50 0 % of drafts" in text
    of_vllm = page(found(Watched(drafts=Drafts(4, 12, 6, ()))))
    assert "4 verified, of 3.00 tokens (mean)" in of_vllm and "which gave" not in of_vllm
    assert "verified, of" not in page(found())


def test_the_table_has_every_statistic_of_every_latency() -> None:
    table = re.search(r'<table id="latencies".*?</table>', page(found()), re.DOTALL)
    assert table
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table[0].split("<tr>")[1:]]
    assert rows == [
        ["", "TTFT", "TPOT", "ITL", "end to end"],
        ["mean", "300.0", "100.0", "100.0", "600.0"],
        ["p50", "300.0", "100.0", "100.0", "600.0"],
        ["p99", "300.0", "100.0", "198.0", "600.0"],
        ["max", "300.0", "100.0", "200.0", "600.0"],
    ]


def test_the_page_loads_nothing() -> None:
    text = page(found())
    assert not re.search(r"\b(?:src|href)=|url\(|@import", text)
    assert "script" not in outline(text).tags


def test_what_a_server_says_is_shown_and_not_run() -> None:
    text = page(found())
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "1 × HTTP 500" in text
    assert "&lt;b&gt;no &amp; yes&lt;/b&gt;" in text


def test_without_metrics_the_page_says_so_where_the_plots_would_be() -> None:
    text = page(found(Watched()))
    assert text.count("/metrics told nothing") == 2
    charts = outline(text).texts
    assert charts["kv-use"] == charts["batch-size"] == []
    assert charts["latency"]


def test_a_run_of_failures_alone_still_makes_a_page() -> None:
    text = page(found(Watched(), answers=False))
    assert "No request was completed." in text
    assert list(outline(text).texts) == list(FIGURES)


@pytest.mark.parametrize("high", [1e-4, 0.9, 1, 3, 7.3, 10, 99, 101, 12_345.6, 0])
def test_linear_ticks_cover_all_and_are_few(high: float) -> None:
    axis = linear_axis("x", high)
    assert axis.high >= high * 0.99
    assert axis.high <= 2 * high or high == 0
    assert 3 <= len(axis.ticks) <= 6
    assert [float(text.replace(",", "")) for _, text in axis.ticks] == pytest.approx(
        [value for value, _ in axis.ticks]
    )


@pytest.mark.parametrize(("low", "high"), [(3, 3), (1, 10), (0.02, 70), (0.001, 1e6), (9, 11)])
def test_logarithmic_ticks_cover_all_and_equal_ratios_are_equal_steps(
    low: float, high: float
) -> None:
    axis = logarithmic_axis("x", low, high)
    assert axis.low <= low <= high <= axis.high
    assert 2 <= len(axis.ticks) <= 10
    middle = (axis.low * axis.high) ** 0.5
    assert axis.place(middle) == pytest.approx(0.5)
