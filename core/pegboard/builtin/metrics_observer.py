"""Prometheus metrics: `pegboard_*`, and the same numbers under the names dashboards read for vLLM.

Of vLLM's metrics, those are left out that this engine has no truth for: `engine_sleep_state`,
`lora_requests_info`, `external_prefix_cache_*`, `mm_cache_*` (there is none of these),
`num_requests_waiting_by_reason`, `prompt_tokens_by_source` (schedulers and caches give no reason and no
place), `admission_rejections` (refusals are answered before the engine counts; see the HTTP metrics'
status codes) and `corrupted_requests` (a sequence without a possible token is an error, counted so).

Where a request asks for n sequences, vLLM's "requests" are sequences, here as there; `prompt_tokens`,
`prompt_tokens_cached`, `request_params_n`, `request_params_max_tokens` and
`request_max_num_generation_tokens` count a request once.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Info, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from pegboard.builtin.draft_metrics import DraftMetrics
from pegboard.builtin.metric_families import (
    PREFIX,
    BreakerMetrics,
    MetricMaker,
    RequestMetrics,
    StepMetrics,
)
from pegboard.interfaces.observer import (
    BlocksNamed,
    BreakerChanged,
    ErrorHappened,
    Event,
    LoadChanged,
    MetricsText,
    Observer,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
)

_VLLM = "vllm:"

_VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
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
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
    "iteration_tokens_total",
)
"""Metrics with the same meaning under both prefixes."""


class MetricsOptions(BaseModel, extra="forbid", frozen=True):
    """
    Attributes:
        vllm_names: whether to give the numbers under vLLM's names as well.
    """

    vllm_names: bool = True


class MetricsObserver(Observer, MetricsText):
    """Counts what happens, in registries of its own. Times are seconds."""

    def __init__(self, context: ObserverContext, options: MetricsOptions | None = None) -> None:
        self._registries = [CollectorRegistry()]
        make = MetricMaker(self._registries[0], context.model)
        self._labels = make.labels
        self._requests = RequestMetrics(make, context)
        self._steps = StepMetrics(make, context)
        self._breakers = BreakerMetrics(make)
        num_nodes = context.num_speculative_tokens
        self._drafts = DraftMetrics(make, num_nodes) if num_nodes else None
        self._errors = make.counter("errors", "Errors by class", ("kind",))
        _say_what_is_set_up(make, context)
        build = Info("pegboard_build", "What runs", registry=self._registries[0])
        build.info({"version": version("pegboard"), "model_name": context.model})
        if (options or MetricsOptions()).vllm_names:
            aliases = CollectorRegistry()
            aliases.register(_Aliases(self._registries[0]))
            self._registries.append(aliases)

    def observe(self, event: Event) -> None:
        match event:
            case StepDone():
                self._steps.done(event)
                if self._drafts is not None:
                    self._drafts.done(event)
            case LoadChanged():
                self._steps.load(event)
            case BlocksNamed():
                self._steps.named(event)
            case RequestArrived():
                self._requests.arrived(event)
                if self._drafts is not None:
                    self._drafts.arrived(event)
            case SequenceFinished():
                self._requests.finished(event)
            case BreakerChanged():
                self._breakers.changed(event)
            case ErrorHappened():
                self._errors.labels(*self._labels, event.kind).inc()

    def resync(self, num_missed: int) -> None:
        # Of what was open then, ends may have been missed.
        self._requests.forget_open()

    def render(self) -> str:
        return "".join(generate_latest(registry).decode() for registry in self._registries)

    def close(self) -> None:
        pass


def _say_what_is_set_up(make: MetricMaker, context: ObserverContext) -> None:
    """Gauges that do not change."""
    memory = make.gauge("memory_bytes", "Memory by entry of the plan", ("entry",))
    for entry, num_bytes in context.ledger.items():
        memory.labels(*make.labels, entry).set(num_bytes)
    labels = ("group", "block_size", "num_gpu_blocks", "enable_prefix_caching")
    cache = make.gauge("cache_config_info", "A KV group: its blocks, on whatever device", labels)
    for group, num_blocks in enumerate(context.num_blocks):
        block_size = context.groups[group].block_size
        values = (group, block_size, num_blocks, context.caches_prefixes)
        cache.labels(*make.labels, *map(str, values)).set(1)


class _Aliases(Collector):
    """The metrics of a registry that vLLM has too, under its names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            name = family.name.removeprefix(PREFIX)
            if name not in _VLLM_NAMES:
                continue
            alias = Metric(f"{_VLLM}{name}", family.documentation, family.type)
            alias.samples = [
                sample._replace(name=_VLLM + sample.name.removeprefix(PREFIX))
                for sample in family.samples
            ]
            yield alias
