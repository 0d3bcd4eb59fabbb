"""The fields that a checkpoint's generation config fills, and notes on the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.cli.check_text import text_lines, text_report
from pegboard.compose import prepare
from pegboard.config import Config, LimitsConfig
from pegboard.errors import CheckpointError
from pegboard.sampling_defaults import SamplingDefaults, sampling_defaults
from pegboard.server.protocol import ChatBody, CompletionBody, GenerationBody
from pegboard.testing.tiny import write_tiny_model


def test_a_config_of_the_librarys_own_defaults_asks_for_nothing() -> None:
    """Every key that the library knows is followed, neutral at its default, or without effect."""
    from transformers import GenerationConfig

    config = GenerationConfig()  # type: ignore[no-untyped-call]
    keys: dict[str, Any] = config.to_dict()
    assert len(keys) > 50
    assert sampling_defaults(keys, "here") == sampling_defaults({}, "here")
    # At other values, each of them that is in no table would be taken for a stranger's.
    odd = sampling_defaults({key: "odd" for key in keys if key not in FOLLOWED}, "here")
    assert {
        "assistant_ensemble_weight='odd'",
        "num_beams='odd'",
        "suppress_tokens='odd'",
        "typical_p='odd'",
    } <= set(odd.not_followed)
    # To the library an empty mapping is a watermark of its default strength.
    marked = sampling_defaults({"watermarking_config": {}}, "here")
    assert marked.not_followed == ("watermarking_config={}",)


FOLLOWED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "Qwen2.5": (
        {
            "bos_token_id": 151643,
            "do_sample": True,
            "eos_token_id": [151645, 151643],
            "pad_token_id": 151643,
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "transformers_version": "4.37.0",
        },
        {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
        (),
    ),
    "greedy": ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}, ()),
    "beams": (
        {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "max_length": 4096},
        {},
        ("no_repeat_ngram_size=3", "num_beams=4"),
    ),
    "nulls": (dict.fromkeys((*FOLLOWED, "typical_p", "bad_words_ids", "stranger")), {}, ()),
    "neutral": (
        {
            "typical_p": 1.0,
            "epsilon_cutoff": 0.0,
            "num_beams": 1,
            "suppress_tokens": [],
            "top_k": 0,
        },
        {"top_k": 0},
        (),
    ),
    "all, by another word": ({"top_k": -1}, {"top_k": 0}, ()),
    "a limit": ({"max_new_tokens": 512}, {"max_tokens": 512}, ()),
    "a stranger's key": ({"mirostat": 2}, {}, ("mirostat=2",)),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_what_is_followed_and_what_is_not(kind: str) -> None:
    generation, values, not_followed = PUBLISHED[kind]
    defaults = sampling_defaults(generation, "here")
    assert (dict(defaults.values), defaults.not_followed) == (values, not_followed)
    SamplingParams(**defaults.values).check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 7),
        ("top_k", 2.5),
        ("top_k", [5]),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_value_that_cannot_be_followed_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"here: generation config: {key}: .*fix: "):
        sampling_defaults({key: value}, "here")


def test_a_request_that_wants_many_tokens_gets_them() -> None:
    defaults = sampling_defaults({"max_new_tokens": 10, "temperature": 0.5}, "here")
    assert defaults.fill({}) == {"max_tokens": 10, "temperature": 0.5}
    assert defaults.fill({"min_tokens": 20})["max_tokens"] == 20
    assert defaults.fill({"max_tokens": 3, "temperature": 1.0}) == {
        "max_tokens": 3,
        "temperature": 1.0,
    }


GENERATION = {"temperature": 0.25, "top_k": 5, "max_new_tokens": 3, "num_beams": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("model") / "m", tokenizer=True, eos_token_id=7
    )
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def test_they_fill_what_a_body_leaves_out() -> None:
    defaults = sampling_defaults(GENERATION | {"repetition_penalty": 1.5}, "here")
    hello = [{"role": "user", "content": "Hello"}]
    limits = LimitsConfig()
    body: GenerationBody = ChatBody.model_validate(
        {"messages": hello, "temperature": None}, context=limits
    )
    params = body.sampling_params(defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 5, 3)
    given = {"temperature": 1, "top_k": -1, "max_completion_tokens": 9, "repetition_penalty": 1}
    body = ChatBody.model_validate({"messages": hello, **given}, context=limits)
    assert body.sampling_params(defaults) == SamplingParams(max_tokens=9)
    body = CompletionBody.model_validate({"prompt": "Hello"}, context=limits)
    params = body.sampling_params(defaults)
    assert (params.temperature, params.max_tokens) == (0.25, 16), "16 is the API's own rule"
    assert body.sampling_params(SamplingDefaults()) == SamplingParams(max_tokens=16)


def test_they_hold_in_llm_where_no_parameters_are_given(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with LLM(model, show_progress=False, threads=1, max_model_len=64, seed=1) as llm:
        expected = SamplingParams(temperature=0.25, top_k=5, max_tokens=3)
        assert llm.engine.default_params == expected
        assert len(llm.generate([[5, 6, 7]])[0].token_ids) == 3
        given = SamplingParams(max_tokens=5, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7]], given)[0].token_ids) == 5
    assert "temperature=0.25, top_k=5, max_tokens=3" in caplog.text
    assert "not followed in num_beams=4" in caplog.text
    settings: Any = {"generation_config": "none", "max_model_len": 64, "threads": 1}
    with LLM(model, show_progress=False, **settings) as llm:
        assert llm.engine.default_params == SamplingParams()


def test_check_says_what_ends_a_text_and_how_it_is_sampled(model: Path) -> None:
    report = text_report(prepare(Config.from_values({"model": str(model)})))
    lines = "\n".join(text_lines(report))
    assert [end["id"] for end in report["ends"]] == [7, 1]
    assert "ends with      7 " in lines and "(config.json)" in lines
    assert "1 '<|im_end|>'  (the tokenizer's eos_token)" in lines
    assert "sampling       temperature=0.25, top_k=5, max_tokens=3" in lines
    assert "not followed   num_beams=4" in lines
