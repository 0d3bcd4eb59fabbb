"""With the kernels of pegboard-cpu a real model says the same with drafts, bit for bit, tokens and
logprobs, greedy and sampled, of packed and of float32 weights, in chains and trees.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.request import SamplingParams
from pegboard.testing.invariance import Case, Guesses, Traces, differences, run_case

ASKED = (
    "Write a short story about {}.",
    "What is {}?",
    "List three facts about {}.",
    "Explain {} to a child, then repeat the explanation word by word.",
    "Translate into French: I like {}.",
)
THINGS = (
    "a dragon",
    "the sun",
    "tea",
    "a river",
    "music",
    "bread",
    "a clock",
    "snow",
    "gold",
    "bees",
)
FEW, FEW_TOKENS = 8, 20
MANY, MANY_TOKENS = 50, 128

WEIGHTS: dict[str, dict[str, Any]] = {
    "packed": {"quantizer": {"name": "gguf", "options": {"mode": "packed"}}},
    "float32": {"quantizer": {"name": "gguf", "options": {"mode": "dequantize"}}},
}
DRAFTS: dict[str, Guesses | dict[str, Any]] = {
    "chain": Guesses(0.8, num_nodes=4),
    "tree": Guesses(0.7, width=2, num_nodes=6),
    "ngram": {"name": "ngram", "num_speculative_tokens": 5},
    "suffix": {"name": "suffix", "num_speculative_tokens": 5},
    "eagle chain": {"name": "eagle", "num_speculative_tokens": 3},
    "eagle tree": {
        "name": "eagle",
        "num_speculative_tokens": 6,
        "options": {"top_k": 3, "depth": 3},
    },
    "adaptive": {"name": "ngram", "num_speculative_tokens": 6, "policy": "adaptive"},
}


@cache
def prompts(model: str) -> tuple[tuple[int, ...], ...]:
    texts = [asked.format(thing) for thing in THINGS for asked in ASKED]
    with LLM(model, show_progress=False, max_model_len=64) as llm:
        assert llm.tokenizer is not None
        return tuple(
            tuple(llm.tokenizer.encode_chat([{"role": "user", "content": text}])) for text in texts
        )


def params(count: int, max_tokens: int) -> list[SamplingParams]:
    """In turn greedy, plainly sampled, and with filters and penalties."""
    common: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 2}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3},
    ]
    return [SamplingParams(**common, **kinds[i % len(kinds)], seed=i) for i in range(count)]


def config(model: str, weights: str) -> dict[str, Any]:
    return {
        "model": model,
        "max_model_len": 256,
        "dtype": "float32",
        "kernels": "cpu",
        "attention": "cpu",
        "numerics": "invariant",
        "threads": 2,
        "prefix_cache": "none",
        **WEIGHTS[weights],
    }


class Counts(Observer):
    """Counts drafts."""

    def __init__(self) -> None:
        self.num_tried = self.num_accepted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted

    def close(self) -> None: ...


@cache
def plain(model: str, weights: str, count: int, max_tokens: int) -> Traces:
    """Without a drafter."""
    asked = params(count, max_tokens)
    return run_case(config(model, weights), Case(batch=count), prompts(model)[:count], asked)


def check(
    model: str, weights: str, drafts: str, count: int, max_tokens: int, head: Path | None = None
) -> None:
    expected = plain(model, weights, count, max_tokens)
    chosen, counts = DRAFTS[drafts], Counts()
    case = Case(batch=count)
    if isinstance(chosen, Guesses):
        case = Case(batch=count, guesses=chosen)
    else:
        pytest.importorskip(
            f"pegboard_{chosen['name']}" if chosen["name"] == "eagle" else "pegboard_ngram"
        )
        case = Case(
            batch=count,
            settings={"drafter": chosen if head is None else chosen | {"model": str(head)}},
        )
    asked = params(count, max_tokens)
    base = config(model, weights)
    got = run_case(base, case, prompts(model)[:count], asked, expected, observer=counts)
    assert differences(expected, got) == []
    assert counts.num_tried > count
    assert counts.num_accepted > (count if isinstance(chosen, Guesses) else 0)


@pytest.mark.parametrize(
    ("weights", "drafts"), [("packed", "chain"), ("packed", "tree"), ("float32", "tree")]
)
def test_a_few_prompts(bundled_model: str, weights: str, drafts: str) -> None:
    check(bundled_model, weights, drafts, FEW, FEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["chain", "tree", "ngram", "suffix", "adaptive"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_fifty_prompts(bundled_model: str, weights: str, drafts: str) -> None:
    check(bundled_model, weights, drafts, MANY, MANY_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["eagle chain", "eagle tree"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_fifty_prompts_with_a_trained_head(
    bundled_model: str, shared_folder: Path, weights: str, drafts: str
) -> None:
    head = shared_folder / "fixtures" / "eagle" / "smollm2-eagle"
    if not head.is_dir():
        pytest.skip("the shared material holds no fixtures/eagle/smollm2-eagle")
    check(bundled_model, weights, drafts, MANY, MANY_TOKENS, head)
