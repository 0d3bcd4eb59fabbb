"""No way of running changes a token: batches, chunks, preemptions, disorder.

In float64 on tiny models, where rounding cannot hide or excuse a fault of the logic.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.scheduler import QueueView, SchedulerContext, SequenceView, StepBuilder
from pegboard.request import SamplingParams
from pegboard.testing.invariance import (
    BATCHES,
    CHUNKS,
    Case,
    Traces,
    differences,
    pairwise,
    run_case,
)

MAX_MODEL_LEN = 64
NEEDS_PREEMPTION = 2 * 2 * 24 * 8 * (MAX_MODEL_LEN + 40)
"""Bytes of KV of little more than one longest sequence: layers x (k, v) x head x float64 x tokens."""

WAYS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "small pool": {"pool": NEEDS_PREEMPTION},
    "disorder": {"disorder": 1},
    "disorder in a small pool": {"disorder": 2, "pool": NEEDS_PREEMPTION},
}

PAIRWISE = list(pairwise({"batch": BATCHES, "chunk": CHUNKS, "way": tuple(WAYS)}))
FULL = [
    {"batch": batch, "chunk": chunk, "way": way}
    for batch in BATCHES
    for chunk in CHUNKS
    for way in WAYS
]


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    random_ids = random.Random(3)
    lengths = [1, 2, 3, 40, 17, 16, 15, 8, 9, 33, 5, 24, 1, 31, 12, 7, 20]
    return tuple(tuple(random_ids.randrange(2, 517) for _ in range(length)) for length in lengths)


def params() -> list[SamplingParams]:
    """Greedy, and sampled with seeds; one or three sequences; filters, penalties, stops: 33 in all."""
    common = {"max_tokens": 14, "logprobs": 3}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11, "n": 3},
        {"temperature": 1.0, "seed": 2**64 - 1},
        {"temperature": 0.7, "seed": 5, "top_p": 0.8, "top_k": 50, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "ignore_eos": True},
        {"temperature": 1.3, "seed": 6, "min_p": 0.02, "n": 3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(2, 60))},
        {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.6, "logit_bias": {5: 2.0}, "n": 3},
    ]
    chosen = [kinds[number % len(kinds)] for number in range(len(prompts()))]
    return [SamplingParams(**(common | kind)) for kind in chosen]


def config(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache": {"block_size": 4},
        "threads": 1,
    }


_alone: dict[str, Traces] = {}


def alone(family: str, model: Path) -> Traces:
    """Each sequence by itself, a prompt in one piece."""
    if family not in _alone:
        _alone[family] = run_case(config(model), Case(batch=1), prompts(), params())
    return _alone[family]


def check(family: str, models: Mapping[str, Path], row: Mapping[str, Any]) -> None:
    case = Case(row["batch"], row["chunk"], **WAYS[row["way"]])
    got = run_case(config(models[family]), case, prompts(), params())
    assert differences(alone(family, models[family]), got, tolerance=1e-5) == [], str(case)


def test_the_prompts_run_33_sequences_that_differ(tiny_models: dict[str, Path]) -> None:
    traces = alone("llama", tiny_models["llama"])
    assert len(traces) == 33
    assert len({trace.tokens for trace in traces.values()}) > 30
    assert {"stop", "length"} == {trace.finish_reason for trace in traces.values()}


@pytest.mark.parametrize("row", PAIRWISE, ids=str)
def test_pairs_of_ways_to_run(tiny_models: dict[str, Path], row: dict[str, Any]) -> None:
    check("llama", tiny_models, row)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("row", PAIRWISE[::5], ids=str)
def test_other_families(tiny_models: dict[str, Path], family: str, row: dict[str, Any]) -> None:
    check(family, tiny_models, row)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("row", FULL, ids=str)
def test_every_way_to_run(tiny_models: dict[str, Path], family: str, row: dict[str, Any]) -> None:
    check(family, tiny_models, row)


class CountingStep:
    """A step builder that counts preemptions."""

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self.num_preempted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def preempt(self, seq: SequenceView) -> bool:
        done = self._step.preempt(seq)
        self.num_preempted += done
        return done


class CountingFCFS(FCFS):
    """The built-in scheduler, watched."""

    num_preempted = 0

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        counting = CountingStep(step)
        super().plan(queue, counting)
        self.num_preempted += counting.num_preempted


def test_a_small_pool_does_preempt(tiny_models: dict[str, Path]) -> None:
    scheduler = CountingFCFS(SchedulerContext(17, 64, MAX_MODEL_LEN))
    case = Case(batch=17, chunk=64, pool=NEEDS_PREEMPTION)
    model = tiny_models["llama"]
    got = run_case(config(model), case, prompts(), params(), scheduler=scheduler)
    assert scheduler.num_preempted > 3
    assert differences(alone("llama", model), got, tolerance=1e-5) == []
