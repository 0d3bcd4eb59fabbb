"""No way of running changes a token: batches, chunks, preemptions, disorder, guesses, cached prefixes.

In float64 on tiny models, where rounding cannot hide or excuse a fault of the logic.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCacheContext
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.request import SamplingParams
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import (
    BATCHES,
    CHUNKS,
    Case,
    Guesses,
    Traces,
    differences,
    pairwise,
    run_case,
)

MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
NEEDS_PREEMPTION = 2 * 2 * 24 * 8 * (MAX_MODEL_LEN + 40)
"""Bytes of KV of little more than one longest sequence: layers x (k, v) x head x float64 x tokens."""

WAYS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tight budget": {"budget": 40},
    "small pool": {"pool": NEEDS_PREEMPTION},
    "disorder": {"disorder": 1},
    "disorder in a small pool": {"disorder": 2, "pool": NEEDS_PREEMPTION},
}
GUESSES: dict[str, Guesses | None] = {
    "none": None,
    "right chains": Guesses(1.0),
    "wrong chains": Guesses(0.0),
    "mixed chains": Guesses(0.6),
    "right trees": Guesses(1.0, width=2),
    "wrong trees": Guesses(0.0, width=3),
    "mixed trees": Guesses(0.6, width=2),
}
AXES: dict[str, tuple[Any, ...]] = {
    "batch": BATCHES,
    "chunk": CHUNKS,
    "way": tuple(WAYS),
    "guesses": tuple(GUESSES),
    "cached": (False, True),
}

PAIRWISE = list(pairwise(AXES))
PLAIN = [
    {"batch": batch, "chunk": chunk, "way": way, "guesses": "none", "cached": False}
    for batch, chunk, way in itertools.product(BATCHES, CHUNKS, WAYS)
]
EVERYTHING = [
    {"batch": batch, "chunk": chunk, "way": way, "guesses": guesses, "cached": cached}
    for batch, (chunk, way, guesses, cached) in zip(
        itertools.cycle(BATCHES[::-1]),
        itertools.product(CHUNKS, WAYS, GUESSES, (False, True)),
        strict=False,
    )
]
"""Every chunk x way x guesses x cache, each at one batch."""


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Of many lengths; the longer ones begin alike."""
    random_ids = random.Random(3)
    lengths = [1, 2, 3, 40, 17, 16, 15, 8, 9, 33, 5, 24, 1, 31, 12, 7, 20]
    known = [random_ids.randrange(2, 517) for _ in range(13)]
    listed = []
    for length in lengths:
        beginning = known if length > len(known) else []
        rest = [random_ids.randrange(2, 517) for _ in range(length - len(beginning))]
        listed.append(tuple(beginning + rest))
    return tuple(listed)


def params() -> list[SamplingParams]:
    """Greedy, and sampled with seeds; one or three sequences; filters, penalties, stops: 33 in all."""
    common = {"max_tokens": 10, "logprobs": 3}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11, "n": 3},
        {"temperature": 1.0, "seed": 2**64 - 1},
        {"temperature": 0.7, "seed": 5, "top_p": 0.8, "top_k": 50, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "ignore_eos": True},
        {"temperature": 1.3, "seed": 6, "min_p": 0.02, "n": 3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(2, 60)), "min_tokens": 4},
        {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.6, "logit_bias": {5: 2.0}, "n": 3},
    ]
    chosen = [kinds[number % len(kinds)] for number in range(len(prompts()))]
    return [SamplingParams(**(common | kind)) for kind in chosen]


def config(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float64",
        "kv_cache": {"block_size": BLOCK_SIZE},
        "threads": 1,
    }


_alone: dict[str, Traces] = {}


def alone(family: str, model: Path) -> Traces:
    """Each sequence by itself, a prompt in one piece."""
    if family not in _alone:
        _alone[family] = run_case(config(model), Case(batch=1), prompts(), params())
    return _alone[family]


