"""The built-in quantizer keeps its contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.builtin.safetensors_describe import describe
from pegboard.builtin.safetensors_source import SafetensorsSource
from pegboard.builtin.unquantized import Unquantized
from pegboard.builtin.unquantized_plan import parameters, resident_bytes
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.testing.quantizer import QuantizerContract, QuantizerUnderTest


def write(folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file(dict(weights), folder / "model.safetensors")
    return describe(folder)


class TestUnquantized(QuantizerContract):
    dtypes = ("float32", "bfloat16", "float64")

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        return QuantizerUnderTest(
            Unquantized, parameters, resident_bytes, write, open=SafetensorsSource
        )
