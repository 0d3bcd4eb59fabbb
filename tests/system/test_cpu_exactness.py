"""With the kernels of pegboard-cpu, the real model's bits do not hang on how it is run, in float32,
whichever scheduler, allocator and prefix cache run it.

Tokens and logprobs are compared for equality: every kernel promises `row_invariant`.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from pegboard import Engine
from pegboard.request import SamplingParams
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

MAX_MODEL_LEN = 160
NEEDS_PREEMPTION = 30 * 2 * 3 * 64 * 4 * (4 * MAX_MODEL_LEN)
"""Bytes of KV of four longest sequences: layers x (k, v) x heads x elements x float32 x tokens."""

WAYS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tight budget": {"budget": 40},
    "small pool": {"pool": NEEDS_PREEMPTION},
    "disorder in a small pool": {"disorder": 2, "pool": NEEDS_PREEMPTION},
}
GUESSES: dict[str, Guesses | None] = {
    "none": None,
    "mixed chains": Guesses(0.6),
    "mixed trees": Guesses(0.6, width=2),
}
AXES: dict[str, tuple[Any, ...]] = {
    "batch": BATCHES,
    "chunk": CHUNKS,
    "way": tuple(WAYS),
    "guesses": tuple(GUESSES),
    "cached": (False, True),
    "threads": (1, 2, 3),
    "block_size": (1, 16),
}
ROWS = list(pairwise(AXES))
QUICK = [row for row in ROWS if row["batch"] > 5 and row["chunk"] != 1][:2]

KV: dict[str, dict[str, Any]] = {
    "paged": {},
    "trie": {"prefix_cache": "trie"},
    "contiguous": {"kv_cache": {"allocator": "contiguous"}},
}
PLUGINS: dict[str, tuple[Any, ...]] = {
    "scheduler": ("priority", "prefix_aware", "fair", "reserve", "shortest", "static"),
    "kv": tuple(KV),
    "batch": BATCHES,
    "budget": (40, 2048),
    "pool": (NEEDS_PREEMPTION, None),
    "guesses": tuple(GUESSES),
    "threads": (1, 2, 3),
    "block_size": (1, 16),
}
PLUGIN_ROWS = list(pairwise(PLUGINS))
TRIE_AND_CLASSES: list[dict[str, Any]] = [
    PLUGIN_ROWS[0] | {"scheduler": "priority", "kv": "trie"} | row
    for row in (
        {"batch": 3, "pool": None, "guesses": "none", "threads": 2},
        {"batch": 7, "pool": NEEDS_PREEMPTION, "guesses": "mixed trees", "block_size": 16},
        {"batch": 33, "budget": 40, "guesses": "none", "block_size": 1},
    )
]


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Of many lengths; the longer ones begin alike."""
    random_ids = random.Random(5)
    known = [random_ids.randrange(100, 49152) for _ in range(20)]
    lengths = (1, 2, 17, 140, 33, 3, 48, 8, 25)
    return tuple(
        tuple((known if n > 20 else []) + [random_ids.randrange(100, 49152) for _ in range(n)])[:n]
        for n in lengths
    )


def params() -> list[SamplingParams]:
    """Greedy, and sampled with filters; 33 sequences."""
    common: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11, "n": 9},
        {"temperature": 0.8, "seed": 5, "top_p": 0.8, "top_k": 50},
    ]
    return [SamplingParams(**common, **kinds[i % 3]) for i in range(len(prompts()))]


def config(model: str, threads: int = 1, block_size: int = 16) -> dict[str, Any]:
    return {
        "model": model,
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "kernels": "cpu",
        "attention": "cpu",
        "numerics": "invariant",
        "threads": threads,
        "kv_cache": {"block_size": block_size},
        "prefix_cache": "none",
    }


@pytest.fixture(scope="module")
def alone(bundled_model: str) -> Traces:
    """Each sequence by itself, a prompt in one piece."""
    return run_case(config(bundled_model), Case(batch=1), prompts(), params())


def check(model: str, alone: Traces, row: dict[str, Any]) -> None:
    case = Case(
        row["batch"],
        row["chunk"],
        guesses=GUESSES[row["guesses"]],
        cached=row["cached"],
        **WAYS[row["way"]],
    )
    base = config(model, row["threads"], row["block_size"])
    got = run_case(base, case, prompts(), params(), alone)
    assert differences(alone, got) == [], str(row)


def test_33_sequences_differ_and_some_are_longer_than_two_tiles_of_attention(
    alone: Traces,
) -> None:
    assert len(alone) == 33
    assert len({trace.tokens for trace in alone.values()}) > 25
    assert max(len(prompt) for prompt in prompts()) > 128


def test_the_composition_promises_it(bundled_model: str) -> None:
    with Engine(config(bundled_model)) as engine:
        assert engine.prepared.composition.numerics == "invariant"


@pytest.mark.parametrize("row", QUICK, ids=str)
def test_some_ways_to_run(bundled_model: str, alone: Traces, row: dict[str, Any]) -> None:
    check(bundled_model, alone, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row not in QUICK], ids=str)
def test_every_pair_of_ways_to_run(bundled_model: str, alone: Traces, row: dict[str, Any]) -> None:
    check(bundled_model, alone, row)


def check_plugins(model: str, alone: Traces, row: dict[str, Any]) -> None:
    """Requests of three classes and tenants, which come two at a time."""
    for package in ("pegboard_prefix_cache", "pegboard_schedulers", "pegboard_baselines"):
        pytest.importorskip(package)
    case = Case(
        row["batch"],
        budget=row["budget"],
        pool=row["pool"],
        guesses=GUESSES[row["guesses"]],
        arrivals=2,
        settings={**KV[row["kv"]], "scheduler": {"name": row["scheduler"]}},
    )
    fields = [{"priority": -(i % 3), "tenant": "ab"[i % 2]} for i in range(len(prompts()))]
    base = config(model, row["threads"], row["block_size"])
    got = run_case(base, case, prompts(), params(), alone, fields)
    assert differences(alone, got) == [], str(row)


@pytest.mark.parametrize("row", TRIE_AND_CLASSES, ids=str)
def test_prefixes_forks_and_classes(bundled_model: str, alone: Traces, row: dict[str, Any]) -> None:
    check_plugins(bundled_model, alone, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", PLUGIN_ROWS, ids=str)
def test_every_pair_of_plugins(bundled_model: str, alone: Traces, row: dict[str, Any]) -> None:
    check_plugins(bundled_model, alone, row)