def run(family: str, model: Path, case: Case, **objects: Any) -> Traces:
    """The case under the built-in scheduler, unless it is one of disorder."""
    known = alone(family, model)
    scheduler = FCFS(SchedulerContext(case.batch, case.budget, MAX_MODEL_LEN))
    objects = {"scheduler": scheduler, **objects}
    return run_case(config(model), case, prompts(), params(), known, **objects)


def check(family: str, models: Mapping[str, Path], row: Mapping[str, Any]) -> None:
    case = Case(
        row["batch"],
        row["chunk"],
        guesses=GUESSES[row["guesses"]],
        cached=row["cached"],
        **WAYS[row["way"]],
    )
    got = run(family, models[family], case)
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
@pytest.mark.parametrize("row", PAIRWISE[::16], ids=str)
def test_other_families(tiny_models: dict[str, Path], family: str, row: dict[str, Any]) -> None:
    check(family, tiny_models, row)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_every_batch_chunk_and_way(
    tiny_models: dict[str, Path], family: str, row: dict[str, Any]
) -> None:
    check(family, tiny_models, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "row"),
    [
        *(("llama", row) for row in EVERYTHING),
        *(("mistral", row) for row in EVERYTHING[::3]),
    ],
    ids=str,
)
def test_every_guess_and_cache(
    tiny_models: dict[str, Path], family: str, row: dict[str, Any]
) -> None:
    check(family, tiny_models, row)


class Counting(Observer):
    """Counts what the cases are there for."""

    def __init__(self) -> None:
        self.num_preempted = self.num_tried = self.num_accepted = 0
        self.num_steps = self.most_prefilled = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_steps += 1
            self.num_preempted += event.num_preempted
            self.num_tried += event.num_drafts_tried
            self.num_accepted += event.num_drafts_accepted
            self.most_prefilled = max(self.most_prefilled, event.num_prefill_tokens)

    def close(self) -> None:
        pass


def counted(model: Path, case: Case, **objects: Any) -> Counting:
    counting = Counting()
    got = run("llama", model, case, observer=counting, **objects)
    assert differences(alone("llama", model), got, tolerance=1e-5) == []
    return counting


def test_a_small_pool_does_preempt(tiny_models: dict[str, Path]) -> None:
    case = Case(batch=17, chunk=64, pool=NEEDS_PREEMPTION)
    assert counted(tiny_models["llama"], case).num_preempted > 3


def test_a_chunk_is_of_one_sequence(tiny_models: dict[str, Path]) -> None:
    one, whole = (counted(tiny_models["llama"], Case(batch=33, chunk=chunk)) for chunk in (1, None))
    # The longest prompt of 40 tokens takes as many steps, whatever runs beside it.
    assert one.num_steps >= whole.num_steps + 39 - 10
    assert one.most_prefilled <= 33 < whole.most_prefilled


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_guesses_are_right_wrong_and_mixed(tiny_models: dict[str, Path], kind: str) -> None:
    def share(name: str) -> float:
        case = Case(batch=7, guesses=GUESSES[f"{name} {kind}"])
        counting = counted(tiny_models["llama"], case)
        assert counting.num_tried > 50
        return counting.num_accepted / counting.num_tried

    assert share("right") > 0.9
    assert 0.2 < share("mixed") < 0.9
    assert share("wrong") == 0.0


class CountingCache(DictCache):
    """Counts hits."""

    num_hits = 0

    def match(self, prefix: Prefix, limit: int) -> Hit:
        hit = super().match(prefix, limit)
        self.num_hits += hit.num_tokens > 0
        return hit


@pytest.mark.parametrize("pool", [None, NEEDS_PREEMPTION])
def test_prefixes_are_found(tiny_models: dict[str, Path], pool: int | None) -> None:
    group = KVGroup((0,), 1, 1, BLOCK_SIZE, None, "none", "float32")
    known = CountingCache(PrefixCacheContext((group,), (1,), ""))
    counted(tiny_models["llama"], Case(batch=2, cached=True, pool=pool), prefix_cache=known)
    assert known.num_hits > 5
