"""The comparison of runs sees every kind of difference."""

from __future__ import annotations

import itertools
from dataclasses import replace

from pegboard.testing.invariance import Case, Guesses, Trace, differences, pairwise

BASE = {(0, 0): Trace((1, 2, 3), (-0.5, -1.0, -0.2), "length")}


def test_equal_runs_have_no_differences() -> None:
    assert differences(BASE, dict(BASE)) == []


def test_every_difference_is_a_line() -> None:
    for other in (
        {},
        {**BASE, (0, 1): BASE[0, 0]},
        {(0, 0): Trace((1, 2, 4), (-0.5, -1.0, -0.2), "length")},
        {(0, 0): Trace((1, 2), (-0.5, -1.0), "length")},
        {(0, 0): Trace((1, 2, 3), (-0.5, -1.0, -0.2), "stop")},
        {(0, 0): Trace((1, 2, 3), (-0.5, -1.0, -0.21), "length")},
        {(0, 0): Trace((1, 2, 3), (-0.5, -1.0, float("nan")), "length")},
        {(0, 0): Trace((1, 2, 3), (), "length")},
        {(0, 0): replace(BASE[0, 0], stop_reason="x")},
        {(0, 0): replace(BASE[0, 0], text="x")},
        {(0, 0): replace(BASE[0, 0], prompt_logprobs=(-0.5,))},
    ):
        assert len(differences(BASE, other, tolerance=1e-5)) == 1, other


def test_logprobs_within_the_tolerance_are_equal() -> None:
    near = {(0, 0): Trace((1, 2, 3), (-0.5, -1.0, -0.2000001), "length")}
    assert differences(BASE, near, tolerance=1e-5) == []
    assert len(differences(BASE, near)) == 1


def test_pairwise_holds_every_pair() -> None:
    axes = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False, None)}
    rows = list(pairwise(axes))
    for first, second in itertools.combinations(axes, 2):
        seen = {(row[first], row[second]) for row in rows}
        assert seen == set(itertools.product(axes[first], axes[second]))
    assert len(rows) < 18


def test_a_case_becomes_a_config() -> None:
    case = Case(batch=7, chunk=1, budget=50, pool=4096, guesses=Guesses(1.0, num_nodes=3))
    config = case.config({"model": "m", "kv_cache": {"block_size": 4}})
    assert config["scheduler"] == {"max_num_seqs": 7, "max_num_batched_tokens": 50}
    assert config["kv_cache"] == {"block_size": 4, "memory": 4096}
    assert config["drafter"]["num_speculative_tokens"] == 3
