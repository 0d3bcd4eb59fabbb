"""The engine in virtual time: real queue, scheduler, prefix cache and allocator, and no model.

A worker answers each request with the answer of its trace, and a step takes what a cost model says:
so much by itself, so much for each prompt token, so much for each sequence that decodes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from traces import TraceRequest

from pegboard import Engine, SamplingParams
from pegboard.interfaces.executor import Executor, WorkerHealth
from pegboard.interfaces.observer import Event, Observer, SequenceFinished
from pegboard.step import StepBatch, StepResult

BEGIN_S = 1000.0
"""The clock when the trace begins."""
BLOCK_BYTES = 1024
"""KV of 16 tokens of the thin model with torch's attention: a layer, a head of 8 float32 elements,
keys and values."""
EOS_ID = 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: fixed, of each prompt token, of each sequence that decodes."""

    fixed_s: float
    prefill_s: float
    decode_s: float

    def of(self, num_prefill: int, num_decode: int) -> float:
        """Of a step with so many prompt tokens and decoding sequences."""
        return self.fixed_s + self.prefill_s * num_prefill + self.decode_s * num_decode

    def alone(self, request: TraceRequest) -> float:
        """Of a request that has the engine to itself, and no cache. The end is a token, too."""
        decodes = len(request.answer) * self.of(0, 1)
        return self.of(len(request.prompt), 0) + decodes


def measured_cost(results: Path) -> StepCost:
    """From a run of `bench_engine.py`: a line through its decoding steps, and its largest prefill."""
    cases = json.loads(results.read_text())["cases"]
    batches, steps = [], []
    prefill_s = 0.0
    for case in sorted(cases, key=lambda case: int(case.split("x")[0])):
        batch, prompt_len, num_generated = map(int, case.split("x"))
        runs = cases[case]["pegboard"]
        batches.append(batch)
        steps.append(statistics.median(run["decode"] for run in runs) / (num_generated - 1))
        prefill_s = statistics.median(run["prefill"] for run in runs) / (batch * prompt_len)
    decode_s, fixed_s = np.polyfit(batches, steps, 1)
    return StepCost(float(fixed_s), prefill_s, float(decode_s))


