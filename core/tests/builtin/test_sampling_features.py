"""Sampling parameters, through the public engine, against the formula written out in numpy.

The logits are those of transformers on the same weights, teacher-forced over what the engine generated.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from pegboard import Engine, SamplingParams
from pegboard.request import SequenceDelta, TokenLogprob
from pegboard.testing.sample import NEAR, Draw, reference_token
from pegboard.testing.tiny import write_tiny_model

VOCAB_SIZE = 31
EOS = 1
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 9, 9, 2, 17), (3,), (8, 30, 8, 12, 4, 0, 22, 8, 19, 7))

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, dtype="float64", vocab_size=VOCAB_SIZE, eos_token_id=EOS)


class Reference:
    """transformers' logits of texts, and what sampling makes of them."""

    def __init__(self, model: Path) -> None:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self._model = loaded.eval()
        self.logits = cache(self._logits)

    def _logits(self, ids: tuple[int, ...]) -> NDArray[np.float64]:
        """float64 [len(ids), vocab_size]"""
        with torch.inference_mode():
            logits: NDArray[np.float64] = self._model(torch.tensor([ids])).logits[0].numpy()
        return logits

    def next_logits(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
    ) -> Logits:
        """The distribution that is sampled from after an output."""
        logits = self.logits((*prompt, *output))[-1].astype(np.float32)
        return processed(logits, prompt, output, params)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def processed(
    logits: Logits, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Logits:
    """Bias, then what may not end the sequence yet, then penalties; an id at a time."""
    counts = Counter(output)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    changed = logits.copy()
    for token, value in enumerate(logits):
        value += np.float32(params.logit_bias.get(token, 0.0))
        if token in ends and len(output) < params.min_tokens:
            value = np.float32(-np.inf)
        if token in prompt or token in counts:
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if token in counts:
            value -= params.presence_penalty + params.frequency_penalty * counts[token]
        changed[token] = value
    return changed


def draw_of(params: SamplingParams, position: int, index: int) -> Draw:
    assert params.seed is not None
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    return Draw(*filters, params.seed, position, index)


def distribution(logits: Logits, params: SamplingParams) -> NDArray[np.float64]:
    """Probability of each id, float64 [vocab_size]."""
    z = logits.astype(np.float64) / params.temperature
    kept = kept_by_definition(z, params)
    weights = np.zeros(len(z))
    weights[kept] = np.exp(z[kept] - z.max())
    weights /= weights.sum()
    return weights


def kept_by_definition(z: NDArray[np.float64], params: SamplingParams) -> list[int]:
    """The ids that filters leave, most likely first, by what `SamplingParams` says of each."""
    ids = sorted((i for i in range(len(z)) if z[i] > -math.inf), key=lambda i: (-z[i], i))
    ids = ids[: params.top_k or None]
    weight = {i: math.exp(z[i] - z[ids[0]]) for i in ids}
    whole = math.fsum(weight.values())
    sizes = range(1, len(ids) + 1)
    reaching = (n for n in sizes if math.fsum(weight[i] for i in ids[:n]) >= params.top_p * whole)
    ids = ids[: next(reaching, len(ids))]
    return [i for i in ids if weight[i] >= params.min_p * weight[ids[0]]]


@dataclass
class Generated:
    """One sequence, its deltas joined."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    last: SequenceDelta


def generate(
    model: Path, requests: Sequence[tuple[Sequence[int], SamplingParams]], **settings: Any
) -> dict[tuple[int, int], Generated]:
    """(request, sequence) to what came of it, all in one engine."""
    config = {"model": str(model), "max_model_len": 64, "threads": 1, **settings}
    deltas: dict[tuple[str, int], list[SequenceDelta]] = {}
    with Engine(config) as engine:
        numbers = {engine.submit(*one).request_id: i for i, one in enumerate(requests)}
        while engine.has_work():
            for delta in engine.step():
                deltas.setdefault((delta.request_id, delta.index), []).append(delta)
    return {
        (numbers[request_id], index): Generated(
            tuple(itertools.chain.from_iterable(delta.token_ids for delta in parts)),
            tuple(itertools.chain.from_iterable(delta.logprobs or () for delta in parts)),
            parts[-1],
        )
        for (request_id, index), parts in deltas.items()
    }


FEATURES: dict[str, tuple[dict[str, Any], ...]] = {
    "temperature": ({"temperature": 0.0}, {"temperature": 0.4}, {"temperature": 2.5}),
    "top_k": ({"top_k": 1}, {"top_k": 4}, {"top_k": 1000}),
    "top_p": ({"top_p": 0.1}, {"top_p": 0.7}),
    "min_p": ({"min_p": 0.3}, {"min_p": 0.9}),
    "repetition": ({"repetition_penalty": 1.9}, {"repetition_penalty": 0.5}),
    "presence": ({"presence_penalty": 2.0}, {"presence_penalty": -2.0}),
    "frequency": ({"frequency_penalty": 1.5}, {"frequency_penalty": -1.0}),
    "bias": ({"logit_bias": {5: 3.5, 9: -100.0, VOCAB_SIZE - 1: 1.0}}, {"logit_bias": {7: 100.0}}),
    "stops": ({"stop_token_ids": (4, 11, 23), "min_tokens": 6}, {"ignore_eos": False}),
}
"""Feature to settings, each of which changes tokens on its own."""


def params_of(seed: int, **values: Any) -> SamplingParams:
    usual = {"ignore_eos": True, "logprobs": 3, "max_tokens": 12, "n": 2, "seed": seed}
    return SamplingParams(**{**usual, **values})


def seeds(count: int) -> Iterator[int]:
    """Small ones, large ones, and both ends of the range."""
    choose = random.Random(3)
    yield from (0, 2**64 - 1)
    for _ in range(count - 2):
        yield choose.getrandbits(choose.choice([8, 32, 64]))


def mixed_requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Each feature alone with several seeds, then all kinds of them together."""
    choose = random.Random(11)
    alone = [values for settings in FEATURES.values() for values in settings]
    combined: list[dict[str, Any]] = []
    for _ in range(40):
        names = choose.sample(sorted(FEATURES), choose.randint(2, len(FEATURES)))
        parts = [choose.choice(FEATURES[name]) for name in names]
        combined.append({key: value for part in parts for key, value in part.items()})
    settings = [*itertools.chain.from_iterable([one] * 3 for one in alone), *combined]
    choose.shuffle(settings)
    drawn = seeds(len(settings))
    return [(choose.choice(PROMPTS), params_of(next(drawn), **values)) for values in settings]


@pytest.fixture(scope="module")
def requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    return mixed_requests()


@pytest.fixture(scope="module")
def together(model: Path, requests: Any) -> dict[tuple[int, int], Generated]:
    """All requests in batches of prompts in pieces and sequences at any length."""
    scheduler = {"max_num_seqs": 13, "max_num_batched_tokens": 17}
    return generate(model, requests, scheduler=scheduler)


def test_every_token_is_that_of_the_formula(
    reference: Reference, requests: Any, together: Mapping[tuple[int, int], Generated]
) -> None:
    num_compared = 0
    for (number, index), generated in together.items():
        prompt, params = requests[number]
        rows = reference.logits((*prompt, *generated.tokens))[len(prompt) - 1 :]
        for i, token in enumerate(generated.tokens):
            logits = processed(rows[i].astype(np.float32), prompt, generated.tokens[:i], params)
            draw = draw_of(params, len(prompt) + i, index)
            expected, margin = reference_token(logits, draw)
            if margin >= NEAR:
                assert token == expected, (params, i)
                num_compared += 1
    assert num_compared > 1500


def test_sequences_end_where_they_should(
    requests: Any, together: Mapping[tuple[int, int], Generated]
) -> None:
    seen: Counter[str] = Counter()
    for (number, _index), generated in together.items():
        params = requests[number][1]
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        at = next((i for i, t in enumerate(generated.tokens) if t in ends), None)
        last = generated.last
        seen[str(last.finish_reason)] += 1
        if at is None:
            assert (last.finish_reason, len(generated.tokens)) == ("length", params.max_tokens)
            continue
        assert last.finish_reason == "stop"
        assert at == len(generated.tokens) - 1 >= params.min_tokens
        named = None if generated.tokens[at] == EOS else generated.tokens[at]
        assert last.stop_reason == named
    assert min(seen["stop"], seen["length"]) > 10


def test_logprobs_are_of_the_model_whatever_was_asked_of_sampling(
    reference: Reference, requests: Any, together: Mapping[tuple[int, int], Generated]
) -> None:
    for (number, _index), generated in together.items():
        prompt = requests[number][0]
        assert len(generated.logprobs) == len(generated.tokens)
        ids = (*prompt, *generated.tokens)
        expected = torch.from_numpy(reference.logits(ids)).log_softmax(-1)
        for i, (token, entry) in enumerate(zip(generated.tokens, generated.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + i]
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
            assert entry.rank == int((row > row[token]).sum()) + 1
            assert list(entry.top_ids) == row.topk(3).indices.tolist()
            assert list(entry.top_logprobs) == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)


def test_a_request_alone_brings_what_it_brings_among_others(
    model: Path, requests: Any, together: Mapping[tuple[int, int], Generated]
) -> None:
    some = range(0, len(requests), 8)
    alone = generate(model, [requests[i] for i in some], scheduler={"max_num_seqs": 1})
    assert len(alone) == 2 * len(some)
    for (number, index), generated in alone.items():
        assert generated.tokens == together[some[number], index].tokens


def test_every_setting_changes_tokens(model: Path) -> None:
    """Else what is compared above would prove nothing of it."""
    settings = [values for group in FEATURES.values() for values in group]
    settings.remove({"top_k": 1000})  # more than there are: as if it were not set
    drawn = [(prompt, seed) for seed in range(8) for prompt in PROMPTS]
    asked = [
        [(prompt, params_of(seed, **values)) for prompt, seed in drawn]
        for values in ({}, *settings)
    ]
    generated = generate(model, list(itertools.chain.from_iterable(asked)))
    tokens = [one.tokens for _key, one in sorted(generated.items())]
    plain, *others = (tokens[i : i + 2 * len(drawn)] for i in range(0, len(tokens), 2 * len(drawn)))
    for values, other in zip(settings, others, strict=True):
        assert other != plain, values


FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 6},
    {"top_p": 0.35},
    {"top_p": 0.8},
    {"min_p": 0.7},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.6},
    {"top_p": 0.9, "min_p": 0.75},
    {"top_k": 9, "top_p": 0.95, "min_p": 0.6, "logit_bias": {3: -100.0, 4: 4.0}},
    {"min_tokens": 1, "stop_token_ids": (2, 5), "ignore_eos": False},
    {"repetition_penalty": 1.7, "top_k": 5},
)


