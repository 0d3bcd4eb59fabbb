"""The classical composition in a real engine: what goes with it, and that its tokens are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import Config, Engine, SamplingParams, errors
from pegboard.testing.tiny import write_tiny_model

CLASSICAL = {"allocator": "contiguous", "scheduler": "static"}
PAGED = {"allocator": "paged", "scheduler": "fcfs"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def _config(model: Path, allocator: str, scheduler: str, **values: Any) -> Config:
    return Config.from_values(
        {
            "model": str(model),
            "dtype": "float64",
            "max_model_len": 48,
            "kv_cache": {"allocator": allocator, "block_size": 4},
            "prefix_cache": "none",
            "scheduler": {"name": scheduler, "max_num_seqs": 3, "max_num_batched_tokens": 16},
            **values,
        }
    )


def _tokens(config: Config) -> list[tuple[int, ...]]:
    """The outputs of seven prompts of mixed lengths, greedy and sampled in turn."""
    with Engine(config) as engine:
        requests = [
            engine.submit(
                [(7 * number + i) % 50 + 1 for i in range(1 + 5 * number)],
                SamplingParams(
                    temperature=float(number % 2), seed=number, max_tokens=4 + 2 * number
                ),
            ).request_id
            for number in range(7)
        ]
        tokens: dict[str, list[int]] = {request: [] for request in requests}
        while engine.has_work():
            for delta in engine.step():
                tokens[delta.request_id].extend(delta.token_ids)
    return [tuple(tokens[request]) for request in requests]


def test_tokens_are_those_of_the_paged_composition(model: Path) -> None:
    expected = _tokens(_config(model, **PAGED))
    assert all(expected)
    for allocator, scheduler in (("contiguous", "static"), ("contiguous", "fcfs")):
        assert _tokens(_config(model, allocator, scheduler)) == expected
    assert _tokens(_config(model, "paged", "static")) == expected


def test_tokens_under_a_pool_for_two_sequences(model: Path) -> None:
    expected = _tokens(_config(model, **PAGED))
    config = _config(model, **CLASSICAL)
    with Engine(config) as engine:
        ledger = engine.prepared.ledger
    memory = 25 * sum(ledger.block_bytes)
    small = {"allocator": "contiguous", "block_size": 4, "memory": memory}
    for scheduler in ("static", "fcfs"):
        assert _tokens(_config(model, "contiguous", scheduler, kv_cache=small)) == expected


def test_the_prefix_cache_is_left_out_and_the_reason_said(model: Path) -> None:
    with Engine(_config(model, **CLASSICAL, prefix_cache="auto")) as engine:
        composition = engine.prepared.composition
    assert composition.parts["prefix_cache"].name == "none"


def test_a_prefix_cache_that_is_asked_for_is_refused(model: Path) -> None:
    with pytest.raises(errors.CompositionRefused, match="prefix_cache"):
        Engine(_config(model, **CLASSICAL, prefix_cache="on"))
