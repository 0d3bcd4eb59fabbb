"""The plugin keeps the contracts of what it provides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.testing.checkpoint_source import CheckpointSourceContract, SourceUnderTest
from pegboard_gguf.describe import describe
from pegboard_gguf.source import GGUFSource


class TestGGUFSource(CheckpointSourceContract):
    @pytest.fixture
    def make(self, write_model: Any) -> SourceUnderTest:
        def write(
            folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
        ) -> Path:
            path: Path = write_model(config, tensors, path=folder / "model.gguf")
            return path

        return SourceUnderTest(describe=describe, open=GGUFSource, write=write)


class TestGGUFSourceWithBiasesAndNorms(TestGGUFSource):
    @pytest.fixture(params=["mistral", "qwen2", "qwen3"])
    def config(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        from pegboard.testing.tiny import FAMILIES, ODD_SHAPE

        return {**ODD_SHAPE, **FAMILIES[request.param], "dtype": "float32"}
