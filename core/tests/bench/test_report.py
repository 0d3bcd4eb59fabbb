"""The numbers of made-up runs, against the standard library and counting by hand."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from typing import Any

import pytest

from pegboard.bench.exchange import Record
from pegboard.bench.report import Measured, output_rates, result
from pegboard.bench.server_metrics import Watched

PERCENTILES = (1.0, 50.0, 99.0, 99.9)


def completed(
    scheduled: float, sent: float, *chunks: tuple[float, int | None], **more: Any
) -> Record:
    counts = [1 if count is None else count for _, count in chunks]
    values = {"num_input_tokens": 10, "num_output_tokens": sum(counts), **more}
    return Record(
        b"",
        sum(counts),
        scheduled,
        sent=sent,
        ended=chunks[-1][0],
        chunks=list(chunks),
        state="completed",
        **values,
    )


def measured(records: list[Record], duration_s: float = 10.0, **goodput: float) -> Measured:
    return Measured({}, records, duration_s, Watched(), goodput, PERCENTILES)


def many(count: int) -> list[Record]:
    """Requests with one token a chunk, at times that a seed makes."""
    draw = random.Random(3)
    records = []
    for _ in range(count):
        scheduled = draw.uniform(0, 5)
        times = [scheduled + draw.uniform(0.1, 2)]
        times += [times[0] + sum(draw.expovariate(20) for _ in range(n)) for n in (1, 2, 3)]
        chunks = [(when, 1) for when in sorted(times)]
        records.append(completed(scheduled, scheduled + draw.uniform(0, 0.1), *chunks))
    return records


def test_latencies_count_from_the_scheduled_time() -> None:
    record = completed(1.0, 3.0, (4.0, 1), (4.5, 1), (6.0, 1))
    found = result(measured([record]))
    assert found["ttfts"] == [3.0]
    assert found["itls"] == [[0.5, 1.5]]
    assert found["e2els"] == [5.0]
    assert found["mean_tpot_ms"] == 1000.0
    assert (found["scheduled_times"], found["start_times"]) == ([1.0], [3.0])
    assert found["max_send_delay_ms"] == 2000.0


@pytest.mark.parametrize("latency", ["ttft", "itl", "e2el", "tpot"])
def test_statistics_are_those_of_the_standard_library(latency: str) -> None:
    records = many(999)
    found = result(measured(records))
    values = {
        "ttft": [r.chunks[0][0] - r.scheduled for r in records],
        "e2el": [r.chunks[-1][0] - r.scheduled for r in records],
        "itl": [b[0] - a[0] for r in records for a, b in pairwise(r.chunks)],
        "tpot": [(r.chunks[-1][0] - r.chunks[0][0]) / 3 for r in records],
    }[latency]
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    expected = {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "max": max(values),
        "p1": cuts[9],
        "p50": cuts[499],
        "p99": cuts[989],
        "p99.9": cuts[998],
    }
    for name, seconds in expected.items():
        assert found[f"{name}_{latency}_ms"] == pytest.approx(seconds * 1000), name


def test_throughput_is_of_what_was_completed_in_the_runs_time() -> None:
    half = Record(b"", 9, 0.0, sent=0.0, chunks=[(1.0, 1)], state="open")
    found = result(measured([*many(20), half], duration_s=8.0))
    assert (found["completed"], found["open"]) == (20, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (200, 80)
    assert found["request_throughput"] == 20 / 8
    assert found["output_throughput"] == 80 / 8
    assert found["total_token_throughput"] == 280 / 8


def test_goodput_counts_requests_that_keep_to_every_target() -> None:
    records = many(300)

    def good(record: Record) -> bool:
        times = [when for when, _ in record.chunks]
        worst = max(after - before for before, after in pairwise(times))
        return times[0] - record.scheduled <= 0.9 and worst <= 0.1

    expected = sum(map(good, records))
    assert 0 < expected < 300
    found = result(measured(records, ttft=900.0, itl=100.0))
    assert found["request_goodput"] == pytest.approx(expected / 10)
    assert result(measured(records))["request_goodput"] is None


def test_tokens_of_one_chunk_arrive_together() -> None:
    record = completed(0.0, 0.0, (1.0, 2), (1.5, 3))
    found = result(measured([record]))
    assert found["itls"] == [[0.0, 0.5, 0.0, 0.0]]
    assert found["itl_per"] == "token"
    assert found["mean_tpot_ms"] == pytest.approx(found["mean_itl_ms"]) == 125.0


def test_chunks_of_unknown_size_are_said_to_be_what_is_measured() -> None:
    record = completed(0.0, 0.0, (1.0, None), (1.5, None), num_output_tokens=5)
    found = result(measured([record]))
    assert (found["itl_per"], found["itls"]) == ("chunk", [[0.5]])
    assert found["output_lens"] == [5]
    assert found["mean_tpot_ms"] == 125.0


def test_chunks_are_tokens_where_there_are_as_many() -> None:
    record = completed(0.0, 0.0, (1.0, None), (1.5, None))
    assert result(measured([record]))["itl_per"] == "token"


def test_failures_are_counted_by_kind_and_stay_in_the_lists() -> None:
    records = many(3)
    for kind in ("HTTP 503", "timeout", "HTTP 503"):
        record = Record(b"", 5, 0.0, sent=0.0, ended=1.0)
        record.fail(kind, f"said\n of {kind}")
        records.insert(1, record)
    found = result(measured(records))
    assert (found["completed"], found["failed"]) == (3, 3)
    assert list(found["failures"]) == ["HTTP 503", "timeout"]
    assert found["failures"]["HTTP 503"] == {"count": 2, "message": "said of HTTP 503"}
    assert found["ttfts"][1:4] == [None] * 3
    assert found["errors"][1:4] == [
        f"{k}: said of {k}" for k in ("HTTP 503", "timeout", "HTTP 503")
    ]
    assert found["errors"][0] == found["errors"][5] == ""


def test_a_run_without_an_answer_has_no_latencies() -> None:
    found = result(measured([Record(b"", 5)]))
    assert found["mean_ttft_ms"] is found["p99_e2el_ms"] is None
    assert found["errors"] == ["interrupted while unsent"]
    assert found["unsent"] == 1


def test_most_at_once_is_counted_moment_by_moment() -> None:
    records = many(60)
    at_once = [
        sum(
            r.sent <= moment < r.ended
            for r in records
            if r.sent is not None and r.ended is not None
        )
        for moment in (r.sent for r in records if r.sent is not None)
    ]
    assert result(measured(records))["max_concurrent_requests"] == max(at_once)


def test_rates_over_time_add_up_to_all_tokens() -> None:
    records = [*many(50), completed(0.0, 0.0, (2.0, None), (9.99, None), num_output_tokens=7)]
    rates = output_rates(records, 10.0, 40)
    assert len(rates) == 40
    assert sum(rates) * 0.25 == pytest.approx(50 * 4 + 7)
    assert rates[39] * 0.25 == pytest.approx(3.5)