class Clock:
    """Virtual time: seconds, `now`, that pass only when somebody adds to them."""

    def __init__(self) -> None:
        self.now = BEGIN_S

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Inside, `time.monotonic` is this clock: engine and policies live in its time."""
        with mock.patch.object(time, "monotonic", lambda: self.now):
            yield


class ScriptedExecutor(Executor):
    """Gives each request the answer that stands under its seed, and lets virtual time pass."""

    def __init__(self, clock: Clock, cost: StepCost, answers: Sequence[Sequence[int]]) -> None:
        self._clock, self._cost, self._answers = clock, cost, answers
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}

    def start(self) -> None:
        pass

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        for admission in batch.admitted:
            self._rows[admission.row] = admission.num_prompt_tokens, self._answers[admission.seed]
        token_ids: list[int] = []
        num_prefill = num_decode = 0
        columns = (batch.rows, batch.num_computed, batch.num_tokens, batch.sample)
        for row, start, count, samples in zip(*(c.tolist() for c in columns), strict=True):
            num_prompt, answer = self._rows[row]
            if start < num_prompt or count > 1:
                num_prefill += count
            else:
                num_decode += 1
            if samples:
                position = start + count - num_prompt
                token_ids.append(answer[position] if position < len(answer) else EOS_ID)
        self._clock.now += self._cost.of(num_prefill, num_decode)
        return _answered(batch, token_ids)

    def call(self, method: str) -> list[Any]:
        return []

    def health(self) -> tuple[WorkerHealth, ...]:
        return ()

    def close(self) -> None:
        pass


class Finished(Observer):
    """Keeps what became of each request, by its id."""

    def __init__(self) -> None:
        self.sequences: dict[str, SequenceFinished] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, SequenceFinished):
            self.sequences[event.request_id] = event

    def close(self) -> None:
        pass


def max_tokens(request: TraceRequest) -> int:
    """The `max_tokens` of a client that knows its answers roughly: the next power of two."""
    return 1 << len(request.answer).bit_length()


def simulate(
    trace: Sequence[TraceRequest], config: dict[str, Any], cost: StepCost
) -> list[SequenceFinished]:
    """The outcome of each request of the trace, in its order; times count from its beginning.

    Args:
        trace: requests in order of arrival.
        config: of the engine; its model is the thin one.
        cost: of a step.
    """
    clock, finished = Clock(), Finished()
    executor = ScriptedExecutor(clock, cost, [request.answer.tolist() for request in trace])
    with clock.everywhere(), Engine(config, executor=executor, observer=[finished]) as engine:
        waiting = list(enumerate(trace))[::-1]
        while waiting or engine.has_work():
            if not engine.has_work():
                clock.now = max(clock.now, BEGIN_S + waiting[-1][1].arrival_s)
            while waiting and BEGIN_S + waiting[-1][1].arrival_s <= clock.now:
                number, request = waiting.pop()
                engine.submit(
                    request.prompt.tolist(),
                    SamplingParams(temperature=0.0, max_tokens=max_tokens(request), seed=number),
                    request_id=str(number),
                    priority=request.priority,
                    tenant=request.tenant,
                )
            engine.step()
    return [finished.sequences[str(number)] for number in range(len(trace))]


def summary(
    trace: Sequence[TraceRequest],
    finished: Sequence[SequenceFinished],
    begin_s: float,
    cost: StepCost,
) -> dict[str, float]:
    """Figures of a run. Times are seconds, from a request's arrival in the trace.

    `slowdown` is the time to the end by that of the request alone; `fairness` is Jain's index of the
    tenants' mean slowdowns: 1 when all are alike, 1 / tenants when one bears all of it.
    """
    arrivals = np.array([begin_s + request.arrival_s for request in trace])
    ends = np.array([sequence.finished for sequence in finished])
    # One that fails before its first token has waited until then.
    first = (
        np.array([sequence.first_token or sequence.finished for sequence in finished]) - arrivals
    )
    slowdown = (ends - arrivals) / np.array([cost.alone(request) for request in trace])
    urgent = np.array([request.priority == 0 for request in trace])
    num_prompt = sum(sequence.num_prompt_tokens for sequence in finished)
    num_output = sum(sequence.num_output_tokens for sequence in finished)
    figures = {
        "requests": len(trace),
        "failed": sum(sequence.reason == "error" for sequence in finished),
        "tokens_per_s": float(num_output / (ends.max() - arrivals.min())),
        "hit_rate": sum(sequence.num_cached_tokens for sequence in finished) / num_prompt,
        "preemptions": sum(sequence.num_preemptions for sequence in finished),
        "fairness": _jain(trace, slowdown),
        "slowdown_p99": float(np.percentile(slowdown, 99)),
    }
    for name, times in (
        ("ttft", first),
        ("end", ends - arrivals),
        ("urgent_ttft", first[urgent] if urgent.any() else first),
    ):
        figures[f"{name}_mean_s"] = float(times.mean())
        figures[f"{name}_p50_s"], figures[f"{name}_p99_s"] = np.percentile(times, (50, 99)).tolist()
    return {name: round(value, 4) for name, value in figures.items()}


def _jain(trace: Sequence[TraceRequest], slowdown: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    tenants = np.array([request.tenant for request in trace])
    means = np.array([slowdown[tenants == tenant].mean() for tenant in np.unique(tenants)])
    return float(means.sum() ** 2 / (len(means) * (means**2).sum()))


def _answered(batch: StepBatch, token_ids: Sequence[int]) -> Future[StepResult]:
    none = np.zeros(len(batch.rows), np.int32)
    answer: Future[StepResult] = Future()
    answer.set_result(
        StepResult(
            step_id=batch.step_id,
            offsets=np.concatenate(([0], np.cumsum(batch.sample))).astype(np.int32),
            token_ids=np.array(token_ids, np.int32),
            num_accepted=none,
            num_tried=none,
            num_drafts=none,
            confidences=np.zeros(0, np.float32),
        )
    )
    return answer
