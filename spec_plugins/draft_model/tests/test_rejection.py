"""Where drafts are verified by rejection, answers have the target's distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pegboard import SamplingParams
from pegboard.testing.chi_square import p_of_counts
from pegboard.testing.invariance import Case, differences, run_case
from pegboard.testing.tiny import write_tiny_model

VOCAB = 9
PROMPT = (3, 1, 4, 1, 5)
TEMPERATURE = 0.8
NUM_TOKENS = 3
NUM_SEQS = 2400
LEAST_P = 1e-5
"""Of a chi-square test. What is sound is below it once in 100,000 runs; and seeds are fixed."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": VOCAB, "dtype": "float64"}
    write_tiny_model(folder / "t", **sizes)
    write_tiny_model(folder / "d", seed=5, **sizes)
    return {
        "model": str(folder / "t"),
        "dtype": "float64",
        "max_model_len": 64,
        "threads": 1,
        "kv_cache": {"block_size": 4},
        "drafter": {
            "name": "draft_model",
            "model": str(folder / "d"),
            "num_speculative_tokens": 2,
            "verification": "rejection",
        },
    }


def expected(folder: Path) -> dict[tuple[int, ...], float]:
    """The probability of each text of so many tokens, by the target alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    texts: list[tuple[int, ...]] = [()]
    of_texts = torch.ones(1, dtype=torch.float64)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        of_texts = (of_texts[:, None] * (logits / TEMPERATURE).softmax(dim=1)).flatten()
        texts = [(*text, token) for text in texts for token in range(VOCAB)]
    return dict(zip(texts, of_texts.tolist(), strict=True))


@pytest.mark.parametrize("sampling", ["noise", "greedy"])
def test_answers_have_the_distribution_of_the_target(config: dict[str, Any], sampling: str) -> None:
    drafter = {**config["drafter"], "options": {"sampling": sampling}}
    params = [
        SamplingParams(
            temperature=TEMPERATURE, n=100, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed
        )
        for seed in range(NUM_SEQS // 100)
    ]
    found = run_case({**config, "drafter": drafter}, Case(batch=64), [PROMPT] * len(params), params)
    counts = Counter(trace.tokens for trace in found.values())
    assert counts.total() == NUM_SEQS
    assert p_of_counts(counts, expected(Path(config["model"]))) > LEAST_P


def test_greedy_answers_are_those_without_a_drafter(config: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)]
    plain = {key: value for key, value in config.items() if key != "drafter"}
    without = run_case(plain, Case(batch=1), [PROMPT], params)
    assert not differences(without, run_case(config, Case(batch=1), [PROMPT], params), 1e-9)


@pytest.mark.parametrize("vocab_size", [7, 12])
def test_a_vocabulary_that_is_padded_otherwise_is_no_fault(
    config: dict[str, Any], tmp_path: Path, vocab_size: int
) -> None:
    for name, size in (("t", 600), ("d", vocab_size + 590)):
        write_tiny_model(
            tmp_path / name, num_hidden_layers=1, tokenizer=True, vocab_size=size, dtype="float64"
        )
    drafter = {**config["drafter"], "model": str(tmp_path / "d")}
    params = [SamplingParams(temperature=1.2, n=4, max_tokens=9, ignore_eos=True, seed=1)]
    models = {**config, "model": str(tmp_path / "t"), "drafter": drafter}
    assert len(run_case(models, Case(batch=4), [PROMPT], params)) == 4
