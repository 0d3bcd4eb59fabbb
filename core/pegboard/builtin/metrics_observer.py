"""Prometheus metrics: `pegboard_*`, and the same numbers under the names dashboards read for vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict

from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.interfaces.observer import (
    ErrorHappened,
    Event,
    MetricsText,
    Observer,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
)

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
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    5,
    30,
)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FEW = (1, 2, 5, 10, 20)

_OURS = "pegboard_"
_VLLM = "vllm:"
_LABELS = ("model_name", "engine")

_VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_num_preemptions",
    "iteration_tokens_total",
)
"""Metrics that mean the same in both, whatever stands before the name."""


class MetricsOptions(BaseModel):
    """
    Attributes:
        vllm_names: whether to give the numbers under vLLM's names as well.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vllm_names: bool = True


class MetricsObserver(Observer, MetricsText):
    """Counts what happens, in registries of its own. Times are seconds."""

    def __init__(self, context: ObserverContext, options: MetricsOptions | None = None) -> None:
        self._registries = [CollectorRegistry()]
        make = _Maker(self._registries[0], context.model)
        self._requests = _RequestMetrics(make)
        self._steps = _StepMetrics(make)
        self._errors = make.counter("errors", "Errors by class", ("kind",))
        self._num_open = 0
        memory = make.gauge("memory_bytes", "Memory by entry of the plan", ("entry",))
        for entry, num_bytes in context.ledger.items():
            memory.labels(*make.labels, entry).set(num_bytes)
        build = Info("pegboard_build", "What runs", registry=self._registries[0])
        build.info({"version": version("pegboard"), "model_name": context.model})
        self._labels = make.labels
        if (options or MetricsOptions()).vllm_names:
            aliases = CollectorRegistry()
            aliases.register(_Aliases(self._registries[0]))
            self._registries.append(aliases)

    def observe(self, event: Event) -> None:
        match event:
            case StepDone():
                self._steps.done(event)
            case RequestArrived():
                self._num_open += event.num_sequences
                self._requests.arrived(event)
            case SequenceFinished():
                self._num_open -= 1
                self._requests.finished(event)
                if not self._num_open:
                    # No step follows the end of the last request.
                    self._steps.idle()
            case ErrorHappened():
                self._errors.labels(*self._labels, event.kind).inc()

    def render(self) -> str:
        return "".join(generate_latest(registry).decode() for registry in self._registries)

    def close(self) -> None:
        pass


