"""The drafter says what its model says alone, in transformers, however its rows came to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from pegboard import SamplingParams
from pegboard.interfaces.observer import ErrorHappened, Event, Observer, StepDone
from pegboard.interfaces.speculation_policy import Choice, DraftView, SpeculationPolicy, StepCosts
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import Case, various_prompts
from pegboard.testing.philox import gumbel, kept_ids
from pegboard.testing.tiny import write_tiny_model

Run = Callable[..., tuple[Any, Any]]
"""The fixture `run`: the outcome of a run, and the drafter with its guesses."""

PROMPTS = various_prompts((1, 5, 30, 33), range(4, 500))
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "n": 4},
    {"temperature": 0.8, "seed": 5, "top_p": 0.8, "top_k": 50},
    {"temperature": 0.5, "seed": 2**64 - 3, "min_p": 0.05},
)
PARAMS = [SamplingParams(max_tokens=14, ignore_eos=True, **way) for way in WAYS]
SHOWN = 12
"""Guesses of each run that are compared."""

LEAST_MARGIN = 1e-4
"""Of a score over the next one, below which rounding decides."""

CASES = {
    "together": Case(batch=8),
    "preempted": Case(batch=3, interruptions=3, arrivals=1),
    "in chunks": Case(batch=2, chunk=7, budget=40),
    "in any order": Case(batch=3, disorder=5, budget=24),
    "in a small pool": Case(batch=6, pool=250_000),
    "ahead": Case(batch=3, settings={"executor": {"depth": 2}}),
}


def alone(folder: Path, guess: Any) -> torch.Tensor:
    """The model's logits for each token of a guess, float32 [num_tokens, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    token_ids = torch.tensor([[*guess.known, *guess.token_ids]])
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids).logits[0]
    return logits[len(guess.known) - 1 : -1].float()


def check(folder: Path, guesses: Sequence[Any], *, draws: bool = True) -> None:
    """Each token is the one that sampling takes by the model's logits; its probability is the model's."""
    assert len(guesses) >= SHOWN
    num_decided = 0
    for guess in random.Random(1).sample(guesses, SHOWN):
        row = guess.admission
        scale = row.temperature or 1.0
        for depth, logits in enumerate(alone(folder, guess)):
            z = (logits / scale).numpy()
            scores = torch.from_numpy(z)
            if draws and row.temperature:
                kept, _ = kept_ids(z, row.top_k, row.top_p, row.min_p)
                noise = gumbel(len(z), row.seed, len(guess.known) + depth, row.index)
                scores = torch.full_like(scores, -torch.inf)
                scores[kept] = torch.from_numpy(z[kept] + noise[kept])
            best = scores.topk(2)
            token = guess.token_ids[depth]
            if float(best.values[0] - best.values[1]) > LEAST_MARGIN:
                assert token == int(best.indices[0])
                num_decided += 1
            probability = float(torch.softmax(torch.from_numpy(z).double(), 0)[token])
            assert guess.confidences[depth] == pytest.approx(probability, rel=1e-4)
    assert num_decided > SHOWN


@pytest.mark.parametrize("way", CASES)
def test_it_says_what_its_model_says_alone(run: Run, draft: Path, way: str) -> None:
    _, drafter = run(draft, CASES[way], PROMPTS, PARAMS)
    check(draft, drafter.guesses)
    indices = {guess.admission.index for guess in drafter.guesses}
    assert indices == {0, 1, 2, 3}


def test_greedy_guesses_are_the_likeliest_tokens(run: Run, draft: Path) -> None:
    options = {"sampling": "greedy", "min_confidence": 0.0}
    _, drafter = run(draft, Case(batch=4), PROMPTS, PARAMS, options)
    check(draft, drafter.guesses, draws=False)


class Errors(Observer):
    """Notes errors."""

    def __init__(self) -> None:
        self.found: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.found.append(event)

    def close(self) -> None:
        pass


class Compared(Errors):
    """Counts depths at which a guess was compared, and those at which it was right."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tried = self.num_accepted = 0

    def observe(self, event: Event) -> None:
        super().observe(event)
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted


@pytest.mark.parametrize("way", ["together", "preempted", "in chunks"])
def test_the_target_as_its_own_draft_model_is_always_right(
    run: Run, target: Path, way: str
) -> None:
    """Also where tokens are drawn, of several sequences and with filters."""
    compared = Compared()
    run(target, CASES[way], PROMPTS, PARAMS, observer=[compared])
    assert compared.num_tried == compared.num_accepted > 50
    assert compared.found == []


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_any_family_may_draft(run: Run, tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path / "m", kind, dtype="float64", num_hidden_layers=1)
    _, drafter = run(folder, Case(batch=4), PROMPTS, PARAMS)
    check(folder, drafter.guesses)


class Seldom(SpeculationPolicy):
    """Asks for nodes in two steps of each nine."""

    manifest: ClassVar = {"name": "seldom"}

    def __init__(self, num_nodes: int = 4) -> None:
        self._num_nodes = num_nodes
        self._num_steps = 0

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        self._num_steps += 1
        number = self._num_nodes if self._num_steps % 9 < 2 else 0
        return [Choice(row.num_drafts, number) for row in rows]


class Never(Seldom):
    """Asks for none."""

    manifest: ClassVar = {"name": "never"}

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        return [Choice(0, 0) for _ in rows]


@pytest.mark.parametrize("depth", [1, 2])
def test_it_goes_on_where_it_was_not_asked(run: Run, draft: Path, depth: int) -> None:
    long = [SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True)] * 4
    settings = {"executor": {"depth": depth}}
    _, drafter = run(
        draft, Case(batch=3), PROMPTS, long, settings=settings, speculation_policy=Seldom()
    )
    check(draft, drafter.guesses)


@pytest.mark.parametrize("policy", ["fixed", "seldom"])
def test_a_cache_serves_its_kv_with_the_targets(run: Run, draft: Path, policy: str) -> None:
    """Prompts that go on where other outputs ended. The bytes of a block that is served are compared with
    those that it had when it was named."""
    long = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)] * 3
    first, _ = run(draft, Case(batch=4), PROMPTS[1:], long)
    turns = [(*prompt, *first[i, 0].tokens, 7) for i, prompt in enumerate(PROMPTS[1:])]
    prompts = [turn for pair in zip(PROMPTS[1:], turns, strict=True) for turn in pair]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (20, 9) * 3]
    listener = Errors()
    objects: dict[str, Any] = {"prefix_cache": DictCache, "observer": [listener]}
    if policy == "seldom":
        objects["speculation_policy"] = Seldom()
    case = Case(batch=1, settings={"kv_cache": {"verify": True}})
    _, drafter = run(draft, case, prompts, params, settings={"prefix_cache": "auto"}, **objects)
    behind = [guess for guess in drafter.guesses if guess.admission.num_cached > 30]
    assert behind, "nothing was guessed behind a hit"
    check(draft, [*drafter.guesses, *behind])
    assert listener.found == []


def test_rows_that_are_not_drafted_for_cost_few_passes(run: Run, draft: Path) -> None:
    """A block's tokens are read together."""
    long = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)]
    settings = {"kv_cache": {"block_size": 8}}
    _, drafter = run(
        draft,
        Case(batch=1),
        PROMPTS[:1],
        long,
        settings=settings,
        speculation_policy=Never(),
    )
    assert drafter.guesses == []
    assert 1 + 39 // 8 - 1 <= drafter.num_passes <= 1 + 40 // 8
