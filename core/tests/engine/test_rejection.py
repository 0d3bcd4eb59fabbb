"""Requests whose drafts are verified by rejection: their distribution, their seeds, and all else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from pegboard import Engine, SamplingParams
from pegboard.interfaces.drafter import Observation
from pegboard.step import Drafts
from pegboard.testing.chi_square import p_of_samples
from pegboard.testing.drawing_drafter import DrawingDrafter
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.tiny import write_tiny_model

VOCAB = 9
LEAST_P = 1e-5
"""Of a chi-square test. What is sound is below it once in 100,000 runs; and seeds are fixed."""

PROMPT = (3, 1, 4, 1, 5)
REJECTION = {"drafter": {"num_speculative_tokens": 3, "verification": "rejection"}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=7, frequency_penalty=0.6, n=100, max_tokens=3, ignore_eos=True
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model") / "m"
    write_tiny_model(folder, num_hidden_layers=1, vocab_size=VOCAB, dtype="float64")
    settings = {
        "dtype": "float64",
        "max_model_len": 64,
        "threads": 1,
        "kv_cache": {"block_size": 4},
    }
    return {"model": str(folder), **settings}


def run(config: Any, params: list[SamplingParams], drafter: Any = None, **case: Any) -> Traces:
    """The outcome of requests of one prompt; with a drafter by rejection."""
    objects = {} if drafter is None else {"drafter": drafter}
    settings = {} if drafter is None else REJECTION
    way = Case(**{"batch": 64, "settings": settings, **case})
    return run_case(config, way, [PROMPT] * len(params), params, **objects)


def seeded(params: SamplingParams, seeds: range) -> list[SamplingParams]:
    return [msgspec.structs.replace(params, seed=seed) for seed in seeds]


def alike(first: Traces, second: Traces) -> float:
    """The probability that two samples of one distribution differ so much."""
    return p_of_samples(*(Counter(t.tokens for t in each.values()) for each in (first, second)))


class Choosing(DrawingDrafter):
    """Says that it draws, and takes the most likely tokens."""

    manifest = DrawingDrafter.manifest

    def propose_sampled(self, seen: Observation) -> Any:
        drafts, drawn_from = super().propose_sampled(seen)
        likeliest = drawn_from.argmax(dim=1).numpy().astype(np.int32)
        return Drafts(
            rows=drafts.rows, offsets=drafts.offsets, token_ids=likeliest, parents=drafts.parents
        ), drawn_from


def test_answers_have_the_distribution_of_those_without_a_drafter(config: Any) -> None:
    plain = run(config, seeded(SAMPLED, range(20)))
    assert alike(plain, run(config, seeded(SAMPLED, range(20, 40)), DrawingDrafter)) > LEAST_P
    assert alike(plain, run(config, seeded(SAMPLED, range(20, 40)), Choosing)) < LEAST_P


def test_greedy_answers_are_those_without_a_drafter(config: Any) -> None:
    plain = run(config, [GREEDY])
    assert not differences(plain, run(config, [GREEDY], DrawingDrafter), 1e-9)


def test_a_seed_gives_the_same_answers_with_the_same_drafts(config: Any) -> None:
    params = seeded(SamplingParams(temperature=1.0, n=3, max_tokens=12, ignore_eos=True), range(4))
    found = run(config, params, DrawingDrafter)
    assert not differences(found, run(config, params, DrawingDrafter, batch=5))
    assert differences(found, run(config, params))
    other = seeded(params[0], range(4, 8))
    assert differences(found, run(config, other, DrawingDrafter))


def test_logprobs_are_the_targets_of_the_tokens_answered(config: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
    (trace,) = run(config, [params], DrawingDrafter).values()
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    text = (*PROMPT, *trace.tokens)

    with Engine(config) as engine:
        engine.submit(text, scored)
        (delta,) = [delta for delta in engine.step() if delta.prompt_logprobs]
    assert delta.prompt_logprobs is not None
    expected = [one.logprob for one in delta.prompt_logprobs if one][len(PROMPT) - 1 :]
    assert trace.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        {"disorder": 3, "batch": 5},
        {"interruptions": 4, "batch": 7, "chunk": 2},
        {"pool": 2**15, "batch": 9, "arrivals": 2},
        {"settings": {**REJECTION, "executor": {"depth": 2}}, "interruptions": 1},
    ],
    ids=str,
)
def test_all_requests_end_as_they_should(config: Any, case: Any) -> None:
    params = [
        SamplingParams(temperature=t, n=3, max_tokens=9, stop_token_ids=(2,), seed=seed, logprobs=1)
        for seed, t in enumerate((1.0, 0.0, 0.7, 1.3))
    ]
    found = run(config, params, DrawingDrafter, **case)
    assert len(found) == 12
    for trace in found.values():
        ended = trace.finish_reason == "stop" and not {0, 1, 2} & set(trace.tokens[:-1])
        assert ended or (trace.finish_reason == "length" and len(trace.tokens) == 9)
