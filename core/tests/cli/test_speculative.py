"""`--speculative-config` of tutorials: each method and key is acted on, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard.cli.speculative import HOLDS, METHODS, REFUSED_KEYS, REFUSED_METHODS, drafter_of
from pegboard.config import Config
from pegboard.errors import ConfigError

FLAG = "--speculative-config"
NGRAM = {"name": "ngram", "num_speculative_tokens": 5}


def of(**given: Any) -> dict[str, Any]:
    settings = drafter_of(json.dumps(given), FLAG)
    assert Config(model="m", drafter=settings).drafter.name == settings["name"]
    return settings


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            {**NGRAM, "options": {"prompt_lookup_min": 2, "prompt_lookup_max": 4}},
        ),
        ({"method": "ngram"}, NGRAM),
        ({"method": "[ngram]"}, NGRAM),
        ({"method": "ngram", "model": "[ngram]"}, NGRAM),
        ({"model": "ngram"}, NGRAM),
        (
            {"model": "[ngram]", "prompt_lookup_max": 3},
            {**NGRAM, "options": {"prompt_lookup_min": 3, "prompt_lookup_max": 3}},
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 3},
            {**NGRAM, "options": {"prompt_lookup_min": 3, "prompt_lookup_max": 3}},
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 4, "options": {"max_tokens": 64}},
            {
                **NGRAM,
                "options": {"prompt_lookup_min": 4, "prompt_lookup_max": 4, "max_tokens": 64},
            },
        ),
        ({"method": "suffix"}, {"name": "suffix"}),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 0.2},
            {"name": "suffix", "options": {"min_confidence": 0.2}},
        ),
        ({"model": "small"}, {"name": "draft_model", "model": "small"}),
        (
            {"method": "draft_model", "model": "small", "draft_tensor_parallel_size": 1},
            {"name": "draft_model", "model": "small"},
        ),
        (
            {"model": "small", "quantization": "awq", "draft_sample_method": "probabilistic"},
            {
                "name": "draft_model",
                "model": "small",
                "options": {"quantizer": "awq", "sampling": "noise"},
            },
        ),
        ({"method": "eagle", "model": "head"}, {"name": "eagle", "model": "head"}),
        (
            {"method": "eagle3", "model": "head", "draft_tensor_parallel_size": 1},
            {"name": "eagle", "model": "head"},
        ),
        (
            {"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"},
            {"name": "eagle", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"},
        ),
        (
            {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"},
            {"name": "eagle", "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"},
        ),
        ({"method": "mine", "options": {"a": 1}}, {"name": "mine", "options": {"a": 1}}),
        (
            {"name": "ngram", "policy": "fixed", "verification": "exact"},
            {"name": "ngram", "policy": "fixed", "verification": "exact"},
        ),
        ({"method": "ngram", "model": None, "prompt_lookup_max": None}, {"name": "ngram"}),
    ],
)
def test_what_a_tutorial_writes_is_the_drafters_settings(
    given: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert of(**given, num_speculative_tokens=5) == {**settings, "num_speculative_tokens": 5}


@pytest.mark.parametrize("method", [*REFUSED_METHODS, "deepseek_mtp", "qwen3_next_mtp"])
def test_a_method_that_is_not_here_is_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"{FLAG} method: '{method}': .*; allowed: ngram, suf"):
        of(method=method, model="m")


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_key_that_is_not_here_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{FLAG} {key}: not a key here: .*; allowed: method, "):
        of(method="suffix", **{key: 1})
    assert of(method="suffix", **{key: None}) == {"name": "suffix"}


@pytest.mark.parametrize("key", HOLDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_key_that_says_what_holds_anyway_accepts_nothing_else(key: str, method: str) -> None:
    assert key not in of(method=method, **{key: HOLDS[key]})
    for other in (2, "1", True):
        with pytest.raises(
            ConfigError, match=rf"{FLAG} {key}: .*; allowed: {json.dumps(HOLDS[key])}"
        ):
            of(method=method, **{key: other})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"num_speculative_tokens": 3}, f"{FLAG}: neither method nor model, of which a method"),
        ({}, f"{FLAG}: neither method nor model"),
        ({"model": 3}, f"{FLAG}: neither method nor model"),
        ({"method": 3}, f"{FLAG} method: 3; allowed: ngram"),
        ({"method": "ngram", "name": "suffix"}, f"{FLAG} name: stands beside method"),
        (
            {"method": "suffix", "prompt_lookup_max": 3},
            f"{FLAG} prompt_lookup_max: no key of method 'suffix', but of ngram",
        ),
        (
            {"method": "eagle", "model": "m", "quantization": "awq"},
            f"{FLAG} quantization: no key of method 'eagle', but of draft_model",
        ),
        (
            {"method": "mine", "prompt_lookup_max": 3},
            f"{FLAG} prompt_lookup_max: no key of method 'mine', but of ngram",
        ),
        (
            {"method": "draft_model", "draft_sample_method": "some"},
            f"{FLAG} draft_sample_method: 'some'; allowed: greedy, probabilistic",
        ),
        (
            {"method": "ngram", "num_speculative_token": 3},
            f"{FLAG} num_speculative_token: unknown key; allowed: method, ",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 1, "options": {"prompt_lookup_max": 2}},
            f"{FLAG} options: prompt_lookup_max stands beside them",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 1, "options": 3},
            f"{FLAG} options: 3; allowed: an object",
        ),
    ],
)
def test_a_mistake_is_said(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(**given)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    "text",
    ['{"method": "ngram", "method": "suffix"}', '{"method": "a", "options": {"b": 1, "b": 2}}'],
)
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="stands twice"):
        drafter_of(text, FLAG)


def test_json_that_has_no_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        drafter_of("[" * 100_000, FLAG)
