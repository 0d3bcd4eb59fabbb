"""The drafters keep the contract of their interface."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.testing.drafter import DrafterContract, MakeDrafter
from pegboard_ngram.ngram import Ngram
from pegboard_ngram.options import NgramOptions, SuffixOptions
from pegboard_ngram.suffix import Suffix


class TestNgram(DrafterContract):
    @pytest.fixture(params=[(1, 1), (2, 4), (3, 16)])
    def make(self, request: pytest.FixtureRequest) -> MakeDrafter:
        least, most = request.param
        options = NgramOptions(prompt_lookup_min=least, prompt_lookup_max=most)
        return lambda context: Ngram(context, options)


class TestSuffix(DrafterContract):
    @pytest.fixture(params=[1, 2, 7])
    def make(self, request: pytest.FixtureRequest) -> MakeDrafter:
        options = SuffixOptions(min_match=request.param)
        return lambda context: Suffix(context, options)


class TestSuffixOfRecentOutputs(DrafterContract):
    remembers = True

    @pytest.fixture(params=[1, 64, 5000])
    def make(self, request: pytest.FixtureRequest) -> MakeDrafter:
        options = SuffixOptions(recent_tokens=request.param)
        return lambda context: Suffix(context, options)


class TestSmallestMemory(DrafterContract):
    @pytest.fixture(params=["ngram", "suffix"])
    def make(self, request: pytest.FixtureRequest) -> MakeDrafter:
        few: dict[str, Any] = {"max_tokens": 64}
        if request.param == "ngram":
            return lambda context: Ngram(context, NgramOptions(**few))
        return lambda context: Suffix(context, SuffixOptions(**few))