def test_the_ids_that_are_sampled_are_those_that_filters_keep(
    model: Path, reference: Reference
) -> None:
    """Every id that is kept comes up, and no other, in one batch of all filters."""
    prompt, count = PROMPTS[0], 400
    asked = [
        params_of(seed, temperature=8.0, max_tokens=1, logprobs=None, n=count, **values)
        for seed, values in enumerate(FILTERS)
    ]
    generated = generate(model, [(prompt, params) for params in asked])
    for number, params in enumerate(asked):
        z = reference.next_logits(prompt, (), params).astype(np.float64) / params.temperature
        kept = kept_by_definition(z, params)
        seen = {generated[number, index].tokens[0] for index in range(count)}
        assert seen == set(kept), FILTERS[number]


DISTRIBUTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 6},
    {"top_p": 0.85},
    {"min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.6, "presence_penalty": 1.2, "frequency_penalty": -0.8},
    {"presence_penalty": -1.5, "logit_bias": {5: 2.0, 9: -3.0}, "top_p": 0.9},
    {
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.05,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.2,
    },
)


def test_pairs_of_tokens_come_as_often_as_they_should(model: Path, reference: Reference) -> None:
    """Chi-square over every pair of first and second token, at about 1e-6 of a false alarm."""
    prompt, count = PROMPTS[2], 800
    asked = [
        params_of(77 + i, max_tokens=2, n=count, logprobs=None, **values)
        for i, values in enumerate(DISTRIBUTIONS)
    ]
    generated = generate(model, [(prompt, params) for params in asked])
    for number, params in enumerate(asked):
        first = distribution(reference.next_logits(prompt, (), params), params)
        likely = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
        for token in np.flatnonzero(first).tolist():
            second = distribution(reference.next_logits(prompt, (token,), params), params)
            likely[token] = first[token] * second
        seen = np.zeros_like(likely)
        for index in range(count):
            seen[generated[number, index].tokens] += 1
        assert not seen[likely == 0].any()
        assert chi_squared_is_likely(seen.ravel(), count * likely.ravel()), DISTRIBUTIONS[number]


def chi_squared_is_likely(seen: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    """Whether counts may be of these expectations; rare ones are taken together."""
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    some = expected > 0
    seen, expected = seen[some], expected[some]
    freedom = len(seen) - 1
    assert freedom >= 5
    statistic = float(((seen - expected) ** 2 / expected).sum())
    # Wilson and Hilferty 1931; 4.75 standard deviations leave 1e-6.
    spread = 2 / (9 * freedom)
    return statistic < freedom * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


def test_the_chi_square_test_finds_what_is_wrong() -> None:
    random_ = np.random.default_rng(2)
    right = random_.dirichlet(np.ones(40))
    wrong = right.copy()
    wrong[np.argsort(right)[-6:]] *= (1.25, 0.8, 1.25, 0.8, 1.25, 0.8)
    wrong /= wrong.sum()
    assert chi_squared_is_likely(random_.multinomial(1500, right).astype(float), 1500 * right)
    assert not chi_squared_is_likely(random_.multinomial(6000, wrong).astype(float), 6000 * right)
