"""The first field of a request that is mistyped or out of range is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pegboard.errors import RequestError
from pegboard.request import MAX_SEED, Request, SamplingParams, read_speculative

MISTYPED: list[dict[str, Any]] = [
    {"max_tokens": "3"},
    {"max_tokens": 2.0},
    {"max_tokens": True},
    {"temperature": None},
    {"temperature": "hot"},
    {"top_k": 1.5},
    {"logprobs": 1.5},
    {"prompt_logprobs": "1"},
    {"seed": 1.0},
    {"n": None},
    {"stop": "abc"},
    {"stop": ("a", 3)},
    {"stop_token_ids": (1, 2.0)},
    {"logit_bias": {"7": 1.0}},
    {"logit_bias": {7: None}},
    {"logit_bias": None},
    {"ignore_eos": 1},
    {"processors": {"penalties": 3}},
]
OUT_OF_RANGE: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": 10**400},
    {"temperature": float("nan")},
    {"temperature": 1e-7},
    {"temperature": 1e-300},
    {"temperature": 10**400},
    {"top_p": 0.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 1e-30},
    {"repetition_penalty": float("inf")},
    {"logit_bias": {7: float("inf")}},
    {"logit_bias": {7: -1e30}},
    {"logit_bias": {-1: 1.0}},
    {"seed": MAX_SEED + 1},
    {"stop": ("",)},
]


@pytest.mark.parametrize("values", [*MISTYPED, *OUT_OF_RANGE], ids=str)
def test_what_cannot_be_sampled_by_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**values).check()
    assert refusal.value.param == next(iter(values))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 1},
        {"repetition_penalty": 1e-6},
        {"seed": MAX_SEED},
        {"stop": ["a", "b"]},
        {"stop_token_ids": [1]},
        {"logit_bias": {7: -100}},
    ],
    ids=str,
)
def test_the_ends_of_ranges_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values).check()


@pytest.mark.parametrize(
    "values",
    [
        {"request_id": 5},
        {"params": {"max_tokens": 3}},
        {"priority": "high"},
        {"priority": 2**63},
        {"priority": -(2**80)},
        {"tenant": 5},
        {"request_id": "\ud800"},
        {"tenant": "\udfff"},
        {"cache_salt": "half a pair: \ud83d"},
        {"arrival": float("nan")},
        {"speculative": "off"},
        {"speculative": False},
        {"speculative": -1},
        {"speculative": 2.0},
        {"speculative": 2**31},
    ],
    ids=str,
)
def test_a_mistyped_request_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        Request(**{"request_id": "a", "prompt_token_ids": (1,), **values}).check()
    assert refusal.value.param == next(iter(values))


@pytest.mark.parametrize(
    ("said", "most"),
    [
        (None, None),
        ({}, None),
        ({"num_speculative_tokens": None}, None),
        ("off", 0),
        (False, 0),
        ({"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 3}, 3),
        ({"num_speculative_tokens": 2**31 - 1}, 2**31 - 1),
    ],
    ids=str,
)
def test_a_word_on_drafts_is_a_number(said: Any, most: int | None) -> None:
    assert read_speculative(said) == most


@pytest.mark.parametrize(
    "said",
    [
        *("on", "OFF", "", True, 0, 3, 2.5, [], ["off"], {"k": 3}, {1: 3}),
        {"num_speculative_tokens": 3, "method": "ngram"},
        *(
            {"num_speculative_tokens": number}
            for number in (True, False, -1, 2.0, "3", 2**31, 10**5000, [3], {"a": 1}, float("nan"))
        ),
        {"a" * 10**6: 1},
        "off" * 10**6,
    ],
    ids=lambda said: repr(said)[:40] if not isinstance(said, dict) or len(said) > 1 else "mapping",
)
def test_any_other_word_on_drafts_is_refused_by_name_in_a_short_line(said: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        read_speculative(said)
    assert refusal.value.param in ("speculative", "speculative.num_speculative_tokens")
    assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)


INTEGERS = [
    ("max_tokens", 2**80),
    ("top_k", 2**80),
    ("seed", 2**80),
    ("n", 2**80),
    ("min_tokens", 2**80),
    ("logprobs", 2**80),
    ("prompt_logprobs", 2**80),
    ("stop_token_ids", (2**80,)),
    ("logit_bias", {2**80: 1.0}),
    ("processors", {"mine": {"level": 2**80}}),
]


@pytest.mark.parametrize(("name", "value"), INTEGERS)
def test_an_integer_that_fits_no_message_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value}).check()
    assert refusal.value.param == name


def test_every_field_that_can_hold_an_integer_is_among_those() -> None:
    kinds = {field.name: str(field.type) for field in msgspec.structs.fields(SamplingParams)}
    holding = {name for name, kind in kinds.items() if "int" in kind or "Any" in kind}
    assert holding == {name for name, _ in INTEGERS}
