"""Models that do not fit the target in all, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.errors import UserError
from pegboard.testing.invariance import Case, various_params, various_prompts
from pegboard.testing.tiny import write_tiny_model
from pegboard_draft_model.options import DraftModelOptions

Run = Callable[..., tuple[Any, Any]]
"""The fixture `run`: the outcome of a run, and the drafter with its guesses."""

PROMPTS = various_prompts((3, 20, 30, 33), range(4, 517))
PARAMS = various_params(len(PROMPTS))


@pytest.mark.parametrize("max_position", [2, 23, 32, 33, 36, 4096])
def test_guesses_end_where_its_context_does(run: Run, tmp_path: Path, max_position: int) -> None:
    """A prompt may be longer than that, or the output reach it. Known tokens and all guesses but the last
    have positions; the target knows nothing of that limit."""
    folder = write_tiny_model(
        tmp_path / "m", dtype="float64", seed=3, max_position_embeddings=max_position
    )
    _, drafter = run(folder, Case(batch=3, chunk=9), PROMPTS, PARAMS)
    ends = [len(guess.known) + len(guess.token_ids) - 1 for guess in drafter.guesses]
    assert max(ends, default=0) <= max_position
    if max_position in (23, 32, 36):
        assert max(ends) == max_position
    short = [
        guess for guess in drafter.guesses if len(guess.known) + drafter.num_nodes <= max_position
    ]
    assert bool(short) == (max_position > 2 + drafter.num_nodes)


@pytest.mark.parametrize("vocab_size", [320, 400, 640])
def test_embeddings_of_other_lengths_are_no_fault(
    target: Path, tmp_path: Path, vocab_size: int
) -> None:
    """What pads the target's embedding may lie past the draft model's; what pads the latter's is not
    guessed."""
    own, folders = tmp_path / "t", {}
    folders["target"] = write_tiny_model(own, dtype="float64", tokenizer=True)
    folders["draft"] = write_tiny_model(
        tmp_path / "d", dtype="float64", seed=3, tokenizer=True, vocab_size=vocab_size
    )

    def answers(**more: Any) -> list[tuple[int, ...]]:
        with Engine({"model": str(own), "dtype": "float64", "max_model_len": 64, **more}) as engine:
            for prompt in PROMPTS:
                engine.submit(prompt, SamplingParams(max_tokens=9, temperature=1.5, seed=4))
            texts: dict[str, list[int]] = {}
            while engine.has_work():
                for delta in engine.step():
                    texts.setdefault(delta.request_id, []).extend(delta.token_ids)
            assert not engine.core.cut_off, engine.core.cut_off
        return [tuple(text) for text in texts.values()]

    plain = answers()
    assert max(max(text) for text in plain) >= 320
    drafter = {"name": "draft_model", "model": str(folders["draft"])}
    assert answers(drafter=drafter) == plain


@pytest.mark.parametrize("quantizer", ["none", "int8", "w4"])
def test_its_quantizer_is_its_own(target: Path, draft: Path, quantizer: str) -> None:
    drafter = {"name": "draft_model", "model": str(draft), "options": {"quantizer": quantizer}}
    config = {"model": str(target), "max_model_len": 64, "drafter": drafter}
    with Engine(config) as engine:
        models = engine.prepared.composition.models
    names = [plan.parts["quantizer"].name for plan in models]
    assert names == ["none", quantizer]


def test_a_quantized_model_drafts(target: Path, draft: Path, run: Run) -> None:
    _, drafter = run(
        draft,
        Case(batch=4),
        PROMPTS,
        PARAMS,
        {"min_confidence": 0.0, "quantizer": "int8"},
    )
    assert len(drafter.guesses) > 10


@pytest.mark.parametrize("confidence", [0.0, 0.02, 1.0])
def test_min_confidence_ends_a_guess(run: Run, draft: Path, confidence: float) -> None:
    """Of likeliest tokens; one that is drawn shares the target's noise, and tells nothing by its
    probability."""
    _, drafter = run(draft, Case(batch=4), PROMPTS, PARAMS, {"min_confidence": confidence})
    greedy = [guess for guess in drafter.guesses if guess.admission.temperature == 0]
    assert any(guess.admission.temperature > 0 for guess in drafter.guesses)
    for guess in greedy:
        of_all = 1.0
        for one in guess.confidences:
            of_all *= one
        assert of_all >= confidence * 0.999
    longest = max((len(guess.token_ids) for guess in greedy), default=0)
    assert longest == {0.0: drafter.num_nodes, 1.0: 0}.get(confidence, longest)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "some"},
        {"min_confidence": 1.1},
        {"min_confidence": float("nan")},
        {"quantizer": ""},
        {"quantization": "int8"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DraftModelOptions.model_validate(options)


Refused = Callable[..., str]


@pytest.fixture
def refused(target: Path) -> Refused:
    """(settings of the drafter) -> the reason against them."""

    def start(**drafter: Any) -> str:
        with pytest.raises(UserError) as caught:
            Engine({"model": str(target), "drafter": {"name": "draft_model", **drafter}})
        return str(caught.value)

    return start


def test_without_a_model_it_is_refused(refused: Refused) -> None:
    assert "drafter 'draft_model' needs a model; fix: name drafter.model" in refused()


def test_a_model_that_is_nowhere_is_refused(refused: Refused) -> None:
    assert "drafter.model: ./nowhere: no such folder or file" in refused(model="./nowhere")


def test_a_folder_without_a_model_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert "drafter.model: " in refused(model=str(tmp_path))


def test_weights_that_are_missing_are_refused(
    refused: Refused, draft: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((draft / "config.json").read_text())
    assert "drafter.model: " in refused(model=str(tmp_path))


def test_a_quantizer_that_is_not_installed_is_refused_by_its_key(
    refused: Refused, draft: Path
) -> None:
    said = refused(model=str(draft), options={"quantizer": "nobody"})
    assert "drafter.model: quantizer: no installed plugin provides 'nobody'" in said