class _Maker:
    """Makes metrics that carry the labels `model_name` and `engine`."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self.labels = (model, "0")

    def counter(self, name: str, text: str, more: Sequence[str] = ()) -> Counter:
        made = Counter(f"{_OURS}{name}", text, (*_LABELS, *more), registry=self._registry)
        return made if more else made.labels(*self.labels)

    def gauge(self, name: str, text: str, more: Sequence[str] = ()) -> Gauge:
        made = Gauge(f"{_OURS}{name}", text, (*_LABELS, *more), registry=self._registry)
        return made if more else made.labels(*self.labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], more: Sequence[str] = ()
    ) -> Histogram:
        made = Histogram(
            f"{_OURS}{name}", text, (*_LABELS, *more), buckets=buckets, registry=self._registry
        )
        return made if more else made.labels(*self.labels)


class _RequestMetrics:
    """What is known when a request arrives and when its sequences end."""

    def __init__(self, make: _Maker) -> None:
        self._labels = make.labels
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens, once a request")
        self._params_n = make.histogram("request_params_n", "Sequences a request", _FEW)
        self._success = make.counter("request_success", "Ended sequences", ("finished_reason",))
        self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up")
        self._hits = make.counter("prefix_cache_hits", "Prompt tokens that a cache had")
        self._prompt = make.histogram("request_prompt_tokens", "Prompt's length", _TOKENS)
        self._output = make.histogram("request_generation_tokens", "Tokens generated", _TOKENS)
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
        self._prompt_tokens.inc(event.num_prompt_tokens)
        self._params_n.observe(event.num_sequences)

    def finished(self, event: SequenceFinished) -> None:
        self._success.labels(*self._labels, event.reason).inc()
        self._queries.inc(event.num_prompt_tokens)
        self._hits.inc(event.num_cached_tokens)
        self._prompt.observe(event.num_prompt_tokens)
        self._output.observe(event.num_output_tokens)
        self._preemptions.observe(event.num_preemptions)
        self._observe_times(event)

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


class _StepMetrics:
    """What each step brings."""

    def __init__(self, make: _Maker) -> None:
        self._labels = make.labels
        self._running = make.gauge("num_requests_running", "Sequences that run")
        self._waiting = make.gauge("num_requests_waiting", "Sequences that wait")
        self._usage = make.gauge("kv_cache_usage_perc", "Used part of the fullest KV group, 0 to 1")
        self._pages = make.gauge("kv_pages", "KV pages by what they are", ("group", "state"))
        self._preemptions = make.counter("num_preemptions", "Preemptions")
        self._prefilled = make.counter("prefill_tokens", "Prompt tokens computed, again included")
        self._generated = make.counter("generation_tokens", "Tokens generated")
        self._tried = make.counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = make.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._first = make.histogram("time_to_first_token_seconds", "Since arrival", _TTFT)
        self._next = make.histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence", _INTER_TOKEN
        )
        self._tokens = make.histogram("iteration_tokens_total", "Tokens a step", _STEP_TOKENS)
        self._batch = make.histogram("step_sequences", "Running sequences a step", _BATCH)
        self._seconds = make.histogram("step_seconds", "A step, by phase", _PHASE, ("phase",))

    def done(self, event: StepDone) -> None:
        self._running.set(event.num_running)
        self._waiting.set(event.num_waiting)
        self._count_pages(event.kv)
        self._preemptions.inc(event.num_preempted)
        self._prefilled.inc(event.num_prefill_tokens)
        self._generated.inc(event.num_output_tokens)
        self._tried.inc(event.num_drafts_tried)
        self._accepted.inc(event.num_drafts_accepted)
        for seconds in event.first_token_s:
            self._first.observe(seconds)
        for seconds in event.inter_token_s:
            self._next.observe(seconds)
        self._tokens.observe(event.num_prefill_tokens + event.num_decode_tokens)
        self._batch.observe(event.num_running)
        worker = event.forward_s + event.sampling_s + event.drafting_s
        for phase, seconds in (
            ("forward", event.forward_s),
            ("sampling", event.sampling_s),
            ("drafting", event.drafting_s),
            ("host", max(0.0, event.duration_s - worker)),
        ):
            self._seconds.labels(*self._labels, phase).observe(seconds)

    def idle(self) -> None:
        """Nothing runs and nothing waits any more."""
        self._running.set(0)
        self._waiting.set(0)

    def _count_pages(self, ledgers: Sequence[KVLedger]) -> None:
        usage = 0.0
        for group, ledger in enumerate(ledgers):
            # What a cache alone holds can be had at once.
            used = ledger.total - ledger.free - ledger.cached
            usage = max(usage, used / ledger.total if ledger.total else 0.0)
            for state in ("free", "held", "cached", "pinned", "reserved", "deferred"):
                pages = self._pages.labels(*self._labels, str(group), state)
                pages.set(getattr(ledger, state))
        self._usage.set(usage)


class _Aliases(Collector):
    """The metrics of a registry that vLLM has too, under its names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            name = family.name.removeprefix(_OURS)
            if name not in _VLLM_NAMES:
                continue
            alias = Metric(f"{_VLLM}{name}", family.documentation, family.type)
            alias.samples = [
                sample._replace(name=_VLLM + sample.name.removeprefix(_OURS))
                for sample in family.samples
            ]
            yield alias
