"""Numbers read out of `/metrics`: ours, vLLM's, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pegboard.bench import server_metrics
from pegboard.bench.server_metrics import Drafts, MetricsWatch, Watched


def watched(texts: Sequence[str | None]) -> Watched:
    """A watch's summary of these answers, a look each; None: there is no `/metrics`."""
    answers = iter(texts)

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/metrics"
        text = next(answers)
        return httpx.Response(404) if text is None else httpx.Response(200, text=text)

    async def run() -> Watched:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://server"
        ) as http:
            watch = MetricsWatch(http)
            for _ in texts:
                await watch.look()
                await asyncio.sleep(0.002)
            return watch.result(0.0, float("inf"))

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def fine_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "PERIOD_S", 0.001)


class Engine:
    """Makes a server's metrics with the library that servers make them with."""

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        bounds = (1, 2, 4, 8)
        self.steps = Histogram(
            f"{prefix}step_sequences", "-", ("engine",), buckets=bounds, registry=self.registry
        )
        self.running = Gauge(f"{prefix}num_requests_running", "-", registry=self.registry)
        self.kv = Gauge(f"{prefix}kv_cache_usage_perc", "-", registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def test_batch_sizes_are_those_of_the_steps_between_the_first_look_and_the_last() -> None:
    engine = Engine("pegboard_")
    for size in (1, 1, 8):
        engine.steps.labels("0").observe(size)
    texts = [engine.text()]
    for size in (1, 2, 3, 4, 4, 9, 100):
        engine.steps.labels("0").observe(size)
        texts.append(engine.text())
    histogram = watched(texts).batch_sizes
    assert histogram is not None
    assert histogram.of == "steps"
    assert histogram.bins == ((1, 1, 1), (2, 2, 1), (3, 4, 3), (5, 8, 0), (9, None, 2))


def test_gauges_are_series_over_time() -> None:
    engine, texts = Engine("pegboard_"), []
    for running, use in ((0, 0.0), (3, 0.25), (5, 0.5)):
        engine.running.set(running)
        engine.kv.set(use)
        texts.append(engine.text())
    found = watched(texts)
    assert [value for _, value in found.kv_use] == [0.0, 0.25, 0.5]
    assert [value for _, value in found.running] == [0.0, 3.0, 5.0]
    times = [when for when, _ in found.kv_use]
    assert times == sorted(times)


def test_where_an_engine_counts_no_steps_its_running_requests_are_sampled() -> None:
    texts = [f'vllm:num_requests_running{{engine="0"}} {n}\n' for n in (0, 1, 2, 3, 4, 9)]
    histogram = watched(texts).batch_sizes
    assert histogram is not None
    assert histogram.of == "samples"
    assert histogram.bins == ((1, 1, 1), (2, 2, 1), (3, 4, 2), (5, 8, 0), (9, 16, 1))


@pytest.mark.parametrize("prefix", ["pegboard_", "vllm:"])
def test_drafts_are_those_between_the_first_look_and_the_last(prefix: str) -> None:
    registry = CollectorRegistry()

    def counter(name: str, *labels: str) -> Counter:
        return Counter(f"{prefix}spec_decode_{name}", "-", ("engine", *labels), registry=registry)

    drafts, tokens = counter("num_drafts"), counter("num_draft_tokens")
    accepted = counter("num_accepted_tokens")
    at = counter("num_accepted_tokens_per_pos", "position")

    def draft(num_tokens: int, num_accepted: int) -> str:
        drafts.labels("0").inc()
        tokens.labels("0").inc(num_tokens)
        accepted.labels("0").inc(num_accepted)
        for position in range(12):
            at.labels("0", str(position)).inc(position < num_accepted)
        return generate_latest(registry).decode()

    texts = [draft(12, 12), draft(12, 11), draft(4, 1), draft(4, 0), draft(4, 1)]
    rates = (0.75, *[0.25] * 10, 0.0)
    assert watched(texts).drafts == Drafts(4, 24, 13, rates)


@pytest.mark.parametrize("text", [None, "", "other_metric 1\n"])
def test_a_server_that_tells_nothing_leaves_nothing(text: str | None) -> None:
    assert watched([text, text]) == Watched()
