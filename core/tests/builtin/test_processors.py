"""Penalties and bias by their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from pegboard.builtin.processor_params import (
    LogitBiasParams,
    MinTokensParams,
    PenaltiesParams,
)
from pegboard.builtin.processors import LogitBias, MinTokens, Penalties
from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor, ProcessorContext

VOCAB = 8
HISTORY = [0, 1, 1, 2, 3, 3, 3]  # the first three are the prompt
LOGITS = [2.0, -1.0, 0.5, 1.0, 4.0, -3.0, 0.0, 1.5]


def applied(processor: LogitsProcessor, **params: Any) -> list[float]:
    """LOGITS after the processor, beside another row that must stay as it was before."""
    processor.admit(5, params)
    logits = torch.tensor([LOGITS])
    history = np.array(HISTORY, dtype=np.int32)
    processor.apply(logits, [LogitRow(5, len(HISTORY), 3, history)])
    processor.release(5)
    return logits[0].tolist()


@pytest.fixture
def context() -> ProcessorContext:
    return ProcessorContext(VOCAB, 6, "cpu")


def test_repetition_acts_on_prompt_and_output(context: ProcessorContext) -> None:
    got = applied(Penalties(context), repetition_penalty=2.0)
    assert got == [1.0, -2.0, 0.25, 0.5, 4.0, -3.0, 0.0, 1.5]


def test_presence_counts_once_and_frequency_each_time_in_the_output(
    context: ProcessorContext,
) -> None:
    assert applied(Penalties(context), presence_penalty=0.5)[:4] == [2.0, -1.0, 0.0, 0.5]
    assert applied(Penalties(context), frequency_penalty=0.5)[:4] == [2.0, -1.0, 0.0, -0.5]
    both = applied(Penalties(context), presence_penalty=1.0, frequency_penalty=-0.5)
    assert both == [2.0, -1.0, 0.0, 1.5, 4.0, -3.0, 0.0, 1.5]


def test_repetition_comes_before_the_subtractions(context: ProcessorContext) -> None:
    got = applied(Penalties(context), repetition_penalty=2.0, frequency_penalty=1.0)
    assert got[3] == 1.0 / 2 - 3


def test_bias_is_added(context: ProcessorContext) -> None:
    got = applied(LogitBias(context), logit_bias={0: -5.0, 7: 1.0})
    assert got == [-3.0, *LOGITS[1:7], 2.5]


def test_a_bias_outside_the_vocabulary_is_refused(context: ProcessorContext) -> None:
    with pytest.raises(ValueError, match="token id 8 is outside a vocabulary of 8"):
        LogitBias(context).admit(0, {"logit_bias": {8: 1.0}})


def test_no_end_is_sampled_before_the_least_number_of_tokens() -> None:
    context = ProcessorContext(VOCAB, 6, "cpu", eos_token_ids=(2, VOCAB + 1))
    never = float("-inf")
    num_output = len(HISTORY) - 3
    early = applied(MinTokens(context), min_tokens=num_output + 1, stop_token_ids=(5,))
    assert early == [*LOGITS[:2], never, *LOGITS[3:5], never, *LOGITS[6:]]
    ignored = applied(MinTokens(context), min_tokens=num_output + 1, ignore_eos=True)
    assert ignored == LOGITS
    assert applied(MinTokens(context), min_tokens=num_output, stop_token_ids=(5,)) == LOGITS


def test_without_a_least_number_there_is_nothing_to_do() -> None:
    values = {"stop_token_ids": (5,), "ignore_eos": True}
    assert MinTokensParams.model_validate(values) == MinTokensParams()


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (PenaltiesParams, {"repetition_penalty": 0.0}),
        (PenaltiesParams, {"presence_penalty": 2.5}),
        (PenaltiesParams, {"frequency_penalty": float("nan")}),
        (PenaltiesParams, {"frequncy_penalty": 1.0}),
        (MinTokensParams, {"min_tokens": -1}),
        (LogitBiasParams, {"logit_bias": {-1: 1.0}}),
        (LogitBiasParams, {"logit_bias": {1: float("inf")}}),
    ],
)
def test_parameters_out_of_range_are_refused(model: Any, values: Any) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(values)
