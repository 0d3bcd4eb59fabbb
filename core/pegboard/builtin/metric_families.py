"""The metrics that `MetricsObserver` keeps: of requests, and of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pegboard.interfaces.observer import (
    GUARDED_PARTS,
    BlocksNamed,
    BreakerChanged,
    LoadChanged,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
    kv_usage,
)
from pegboard.request import FinishReason

PREFIX = "pegboard_"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_PHASE = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 5.0, 30.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FEW = (1, 2, 5, 10, 20)

LABELS = ("model_name", "engine")
_BLOCK_STATES = ("free", "held", "cached", "pinned", "reserved", "deferred")


class MetricMaker:
    """Makes metrics that carry the labels `model_name` and `engine`."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self.labels = (model, "0")

    def counter(self, name: str, text: str, more: Sequence[str] = ()) -> Counter:
        made = Counter(f"{PREFIX}{name}", text, (*LABELS, *more), registry=self._registry)
        return made if more else made.labels(*self.labels)

    def gauge(self, name: str, text: str, more: Sequence[str] = ()) -> Gauge:
        made = Gauge(f"{PREFIX}{name}", text, (*LABELS, *more), registry=self._registry)
        return made if more else made.labels(*self.labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], more: Sequence[str] = ()
    ) -> Histogram:
        made = Histogram(
            f"{PREFIX}{name}", text, (*LABELS, *more), buckets=buckets, registry=self._registry
        )
        return made if more else made.labels(*self.labels)

    def token_histogram(self, name: str, text: str, buckets: Sequence[float]) -> TokenHistogram:
        made = TokenHistogram(f"{PREFIX}{name}", text, self.labels, buckets)
        self._registry.register(made)
        return made

    def own(self, collector: Collector) -> None:
        """Takes metrics that are worked out when somebody looks."""
        self._registry.register(collector)


