"""In a real engine the drafters save steps, and change no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.interfaces.drafter import DrafterContext, Observation
from pegboard.request import SequenceDelta
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.tiny import write_tiny_model
from pegboard_ngram.options import SuffixOptions
from pegboard_ngram.suffix import Suffix

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram"},
    "ngram, one token": {
        "name": "ngram",
        "options": {"prompt_lookup_min": 1, "prompt_lookup_max": 1, "min_confidence": 0},
    },
    "suffix": {"name": "suffix", "num_speculative_tokens": 6},
    "suffix, recent outputs": {
        "name": "suffix",
        "options": {"min_match": 1, "recent_tokens": 300, "min_confidence": 0},
    },
}
CASES = {
    "together": Case(batch=8),
    "one after the other": Case(batch=1),
    "preempted": Case(batch=3, interruptions=3, arrivals=1),
    "in chunks": Case(batch=2, chunk=7, budget=40),
    "in any order": Case(batch=3, disorder=5, budget=24),
    "behind known prefixes": Case(batch=2, arrivals=1, interruptions=2, cached=True),
}
MAX_TOKENS = 12


def _prompts() -> list[tuple[int, ...]]:
    """Texts that repeat themselves, and one that does not."""
    chance = random.Random(7)
    phrases = [[chance.randrange(4, 500) for _ in range(n)] for n in (1, 3, 5, 12)]
    repeated = [tuple((phrase * 30)[:30]) for phrase in phrases]
    return [*repeated, tuple(chance.randrange(4, 500) for _ in range(17))]


PROMPTS = _prompts()
PARAMS = [
    SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **more)
    for more in (
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 11, "n": 3},
        {"temperature": 0.8, "seed": 5, "top_p": 0.8, "top_k": 50, "logprobs": 0},
        {"temperature": 0.0, "min_tokens": 3, "logit_bias": {7: 2.0}},
    )
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", dtype="float64")
    return {
        "model": str(model),
        "dtype": "float64",
        "max_model_len": 64,
        "prefix_cache": "none",
        "kv_cache": {"block_size": 4},
    }


@pytest.fixture(scope="module")
def plain(config: dict[str, Any]) -> Traces:
    """The outcome of each sequence without a drafter."""
    return run_case(config, Case(batch=8), PROMPTS, PARAMS)


def pairs() -> Iterator[Any]:
    """Each drafter and each way at least once; the other pairs take their time."""
    for i, drafter in enumerate(DRAFTERS):
        for j, way in enumerate(CASES):
            marks = () if (i - j) % len(DRAFTERS) == 0 else (pytest.mark.slow,)
            yield pytest.param(drafter, way, marks=marks, id=f"{drafter}, {way}")


@pytest.mark.parametrize(("drafter", "way"), pairs())
def test_no_token_is_changed(config: dict[str, Any], plain: Traces, drafter: str, way: str) -> None:
    drafting = {**config, "drafter": DRAFTERS[drafter]}
    assert differences(plain, run_case(drafting, CASES[way], PROMPTS, PARAMS), 1e-5) == []


class Watched(Suffix):
    """Notes the owners of rows, and guesses that were made for the last row of each."""

    def __init__(self, context: DrafterContext, options: SuffixOptions) -> None:
        super().__init__(context, options)
        self.owners: list[tuple[str, str]] = []
        self.num_guesses = 0

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        super().admit(admission, block_tables)
        self.owners.append((admission.tenant, admission.salt))
        self.num_guesses = 0

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        drafts, probabilities = super().propose(seen)
        self.num_guesses += len(probabilities)
        return drafts, probabilities


def run(
    engine: Engine, prompt: tuple[int, ...], bias: dict[int, float] | None = None, **fields: Any
) -> tuple[tuple[int, ...], int]:
    """Greedy tokens of one request, and the steps that they took."""
    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=bias or {}
    )
    engine.submit(prompt, params, **fields)
    deltas: list[SequenceDelta] = []
    num_steps = 0
    while engine.has_work():
        deltas += engine.step()
        num_steps += 1
    assert not engine.core.cut_off, engine.core.cut_off
    return tuple(token for delta in deltas for token in delta.token_ids), num_steps


@pytest.mark.parametrize(
    ("fields", "is_seen"),
    [
        ({"tenant": "a", "cache_salt": "s"}, True),
        ({"tenant": "b", "cache_salt": "s"}, False),
        ({"tenant": "a", "cache_salt": "t"}, False),
        ({}, False),
    ],
)
def test_an_output_is_guessed_from_for_its_tenant_and_salt_alone(
    config: dict[str, Any], fields: dict[str, Any], is_seen: bool
) -> None:
    """A prompt without repetitions: alone its row guesses nothing before its output repeats itself."""
    made: list[Watched] = []

    def factory(context: DrafterContext) -> Watched:
        options = SuffixOptions(recent_tokens=1000, min_match=2, min_confidence=0)
        made.append(Watched(context, options))
        return made[-1]

    drafting = {"num_speculative_tokens": 5, "policy": "fixed"}
    with Engine({**config, "drafter": drafting}, drafter=factory) as engine:
        first, _ = run(engine, PROMPTS[-1], tenant="a", cache_salt="s")
        (drafter,) = made
        num_alone = drafter.num_guesses
        again, _ = run(engine, PROMPTS[-1], **fields)
    assert again == first
    owner = (fields.get("tenant", ""), fields.get("cache_salt", ""))
    assert drafter.owners == [("a", "s"), owner]
    assert (drafter.num_guesses > num_alone) == is_seen


def test_the_ledger_says_what_is_held(config: dict[str, Any]) -> None:
    def entry(name: str, **options: int) -> int:
        drafter = {"name": name, "options": options}
        with Engine({**config, "drafter": drafter}) as engine:
            entries = engine.prepared.ledger.entries
        (found,) = [one.num_bytes for one in entries if one.name == f"drafter: {name}"]
        return found

    assert entry("ngram", prompt_lookup_max=8) > entry("ngram")
    assert entry("suffix", recent_tokens=100_000) - entry("suffix") > 100_000 * 200


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_steps_are_saved_where_a_text_repeats_itself(config: dict[str, Any], drafter: str) -> None:
    def answer(**more: Any) -> tuple[tuple[int, ...], int]:
        with Engine({**config, **more}) as engine:
            return run(engine, PROMPTS[-1], bias={7: 100.0})

    plain, num_steps = answer()
    drafted, num_drafting = answer(drafter={"name": drafter, "policy": "fixed"})
    assert drafted == plain == (7,) * MAX_TOKENS
    assert num_drafting < num_steps
