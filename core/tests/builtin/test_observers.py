"""The built-in observers, told of a request's life."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pegboard import Engine, SamplingParams
from pegboard.builtin.log_observer import LogObserver
from pegboard.builtin.metrics_observer import MetricsObserver, MetricsOptions
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.interfaces.observer import (
    BlocksNamed,
    BreakerChanged,
    ErrorHappened,
    Event,
    LoadChanged,
    Observer,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
    StepDrafts,
)
from pegboard.testing.invariance import Case, Guesses, run_case
from pegboard.testing.tiny import write_tiny_model

CONTEXT = ObserverContext(
    model="smol",
    ledger={"weights": 1000, "KV": 64},
    max_model_len=60,
    groups=(KVGroup((0, 1), 1, 24, 16, None, "none", "float32"),),
    num_blocks=(11,),
    num_speculative_tokens=4,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, dtype="float64", num_hidden_layers=1)


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
        "num_tried": 0,
        "num_accepted": 0,
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
    observer.observe(RequestArrived("r", 1.0, 20, num_sequences=1, max_tokens=40))
    observer.observe(
        step(
            first_token_s=(5.0,),
            inter_token_s=(0.0008, 0.3),
            num_sequences=3,
            num_prompt_tokens=20,
            num_cached_prompt_tokens=16,
            num_prefix_queries=20,
            num_prefix_hits=16,
        )
    )
    observer.observe(finished())
    found = samples(observer)
    for name, value in (
        ("prompt_tokens_total", 20),
        ("prompt_tokens_cached_total", 16),
        ("request_prompt_tokens_sum", 20),
        ("request_generation_tokens_sum", 5),
        ("request_prefill_kv_computed_tokens_sum", 4),
        ("request_params_max_tokens_sum", 40),
        ("request_params_n_sum", 1),
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
    assert found["pegboard_step_sequences_sum"] == 3
    assert found["vllm:cache_config_info[16][True][0][11]"] == 1


def test_buckets_of_lengths_end_with_the_context() -> None:
    found = samples(MetricsObserver(CONTEXT))
    name = "vllm:request_params_max_tokens_bucket"
    bounds = [key[len(name) + 1 : -1] for key in found if key.startswith(name)]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf"]


def test_every_way_to_end_is_a_series_from_the_start() -> None:
    found = samples(MetricsObserver(CONTEXT))
    for reason in ("stop", "length", "abort", "error"):
        assert found[f"vllm:request_success_total[{reason}]"] == 0


def test_drafts_are_counted_by_position() -> None:
    observer = MetricsObserver(CONTEXT)
    drafts = StepDrafts(  # nodes of 3, 4, 4; tried 3, 1, 2; accepted 3, 0, 1
        (0, 0, 0, 1, 2), (0, 1, 1, 1), (1, 1, 0, 1), num_asked=12, num_proposed=5
    )
    waits = {"inter_token_s": (0.1,) * 5, "first_token_s": (0.1,)}
    observer.observe(step(num_tried=6, num_accepted=4, drafts=drafts, drafting_s=0.2, **waits))
    observer.observe(step(**waits))
    found = samples(observer)
    assert found["vllm:spec_decode_num_drafts_total"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 11
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 4
    by_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[f"vllm:{by_position}[{i}]"] for i in range(4)] == [2, 1, 1, 0]
    assert [found[f"pegboard_{by_position}[{i}]"] for i in range(4)] == [2, 1, 1, 0]
    tried = "pegboard_spec_decode_num_tried_tokens_per_pos_total"
    assert [found[f"{tried}[{i}]"] for i in range(4)] == [3, 2, 1, 0]
    assert found["pegboard_spec_decode_num_asked_tokens_total"] == 12
    assert found["pegboard_spec_decode_num_proposed_tokens_total"] == 5
    # Of ten rows that decoded, seven had no draft.
    assert found["pegboard_spec_decode_chosen_tokens_bucket[0.0]"] == 7
    assert found["pegboard_spec_decode_chosen_tokens_bucket[3.0]"] == 8
    assert found["pegboard_spec_decode_chosen_tokens_count"] == 10
    assert found["pegboard_spec_decode_chosen_tokens_sum"] == 11
    assert found["pegboard_spec_decode_tokens_per_step_bucket[1.0]"] == 8
    assert found["pegboard_spec_decode_tokens_per_step_sum"] == 14
    assert found["pegboard_spec_decode_drafting_seconds_total"] == pytest.approx(0.2)
    assert found["pegboard_spec_decode_verifying_seconds_total"] == pytest.approx(0.4)


def test_without_a_drafter_there_are_no_metrics_of_drafts() -> None:
    observer = MetricsObserver(replace(CONTEXT, num_speculative_tokens=0))
    observer.observe(step(inter_token_s=(0.1,)))
    assert not [name for name in samples(observer) if "spec_decode" in name]


def test_a_request_of_several_sequences_is_one_request() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=2))
    for index, num_tokens in enumerate((5, 9)):
        observer.observe(finished(reason="abort", index=index, num_output_tokens=num_tokens))
    found = samples(observer)
    assert found["vllm:request_success_total[abort]"] == 2
    assert found["pegboard_aborted_requests_total"] == 1
    assert found["vllm:request_max_num_generation_tokens_sum"] == 9
    assert found["vllm:request_max_num_generation_tokens_count"] == 1


def test_blocks_that_get_and_lose_names_are_counted() -> None:
    observer = MetricsObserver(CONTEXT)
    names = tuple((0, bytes([number] * 16)) for number in range(5))
    observer.observe(BlocksNamed(1, stored=names))
    observer.observe(BlocksNamed(2, stored=names[:1], evicted=names[3:]))
    observer.observe(BlocksNamed(3, cleared=True))
    found = samples(observer)
    assert found["pegboard_prefix_cache_pages_stored_total"] == 6
    assert found["pegboard_prefix_cache_pages_evicted_total"] == 2
    assert found["pegboard_prefix_cache_resets_total"] == 1


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    observer = MetricsObserver(replace(CONTEXT, caches_prefixes=False))
    observer.observe(step(num_prefix_queries=20))
    assert samples(observer)["vllm:prefix_cache_queries_total"] == 0


def test_blocks_that_only_a_cache_holds_count_as_free() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=1))
    roomy = KVLedger(total=10, free=10, held=0)
    observer.observe(step(kv=(roomy, *step().kv)))
    found = samples(observer)
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(0.4)
    assert found["pegboard_kv_pages[1][cached]"] == 2
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (4, 2)


def test_what_ends_without_a_step_is_seen() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.observe(step(num_running=2, num_waiting=1))
    assert samples(observer)["vllm:kv_cache_usage_perc"] == pytest.approx(0.4)
    observer.observe(LoadChanged(11.0, 0, 0, (KVLedger(total=10, free=8, held=0, cached=2),)))
    found = samples(observer)
    assert found["pegboard_num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["pegboard_kv_pages[0][free]"] == 8


def test_errors_are_counted_by_kind_and_the_other_names_can_be_left_out() -> None:
    observer = MetricsObserver(CONTEXT, MetricsOptions(vllm_names=False))
    for kind in ("ValueError", "Stalled", "ValueError"):
        observer.observe(ErrorHappened(kind, "what"))
    found = samples(observer)
    assert found["pegboard_errors_total[ValueError]"] == 2
    assert not [name for name in found if name.startswith("vllm:")]


def test_what_is_cut_off_is_counted_and_shown() -> None:
    observer = MetricsObserver(CONTEXT)
    found = samples(observer)
    for part in ("scheduler", "prefix_cache", "observer"):
        assert found[f"pegboard_breaker_trips_total[{part}]"] == 0
        assert found[f"pegboard_breaker_open[{part}]"] == 0
    for name, is_open in (("a", True), ("a", False), ("b", True), ("c", True), ("a", False)):
        observer.observe(BreakerChanged("observer", name, is_open, "it raised"))
    found = samples(observer)
    assert found["pegboard_breaker_trips_total[observer]"] == 3
    assert found["pegboard_breaker_open[observer]"] == 2
    assert found["pegboard_breaker_open[scheduler]"] == 0


def test_ends_of_requests_that_came_while_it_was_cut_off_are_counted() -> None:
    observer = MetricsObserver(CONTEXT)
    observer.resync(5)
    observer.observe(finished())
    assert samples(observer)["pegboard_request_success_total[stop]"] == 1


def test_the_log_says_when_a_plugin_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pegboard.engine")
    observer = LogObserver(CONTEXT)
    caplog.clear()
    observer.observe(ErrorHappened("ValueError", "scheduler 'mine' is cut off for 1 s: oops"))
    observer.observe(BreakerChanged("scheduler", "mine", True, "oops"))
    assert len(caplog.messages) == 1 and "oops" in caplog.messages[0]
    observer.observe(BreakerChanged("scheduler", "mine", False, "oops"))
    assert caplog.messages[1:] == ["back part=scheduler name=mine"]


def test_two_observers_share_nothing() -> None:
    one, other = MetricsObserver(CONTEXT), MetricsObserver(CONTEXT)
    one.observe(step())
    assert samples(one)["pegboard_generation_tokens_total"] == 4
    assert samples(other)["pegboard_generation_tokens_total"] == 0


def test_the_log_has_a_line_an_end_and_a_summary_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pegboard.engine")
    observer = LogObserver(replace(CONTEXT, num_speculative_tokens=0))
    caplog.clear()
    for second in range(1, 22):
        hits = {"num_prefix_queries": 20, "num_prefix_hits": 5}
        observer.observe(step(time=float(second), duration_s=1.0, num_output_tokens=4, **hits))
    summaries = [record.getMessage() for record in caplog.records]
    assert len(summaries) == 2
    for line in summaries:
        assert "prompt_tokens_per_s=7.0 output_tokens_per_s=4.0 running=4 waiting=2" in line
        assert line.endswith("kv_used=40.0% hit_rate=25.0%")
    # A server has a line for each request; these are of sequences.
    observer.observe(finished())
    assert len(caplog.messages) == 2
    caplog.set_level(logging.DEBUG, logger="pegboard.engine")
    observer.observe(finished())
    assert "id=r index=0 reason=stop" in caplog.messages[-1]
    assert "ttft_s=5.000 e2e_s=9.000" in caplog.messages[-1]


def test_the_summary_tells_of_drafts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pegboard.engine")
    observer = LogObserver(CONTEXT)
    caplog.clear()
    for second in range(1, 12):
        drafts = StepDrafts((0, 0, 0, 0, 2), (0, 1, 0, 1), (1, 0, 1))
        waits = (0.1, 0.1, 0.1, 0.1)
        observer.observe(
            step(time=float(second), duration_s=1.0, drafts=drafts, inter_token_s=waits)
        )
    assert caplog.messages[0].endswith("tokens_per_step=1.50 accepted_per_pos=0.50,0.50")


def test_one_error_of_many_sequences_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver(CONTEXT)
    caplog.clear()
    for request_id in ("r", "s"):
        for _ in range(128):
            observer.observe(ErrorHappened("RowFailed", "not a number", request_id))
    assert len(caplog.messages) == 2


def test_idle_time_is_in_no_summary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pegboard.engine")
    observer = LogObserver(CONTEXT)
    caplog.clear()
    observer.observe(step(time=1.0, num_running=0, num_waiting=0))
    observer.observe(step(time=100.0))
    observer.observe(LoadChanged(101.0, 0, 0, ()))
    observer.observe(step(time=200.0))
    assert not caplog.records


class Recorder(Observer):
    """Keeps the ends of sequences."""

    def __init__(self) -> None:
        self.ends: list[SequenceFinished] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, SequenceFinished):
            self.ends.append(event)

    def close(self) -> None: ...


CASES = {
    "drafts": Case(batch=5, guesses=Guesses(right=0.7, num_nodes=4)),
    "preemption": Case(batch=7, disorder=3, chunk=7),
    "prefix cache": Case(batch=2, cached=True),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_engine_counts_what_it_did(tiny: Path, name: str) -> None:
    """Against what each sequence says of itself at its end, and what came out."""
    shared = tuple(range(2, 35))
    prompts = [(*shared, 40 + i) for i in range(8)]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, seed=i, n=1 + i % 2) for i in range(8)]
    config = {"model": str(tiny), "threads": 1, "kv_cache": {"block_size": 8}}
    plain = run_case({**config, "prefix_cache": "none"}, Case(batch=3), prompts, params)
    if not CASES[name].cached:
        config["prefix_cache"] = "none"
    metrics, recorder = MetricsObserver(CONTEXT), Recorder()
    traces = run_case(
        config, CASES[name], prompts, params, known=plain, observer=[metrics, recorder]
    )
    found, ends = samples(metrics), recorder.ends
    assert len(ends) == len(traces) == 12
    counts = {
        "generation_tokens_total": sum(len(trace.tokens) for trace in traces.values()),
        "prompt_tokens_total": sum(map(len, prompts)),
        "request_success_total[length]": len(traces),
        "time_to_first_token_seconds_count": len(traces),
        "num_preemptions_total": sum(end.num_preemptions for end in ends),
        "prefix_cache_hits_total": sum(end.num_cached_tokens for end in ends),
        "prompt_tokens_cached_total": sum(end.num_cached_tokens for end in ends if not end.index),
    }
    assert {key: found[f"vllm:{key}"] for key in counts} == counts
    # A sequence that begins with its sibling's blocks asks no cache.
    asked = [end.num_prompt_tokens for end in ends if not end.index]
    everybody = sum(end.num_prompt_tokens for end in ends)
    assert sum(asked) <= found["vllm:prefix_cache_queries_total"] <= everybody
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total["
    positions = [value for key, value in sorted(found.items()) if key.startswith(by_position)]
    assert sum(positions) == accepted <= found["vllm:spec_decode_num_draft_tokens_total"]
    assert positions == sorted(positions, reverse=True)
    assert (accepted > 0) == (name == "drafts")
    # Each token but the first of a sequence comes from a step of a decoding sequence.
    decoded = counts["generation_tokens_total"] - len(traces)
    assert found["pegboard_spec_decode_tokens_per_step_sum"] == decoded
    assert found["pegboard_spec_decode_tokens_per_step_count"] == decoded - accepted
    assert (counts["num_preemptions_total"] > 0) == (name == "preemption")
    assert (counts["prefix_cache_hits_total"] > 0) == (name == "prefix cache")
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:num_requests_running"] == 0


def test_an_aborted_request_leaves_nothing_in_the_gauges(tiny: Path) -> None:
    metrics = MetricsObserver(CONTEXT)
    with Engine({"model": str(tiny), "threads": 1}, observer=metrics) as engine:
        request = engine.submit((5, 6, 7), SamplingParams(max_tokens=50, ignore_eos=True, n=3))
        engine.step()
        engine.step()  # siblings begin once the prompt is computed
        busy = samples(metrics)
        assert busy["vllm:num_requests_running"] == 3 and busy["vllm:kv_cache_usage_perc"] > 0
        engine.abort(request)
        while engine.has_work():
            engine.step()
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:request_success_total[abort]"] == 3
    assert found["pegboard_aborted_requests_total"] == 1
