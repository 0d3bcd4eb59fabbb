"""The built-in observers, told of a request's life."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pegboard.builtin.log_observer import LogObserver
from pegboard.builtin.metrics_observer import MetricsObserver, MetricsOptions
from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.interfaces.observer import (
    ErrorHappened,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
)

CONTEXT = ObserverContext(model="smol", ledger={"weights": 1000, "KV": 64})


def step(**values: Any) -> StepDone:
    usual: dict[str, Any] = {
        "step_id": 1,
        "time": 10.0,
        "duration_s": 0.5,
        "forward_s": 0.3,
        "sampling_s": 0.1,
        "drafting_s": 0.0,
        "num_prefill_tokens": 7,
        "num_decode_tokens": 3,
        "num_output_tokens": 4,
        "num_running": 4,
        "num_waiting": 2,
        "num_preempted": 1,
        "num_drafts_tried": 0,
        "num_drafts_accepted": 0,
        "kv": (KVLedger(total=10, free=4, held=3, cached=2, pinned=1),),
    }
    return StepDone(**usual | values)


def finished(**values: Any) -> SequenceFinished:
    usual: dict[str, Any] = {
        "request_id": "r",
        "index": 0,
        "reason": "stop",
        "arrival": 1.0,
        "admitted": 3.0,
        "first_token": 6.0,
        "finished": 10.0,
        "num_prompt_tokens": 20,
        "num_cached_tokens": 16,
        "num_output_tokens": 5,
        "num_preemptions": 0,
    }
    return SequenceFinished(**usual | values)


def samples(observer: MetricsObserver) -> dict[str, float]:
    """By name and labels, those that all share left out."""
    found = {}
    for family in text_string_to_metric_families(observer.render()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "smol"
            labels.pop("engine", None)
            found[sample.name + "".join(f"[{value}]" for value in labels.values())] = sample.value
    return found


def test_a_request_is_measured_from_arrival_to_end() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=1))
    observer.observe(step(first_token_s=(5.0,), inter_token_s=(0.0008, 0.3)))
    observer.observe(finished())
    found = samples(observer)
    for name, value in (
        ("prompt_tokens_total", 20),
        ("generation_tokens_total", 4),
        ("prefix_cache_queries_total", 20),
        ("prefix_cache_hits_total", 16),
        ("num_preemptions_total", 1),
        ("request_success_total[stop]", 1),
        ("time_to_first_token_seconds_sum", 5),
        ("inter_token_latency_seconds_bucket[0.001]", 1),
        ("inter_token_latency_seconds_count", 2),
        ("e2e_request_latency_seconds_sum", 9),
        ("request_queue_time_seconds_sum", 2),
        ("request_prefill_time_seconds_sum", 3),
        ("request_decode_time_seconds_sum", 4),
        ("request_inference_time_seconds_sum", 7),
        ("request_time_per_output_token_seconds_sum", 1),
        ("iteration_tokens_total_sum", 10),
    ):
        assert found[f"pegboard_{name}"] == pytest.approx(value), name
        assert found[f"vllm:{name}"] == found[f"pegboard_{name}"]
    assert found["pegboard_step_seconds_sum[host]"] == pytest.approx(0.1)
    assert found["pegboard_memory_bytes[weights]"] == 1000


def test_pages_that_only_a_cache_holds_count_as_free() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=1))
    roomy = KVLedger(total=10, free=10, held=0)
    observer.observe(step(kv=(roomy, *step().kv)))
    found = samples(observer)
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(0.4)
    assert found["pegboard_kv_pages[1][cached]"] == 2
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (4, 2)


def test_nothing_runs_once_all_sequences_have_ended() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=2))
    observer.observe(step(num_running=2, num_waiting=0))
    observer.observe(finished(reason="abort", index=0))
    assert samples(observer)["pegboard_num_requests_running"] == 2
    observer.observe(finished(reason="abort", index=1, first_token=None, admitted=None))
    assert samples(observer)["pegboard_num_requests_running"] == 0


def test_errors_are_counted_by_kind_and_the_other_names_can_be_left_out() -> None:
    observer = MetricsObserver(CONTEXT, MetricsOptions(vllm_names=False))
    for kind in ("ValueError", "Stalled", "ValueError"):
        observer.observe(ErrorHappened(kind, "what"))
    found = samples(observer)
    assert found["pegboard_errors_total[ValueError]"] == 2
    assert not [name for name in found if name.startswith("vllm:")]


def test_two_observers_share_nothing() -> None:
    one, other = MetricsObserver(CONTEXT), MetricsObserver(CONTEXT)
    one.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=1))
    assert samples(other)["pegboard_prompt_tokens_total"] == 0


def test_the_log_has_a_line_an_end_and_a_summary_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pegboard.engine")
    observer = LogObserver(CONTEXT)
    caplog.clear()
    for second in range(1, 22):
        observer.observe(step(time=float(second), duration_s=1.0, num_output_tokens=4))
    summaries = [record.getMessage() for record in caplog.records]
    assert len(summaries) == 2
    for line in summaries:
        assert "prompt_tokens_per_s=7.0 output_tokens_per_s=4.0 running=4 waiting=2" in line
    observer.observe(finished())
    assert "id=r index=0 reason=stop" in caplog.messages[-1]
    assert "ttft_s=5.000 e2e_s=9.000" in caplog.messages[-1]


def test_idle_time_is_in_no_summary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pegboard.engine")
    observer = LogObserver(CONTEXT)
    caplog.clear()
    observer.observe(step(time=1.0, num_running=0, num_waiting=0))
    observer.observe(step(time=100.0))
    assert not caplog.records
