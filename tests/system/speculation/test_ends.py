"""Sequences that end within accepted guesses, or have no room for them, end as without a drafter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.request import SamplingParams
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.odd_drafters import ODD
from pegboard.testing.tiny import write_tiny_model

PROMPTS = [tuple(3 + (5 * i + n * n) % 300 for i in range(n)) for n in (12, 5)]
LENGTH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a vocabulary without ids that decode to nothing."""
    folder = tmp_path_factory.mktemp("tiny") / "m"
    return write_tiny_model(folder, dtype="float64", tokenizer=True, vocab_size=300)


def config(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_model_len": 64,
        "dtype": "float64",
        "attention": "torch",
        "kv_cache": {"block_size": 4},
        "prefix_cache": "none",
        "threads": 1,
        **more,
    }


def sampled(**more: Any) -> SamplingParams:
    fields = {"max_tokens": LENGTH, "seed": 3, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**{**fields, **more})


@pytest.fixture(scope="module")
def known(model: Path) -> Traces:
    """What each prompt becomes where nothing ends it."""
    return run_case(config(model), Case(batch=2), PROMPTS, [sampled()] * len(PROMPTS))


def outputs_of(known: Traces) -> dict[tuple[tuple[int, ...], int], tuple[int, ...]]:
    return {(PROMPTS[number], index): one.tokens for (number, index), one in known.items()}


class Counts(Observer):
    """Counts accepted nodes."""

    num_accepted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_accepted += event.num_accepted

    def close(self) -> None: ...


def ends(known: Traces) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Requests that end at each place: by each text there, alone and one of several, by each token, and by
    their length; some not before a number of tokens."""
    found = []
    for (number, _), trace in known.items():
        text = trace.text
        spans = itertools.product(range(len(text)), (1, 2, 3, 5))
        stops = {text[start : start + size] for start, size in spans} - {""}
        for i, stop in enumerate(sorted(stops)):
            more = (stop[:1] + "\0", "never", stop) if i % 3 == 0 else (stop,)
            found.append((PROMPTS[number], sampled(stop=more, min_tokens=i % 5)))
        for i, token in enumerate(sorted(set(trace.tokens))):
            found.append((PROMPTS[number], sampled(stop_token_ids=(token,), min_tokens=i % 3 * 4)))
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", ["right", "oracle", "adversarial"])
def test_every_end_within_a_span_is_the_same(
    model: Path, known: Traces, drafter: str, depth: int
) -> None:
    """A request with min_tokens goes another way than what is guessed; then the guesses are wrong."""
    asked = ends(known)
    assert len(asked) > 100
    prompts, params = zip(*asked, strict=True)
    expected = run_case(config(model), Case(batch=32), prompts, params)
    assert sum(one.finish_reason == "stop" for one in expected.values()) > 100
    drafting = {"drafter": {"num_speculative_tokens": 7}, "executor": {"depth": depth}}
    made, counts = ODD[drafter](outputs_of(known), 1), Counts()
    case = Case(batch=32)
    base = config(model, **drafting)
    got = run_case(base, case, prompts, params, drafter=made, observer=counts)
    assert differences(expected, got, tolerance=1e-5) == []
    assert counts.num_accepted > 300


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", ["right", "oracle", "random"])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_steps_without_room_for_drafts_bring_the_same(
    model: Path, known: Traces, drafter: str, budget: int, depth: int
) -> None:
    """Of a token, or of little more than the rows."""
    settings = {"drafter": {"num_speculative_tokens": 5}, "executor": {"depth": depth}}
    case = Case(batch=2, budget=budget, settings=settings)
    made = ODD[drafter](outputs_of(known), 1)
    got = run_case(config(model), case, PROMPTS, [sampled()] * len(PROMPTS), drafter=made)
    assert differences(known, got, tolerance=1e-5) == []


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_every_length_within_a_span_is_the_same(
    model: Path, known: Traces, max_tokens: int
) -> None:
    params = [sampled(max_tokens=max_tokens)]
    made = ODD["oracle"](outputs_of(known), max_tokens)
    drafting = {"drafter": {"num_speculative_tokens": 6}}
    got = run_case(config(model, **drafting), Case(batch=2), PROMPTS, params * 2, drafter=made)
    for key, trace in known.items():
        assert got[key].tokens == trace.tokens[:max_tokens]
        assert got[key].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_abort_between_any_steps_ends_one_and_leaves_the_other(
    model: Path, known: Traces, num_steps: int, depth: int
) -> None:
    settings = {
        "drafter": {"num_speculative_tokens": 3, "policy": "fixed"},
        "executor": {"depth": depth},
    }
    made = ODD["oracle"](outputs_of(known), 1)
    tokens: dict[str, list[int]] = {}
    with Engine(config(model, **settings), drafter=made) as engine:
        before = engine.core.ledger()
        first, second = (engine.submit(one, sampled()).request_id for one in PROMPTS)
        for number in itertools.count():
            if number == num_steps:
                engine.abort(first)
            if not engine.has_work():
                break
            for delta in engine.step():
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert engine.core.ledger() == before and not engine.core.cut_off
    come = tokens.get(first, [])
    assert tuple(come) == known[0, 0].tokens[: len(come)]
    assert tuple(tokens[second]) == known[1, 0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "draft model", "eagle tree"])
def test_workers_in_processes_of_their_own_bring_the_same(
    tmp_path: Path, model_drafters: dict[str, Any], drafter: str
) -> None:
    target = write_tiny_model(tmp_path / "m", dtype="float64", tokenizer=True)
    own = model_drafters.get(drafter, {"name": drafter, "options": {"min_confidence": 0}})
    pytest.importorskip("pegboard_executors")
    pytest.importorskip(f"pegboard_{own['name']}")
    params = [sampled(n=2, prompt_logprobs=1), sampled()]
    expected = run_case(config(target), Case(batch=3), PROMPTS, params)
    drafting = {
        "drafter": {**own, "num_speculative_tokens": 4, "policy": "fixed"},
        "executor": {"name": "processes", "depth": 2},
    }
    got = run_case(config(target, **drafting), Case(batch=3), PROMPTS, params)
    assert differences(expected, got, tolerance=1e-5) == []
