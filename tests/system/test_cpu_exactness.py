"""With the kernels of pegboard-cpu, the real model's bits do not hang on how it is run, in float32, for
each encoding of KV, whichever scheduler, allocator and prefix cache run it.

Tokens and logprobs are compared for equality: every kernel promises `row_invariant`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pegboard import Engine
from pegboard.testing.invariance import (
    BATCHES,
    CHUNKS,
    Case,
    Guesses,
    Traces,
    differences,
    pairwise,
    run_case,
    various_params,
    various_prompts,
)

MAX_MODEL_LEN = 160
NUM_HEADS = 30 * 2 * 3 * (4 * MAX_MODEL_LEN)
"""Heads of keys and values of four longest sequences: layers x (k, v) x heads x tokens."""

NEEDS_PREEMPTION = {
    "none": NUM_HEADS * 64 * 4,
    "fp8_e4m3": NUM_HEADS * (64 + 4),
    "int8": NUM_HEADS * (64 + 4),
}
"""Bytes of KV of four longest sequences, by encoding."""

WAYS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tight budget": {"budget": 40},
    "small pool": {},
    "disorder in a small pool": {"disorder": 2},
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
    "encoding": tuple(NEEDS_PREEMPTION),
    "depth": (1, 2),
}
ROWS = list(pairwise(AXES))
QUICK, *MORE = [
    dict(zip(AXES, values, strict=True))
    for values in (
        (17, 7, "small pool", "mixed trees", True, 2, 16, "int8", 1),
        (7, 64, "small pool", "none", True, 1, 16, "none", 2),
        (5, 64, "disorder in a small pool", "mixed trees", True, 2, 16, "fp8_e4m3", 2),
    )
]

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
    "pool": (NEEDS_PREEMPTION["none"], None),
    "guesses": tuple(GUESSES),
    "threads": (1, 2, 3),
    "block_size": (1, 16),
    "depth": (1, 2),
}
PLUGIN_ROWS = list(pairwise(PLUGINS))
TRIE_AND_CLASSES, *MORE_CLASSES = [
    PLUGIN_ROWS[0] | {"scheduler": "priority", "kv": "trie"} | row
    for row in (
        {"batch": 7, "pool": NEEDS_PREEMPTION["none"], "guesses": "mixed trees", "block_size": 16},
        {"batch": 3, "pool": None, "guesses": "none", "threads": 2, "depth": 2},
        {"batch": 33, "budget": 40, "guesses": "none", "block_size": 1, "depth": 2},
    )
]
PROMPTS = various_prompts((1, 2, 17, 140, 33, 3, 48, 8, 25), range(100, 49152))
PARAMS = various_params(len(PROMPTS))
"""Of 33 sequences."""


def config(model: str, encoding: str, threads: int = 1, block_size: int = 16) -> dict[str, Any]:
    return {
        "model": model,
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "kernels": "cpu",
        "attention": "cpu",
        "numerics": "invariant",
        "threads": threads,
        "kv_cache": {"block_size": block_size, "encoding": encoding},
        "prefix_cache": "none",
    }


@cache
def alone(model: str, encoding: str) -> Traces:
    """Each sequence by itself, a prompt in one piece."""
    return run_case(config(model, encoding), Case(batch=1), PROMPTS, PARAMS)


def check(model: str, row: dict[str, Any]) -> None:
    encoding = row["encoding"]
    case = Case(
        row["batch"],
        row["chunk"],
        guesses=GUESSES[row["guesses"]],
        cached=row["cached"],
        pool=NEEDS_PREEMPTION[encoding] if "small pool" in row["way"] else None,
        settings={"executor": {"depth": row["depth"]}},
        **WAYS[row["way"]],
    )
    base = config(model, encoding, row["threads"], row["block_size"])
    expected = alone(model, encoding)
    got = run_case(base, case, PROMPTS, PARAMS, expected)
    assert differences(expected, got) == [], str(row)


def test_33_sequences_differ_and_some_are_longer_than_two_tiles_of_attention(
    bundled_model: str,
) -> None:
    traces = alone(bundled_model, "none")
    assert len(traces) == 33
    assert len({trace.tokens for trace in traces.values()}) > 25
    assert max(len(prompt) for prompt in PROMPTS) > 128


@pytest.mark.parametrize(
    "encoding", ["int8", *(pytest.param(e, marks=pytest.mark.slow) for e in ("none", "fp8_e4m3"))]
)
def test_the_composition_promises_it(bundled_model: str, encoding: str) -> None:
    with Engine(config(bundled_model, encoding)) as engine:
        assert engine.prepared.composition.numerics == "invariant"


@pytest.mark.parametrize(
    "row", [QUICK, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE)], ids=str
)
def test_some_ways_to_run(bundled_model: str, row: dict[str, Any]) -> None:
    check(bundled_model, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_pair_of_ways_to_run(bundled_model: str, row: dict[str, Any]) -> None:
    check(bundled_model, row)


def check_plugins(model: str, row: dict[str, Any]) -> None:
    """Requests of three classes and tenants, which come two at a time."""
    for package in ("pegboard_prefix_cache", "pegboard_schedulers", "pegboard_baselines"):
        pytest.importorskip(package)
    case = Case(
        row["batch"],
        budget=row["budget"],
        pool=row["pool"],
        guesses=GUESSES[row["guesses"]],
        arrivals=2,
        settings={
            **KV[row["kv"]],
            "scheduler": {"name": row["scheduler"]},
            "executor": {"depth": row["depth"]},
        },
    )
    fields = [{"priority": -(i % 3), "tenant": "ab"[i % 2]} for i in range(len(PROMPTS))]
    base = config(model, "none", row["threads"], row["block_size"])
    expected = alone(model, "none")
    got = run_case(base, case, PROMPTS, PARAMS, expected, fields)
    assert differences(expected, got) == [], str(row)


@pytest.mark.parametrize(
    "row",
    [TRIE_AND_CLASSES, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE_CLASSES)],
    ids=str,
)
def test_prefixes_forks_and_classes(bundled_model: str, row: dict[str, Any]) -> None:
    check_plugins(bundled_model, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", PLUGIN_ROWS, ids=str)
def test_every_pair_of_plugins(bundled_model: str, row: dict[str, Any]) -> None:
    check_plugins(bundled_model, row)
