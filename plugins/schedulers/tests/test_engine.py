"""In a real engine a policy changes who waits, and no token."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.errors import UserError
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.request import SequenceDelta
from pegboard.testing.tiny import write_tiny_model

POLICIES: dict[str, dict[str, Any]] = {
    "priority": {"max_wait": 0.01},
    "prefix_aware": {"window": 3, "max_overtakes": 1},
    "fair": {"weights": {"a": 2.0}},
    "reserve": {},
    "shortest": {"max_wait": 0.01},
}
KV_BYTES = 2 * 2 * 24 * 4
"""Of a token: layers x (k, v) x head x float32."""

Tokens = dict[tuple[int, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Preemptions(Observer):
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.count += event.num_preempted

    def close(self) -> None:
        pass


def generate(
    model: Path, name: str, options: Mapping[str, Any], num_tokens: int, *observers: Observer
) -> Tokens:
    """Token ids of each sequence, from a pool of so many tokens of KV."""
    rng = random.Random(1)
    config = {
        "model": str(model),
        "max_model_len": 64,
        "threads": 1,
        "prefix_cache": "none",
        "kv_cache": {"block_size": 4, "memory": num_tokens * KV_BYTES},
        "scheduler": {
            "name": name,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 24,
            "options": dict(options),
        },
    }
    deltas: list[SequenceDelta] = []
    with Engine(config, observer=list(observers)) as engine:
        numbers = {}
        for number in range(14):
            prompt = [rng.randrange(2, 517) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(
                max_tokens=rng.randint(1, 30), seed=number, n=1 + (number % 5 == 0)
            )
            priority, tenant = number % 3, "ab"[number % 2]
            request = engine.submit(prompt, params, priority=priority, tenant=tenant)
            numbers[request.request_id] = number
            deltas += engine.step()
        while engine.has_work():
            deltas += engine.step()
    tokens: Tokens = {}
    for delta in deltas:
        assert delta.finish_reason in (None, "stop", "length")
        key = numbers[delta.request_id], delta.index
        tokens[key] = tokens.get(key, ()) + delta.token_ids
    return tokens


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    return generate(model, "fcfs", {}, num_tokens=1000)


@pytest.mark.parametrize("num_tokens", [1000, 104], ids=["plenty", "small pool"])
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_fcfs(
    model: Path, expected: Tokens, name: str, num_tokens: int
) -> None:
    preemptions = Preemptions()
    assert generate(model, name, POLICIES[name], num_tokens, preemptions) == expected
    if name == "reserve":
        assert preemptions.count == 0
    elif num_tokens < 1000:
        assert preemptions.count > 0, "the pool is small for the others"


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("priority", {"max_wait": 0}, "scheduler.options.max_wait"),
        ("prefix_aware", {"windows": 3}, "window"),
        ("fair", {"weights": {"a": -1}}, "scheduler.options.weights"),
        ("shortest", {"max_wait": "long"}, "scheduler.options.max_wait"),
    ],
)
def test_wrong_options_are_named(
    model: Path, name: str, options: Mapping[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        generate(model, name, options, num_tokens=1000)
