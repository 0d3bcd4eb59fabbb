"""The built-in logits processors keep their contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.processor_params import (
    LogitBiasParams,
    MinTokensParams,
    PenaltiesParams,
)
from pegboard.builtin.processors import LogitBias, MinTokens, Penalties
from pegboard.testing.logits_processor import LogitsProcessorContract, MakeProcessor


class TestPenalties(LogitsProcessorContract):
    params = tuple(
        PenaltiesParams.model_validate(values).model_dump()
        for values in (
            {"repetition_penalty": 1.3},
            {"presence_penalty": 0.7, "frequency_penalty": -0.4},
            {"repetition_penalty": 0.8, "frequency_penalty": 0.5},
        )
    )

    @pytest.fixture
    def make(self) -> MakeProcessor:
        return Penalties


class TestLogitBias(LogitsProcessorContract):
    params = tuple(
        LogitBiasParams.model_validate({"logit_bias": bias}).model_dump()
        for bias in ({3: 4.0, 516: -100.0}, {0: -1.5})
    )

    @pytest.fixture
    def make(self) -> MakeProcessor:
        return LogitBias


class TestMinTokens(LogitsProcessorContract):
    params = tuple(
        MinTokensParams.model_validate({"min_tokens": count, "stop_token_ids": ids}).model_dump()
        for count, ids in ((100, (3, 516)), (100, (5,)))
    )

    @pytest.fixture
    def make(self) -> MakeProcessor:
        return MinTokens
