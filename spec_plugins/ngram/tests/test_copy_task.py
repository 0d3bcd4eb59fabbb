"""On a real model, an answer that repeats its prompt takes few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.request import SequenceDelta

NUM_TOKENS = 96
SOURCE = Path(__file__).parents[1] / "pegboard_ngram" / "hit_rates.py"


def answer(model: str, drafter: dict[str, Any] | None) -> tuple[list[int], int]:
    """Greedy tokens that go on with a source text that has begun for the second time, and the steps
    that they took."""
    config: dict[str, Any] = {"model": model, "max_model_len": 1024, "seed": 1}
    if drafter is not None:
        config["drafter"] = drafter
    text = SOURCE.read_text()
    with Engine(config) as engine:
        assert engine.tokenizer is not None
        prompt = engine.tokenizer.encode(f"{text}\n{text[:200]}")
        engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
        deltas: list[SequenceDelta] = []
        num_steps = 0
        while engine.has_work():
            deltas += engine.step()
            num_steps += 1
        assert not engine.core.cut_off, engine.core.cut_off
    return [token for delta in deltas for token in delta.token_ids], num_steps


@pytest.mark.slow
def test_a_copy_takes_less_than_half_of_the_steps(bundled_model: str) -> None:
    plain, num_steps = answer(bundled_model, None)
    assert len(plain) == NUM_TOKENS
    for name in ("ngram", "suffix"):
        drafter = {"name": name, "num_speculative_tokens": 5, "policy": "fixed"}
        drafted, num_drafting = answer(bundled_model, drafter)
        assert drafted == plain
        assert num_drafting < num_steps / 2, f"{name}: {num_drafting} of {num_steps} steps"
