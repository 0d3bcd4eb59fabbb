"""The built-in decoder keeps its contract, in each of its families."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.models.llama import build
from pegboard.models.shape import describe
from pegboard.testing.model import ModelContract, ModelUnderTest, of_family


class TestLlama(ModelContract):
    @pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> ModelUnderTest:
        return of_family(request.param, describe, build, tmp_path)


class TestTiedLlama(ModelContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> ModelUnderTest:
        return of_family("llama", describe, build, tmp_path, tie_word_embeddings=True)
