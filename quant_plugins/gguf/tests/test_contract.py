"""The plugin keeps the contracts of what it provides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.testing.checkpoint_source import CheckpointSourceContract, SourceUnderTest
from pegboard.testing.quantizer import QuantizerContract, QuantizerUnderTest
from pegboard_gguf.describe import describe
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.plan import parameters, resident_bytes
from pegboard_gguf.quantizer import GGUFQuantizer
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


class GGUFQuantizerContract(QuantizerContract):
    kind: GGMLQuantizationType
    options = GGUFOptions(mode="dequantize")

    @pytest.fixture
    def make(self, write_model: Any, tiny_config: dict[str, Any]) -> QuantizerUnderTest:
        def write(folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
            kinds = dict.fromkeys(weights, self.kind)
            path = folder / "model.gguf"
            return describe(write_model(tiny_config, weights, kinds=kinds, path=path))

        return QuantizerUnderTest(
            partial(GGUFQuantizer, options=self.options),
            parameters,
            resident_bytes,
            write,
            open=GGUFSource,
            options=self.options,
        )


class TestFloats(GGUFQuantizerContract):
    kind = GGMLQuantizationType.F32


class TestEightBits(GGUFQuantizerContract):
    kind = GGMLQuantizationType.Q8_0
    tolerance = 0.005


class TestFourBits(GGUFQuantizerContract):
    kind = GGMLQuantizationType.Q4_1
    tolerance = 0.08


class TestPackedFloats(TestFloats):
    options = GGUFOptions(mode="packed")


class TestPackedEightBits(TestEightBits):
    options = GGUFOptions(mode="packed", activations="float")


class TestPackedFourBits(TestFourBits):
    options = GGUFOptions(mode="packed", activations="int8")


class TestPackedFourBitsWithZeros(TestPackedFourBits):
    kind = GGMLQuantizationType.Q4_0
    tolerance = 0.13