class TokenHistogram(Collector):
    """A histogram of something that each token brings: it takes those of a step at once, as one call
    a token would be the most of a step's bookkeeping."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = np.array(buckets, dtype=np.float64)
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe_all(self, values: Sequence[float]) -> None:
        """Counts each value in the first bucket whose bound it does not exceed."""
        found = self._bounds.searchsorted(values)
        self._counts += np.bincount(found, minlength=len(self._counts))
        self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        bounds = [*map(repr, self._bounds.tolist()), "+Inf"]
        so_far = self._counts.cumsum().tolist()
        family.add_metric(self._labels, list(zip(bounds, so_far, strict=True)), self._sum)
        yield family


@dataclass(slots=True)
class _Open:
    """A request whose sequences have not all ended."""

    num_sequences: int
    most_tokens: int = 0
    aborted: bool = False


class RequestMetrics:
    """Metrics of requests, counted when one arrives and when its sequences end."""

    def __init__(self, make: MetricMaker, context: ObserverContext) -> None:
        tokens = _one_two_five(context.max_model_len or 2**20)
        self._open: dict[str, _Open] = {}
        success = make.counter("request_success", "Ended sequences", ("finished_reason",))
        # Made at once: a rate over a series that was not there before its first end misses it.
        self._success = {
            reason: success.labels(*make.labels, reason) for reason in get_args(FinishReason)
        }
        self._aborted = make.counter("aborted_requests", "Requests whose caller went")
        self._params_n = make.histogram("request_params_n", "Sequences a request", _FEW)
        self._params_max_tokens = make.histogram(
            "request_params_max_tokens", "Most tokens that a request lets a sequence have", tokens
        )
        self._prompt = make.histogram("request_prompt_tokens", "Prompt's length", tokens)
        self._output = make.histogram("request_generation_tokens", "Tokens generated", tokens)
        self._most_output = make.histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sequence", tokens
        )
        self._computed = make.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that no cache had", tokens
        )
        self._preemptions = make.histogram(
            "request_num_preemptions", "Preemptions of a sequence", (0, *_FEW)
        )
        self._latency = {
            name: make.histogram(f"{name}_seconds", text, _LATENCY)
            for name, text in (
                ("e2e_request_latency", "Arrival to end"),
                ("request_queue_time", "Arrival to admission"),
                ("request_prefill_time", "Admission to first token"),
                ("request_decode_time", "First token to end"),
                ("request_inference_time", "Admission to end"),
            )
        }
        self._per_token = make.histogram(
            "request_time_per_output_token_seconds", "Mean over a sequence", _INTER_TOKEN
        )

    def arrived(self, event: RequestArrived) -> None:
        self._open[event.request_id] = _Open(event.num_sequences)
        self._params_n.observe(event.num_sequences)
        self._params_max_tokens.observe(event.max_tokens)

    def finished(self, event: SequenceFinished) -> None:
        self._success[event.reason].inc()
        self._prompt.observe(event.num_prompt_tokens)
        self._output.observe(event.num_output_tokens)
        self._preemptions.observe(event.num_preemptions)
        self._observe_times(event)
        if event.first_token is not None:
            self._computed.observe(event.num_prompt_tokens - event.num_cached_tokens)
        self._close(event)

    def forget_open(self) -> None:
        """Requests that have arrived are counted by their sequences alone."""
        self._open.clear()

    def _close(self, event: SequenceFinished) -> None:
        """Counts the request with its last sequence."""
        opened = self._open.get(event.request_id)
        if opened is None:
            return
        opened.num_sequences -= 1
        opened.most_tokens = max(opened.most_tokens, event.num_output_tokens)
        opened.aborted |= event.reason == "abort"
        if not opened.num_sequences:
            del self._open[event.request_id]
            self._most_output.observe(opened.most_tokens)
            self._aborted.inc(opened.aborted)

    def _observe_times(self, event: SequenceFinished) -> None:
        self._latency["e2e_request_latency"].observe(event.finished - event.arrival)
        if event.admitted is None:
            return
        self._latency["request_queue_time"].observe(event.admitted - event.arrival)
        self._latency["request_inference_time"].observe(event.finished - event.admitted)
        if event.first_token is None:
            return
        self._latency["request_prefill_time"].observe(event.first_token - event.admitted)
        decoding = event.finished - event.first_token
        self._latency["request_decode_time"].observe(decoding)
        if event.num_output_tokens > 1:
            self._per_token.observe(decoding / (event.num_output_tokens - 1))


class StepMetrics:
    """Metrics of steps."""

    def __init__(self, make: MetricMaker, context: ObserverContext) -> None:
        self._labels = make.labels
        self._caches_prefixes = context.caches_prefixes
        self._running = make.gauge("num_requests_running", "Sequences that run")
        self._waiting = make.gauge("num_requests_waiting", "Sequences that wait")
        self._usage = make.gauge("kv_cache_usage_perc", "Used part of the fullest KV group, 0 to 1")
        self._blocks = make.gauge("kv_pages", "KV blocks by what they are", ("group", "state"))
        self._preemptions = make.counter("num_preemptions", "Preemptions")
        self._prompt = make.counter("prompt_tokens", "Prompt tokens done, once a request")
        self._cached = make.counter("prompt_tokens_cached", "Those of them that a cache had")
        self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up")
        self._hits = make.counter("prefix_cache_hits", "Prompt tokens that a cache had")
        self._stored = make.counter("prefix_cache_pages_stored", "KV blocks that got a name")
        self._evicted = make.counter(
            "prefix_cache_pages_evicted", "KV blocks that lost it to others"
        )
        self._resets = make.counter("prefix_cache_resets", "Times that all names were forgotten")
        self._prefilled = make.counter("prefill_tokens", "Prompt tokens computed, again included")
        self._generated = make.counter("generation_tokens", "Tokens generated")
        self._first = make.histogram("time_to_first_token_seconds", "Since arrival", _TTFT)
        self._next = make.token_histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence", _INTER_TOKEN
        )
        self._tokens = make.histogram("iteration_tokens_total", "Tokens a step", _STEP_TOKENS)
        self._batch = make.histogram("step_sequences", "Sequences computed a step", _BATCH)
        self._seconds = make.histogram("step_seconds", "A step, by phase", _PHASE, ("phase",))

    def done(self, event: StepDone) -> None:
        self.load(event)
        self._preemptions.inc(event.num_preempted)
        self._prompt.inc(event.num_prompt_tokens)
        self._cached.inc(event.num_cached_prompt_tokens)
        if self._caches_prefixes:
            self._queries.inc(event.num_prefix_queries)
            self._hits.inc(event.num_prefix_hits)
        self._prefilled.inc(event.num_prefill_tokens)
        self._generated.inc(event.num_output_tokens)
        for seconds in event.first_token_s:
            self._first.observe(seconds)
        self._next.observe_all(event.inter_token_s)
        self._tokens.observe(event.num_prefill_tokens + event.num_decode_tokens)
        self._batch.observe(event.num_sequences)
        worker = event.forward_s + event.sampling_s + event.drafting_s
        for phase, seconds in (
            ("forward", event.forward_s),
            ("sampling", event.sampling_s),
            ("drafting", event.drafting_s),
            ("host", max(0.0, event.duration_s - worker)),
        ):
            self._seconds.labels(*self._labels, phase).observe(seconds)

    def named(self, event: BlocksNamed) -> None:
        """Counts names that the prefix cache gave and lost."""
        self._stored.inc(len(event.stored))
        self._evicted.inc(len(event.evicted))
        self._resets.inc(event.cleared)

    def load(self, event: StepDone | LoadChanged) -> None:
        """Sets the numbers of running and waiting sequences and of KV blocks."""
        self._running.set(event.num_running)
        self._waiting.set(event.num_waiting)
        self._usage.set(kv_usage(event.kv))
        for group, ledger in enumerate(event.kv):
            for state in _BLOCK_STATES:
                blocks = self._blocks.labels(*self._labels, str(group), state)
                blocks.set(getattr(ledger, state))


class BreakerMetrics:
    """Plugins that are cut off."""

    def __init__(self, make: MetricMaker) -> None:
        trips = make.counter("breaker_trips", "Times that a plugin was cut off", ("part",))
        cut_off = make.gauge("breaker_open", "Plugins that are cut off", ("part",))
        # Made at once, as the first trip is the one to see.
        self._trips = {part: trips.labels(*make.labels, part) for part in GUARDED_PARTS}
        self._num_open = {part: cut_off.labels(*make.labels, part) for part in GUARDED_PARTS}
        self._open: set[tuple[str, str]] = set()

    def changed(self, event: BreakerChanged) -> None:
        part, plugin = event.part, (event.part, event.name)
        if event.is_open:
            self._open.add(plugin)
            self._trips[part].inc()
        else:
            self._open.discard(plugin)
        self._num_open[part].set(sum(other == part for other, _ in self._open))


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to a number."""
    steps = (float(m * 10**e) for e in range(len(str(most))) for m in (1, 2, 5))
    return tuple(step for step in steps if step <= most)
