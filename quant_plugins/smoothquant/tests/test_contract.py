"""The plugin keeps the contracts of what it provides, in each of the forms that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.testing.quantized_checkpoint import facts_of, source_of, write_checkpoint
from pegboard.testing.quantizer import QuantizerContract, QuantizerUnderTest
from pegboard_quant.options import CheckpointOptions
from pegboard_smoothquant.plan import parameters, resident_bytes
from pegboard_smoothquant.quantizer import SmoothQuantizer

DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


class SmoothQuantContract(QuantizerContract):
    """One form. `group` is inputs that share a scale; 0: all, of all rows too where `whole`."""

    options: ClassVar[CheckpointOptions] = CheckpointOptions()
    weights_args: ClassVar[Mapping[str, Any]]
    inputs: ClassVar[Mapping[str, Any] | None] = DYNAMIC
    group: ClassVar[int] = 0
    whole: ClassVar[bool] = False
    zeros: ClassVar[bool] = False
    tolerance = 0.005

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        return QuantizerUnderTest(
            partial(SmoothQuantizer, options=self.options),
            parameters,
            resident_bytes,
            self.write,
            open=source_of,
            options=self.options,
        )

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            layer = name.removesuffix(".weight")
            for key, tensor in self.written(weight).items():
                tensors[f"{layer}.{key}"] = tensor
        args = {"num_bits": 8, "type": "int", **self.weights_args}
        group = {"targets": ["Linear", "Embedding"], "weights": args}
        config = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {**group, "input_activations": self.inputs}},
        }
        return facts_of(write_checkpoint(folder, {"quantization_config": config}, tensors))

    def written(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes, scales and zeros of a weight."""
        rows, columns = weight.shape
        size = self.group or columns
        parts = weight.reshape(1, rows * columns) if self.whole else weight.view(-1, size)
        most, least = parts.amax(1, keepdim=True), parts.amin(1, keepdim=True)
        scales = parts.abs().amax(1, keepdim=True) / 127
        zeros = torch.zeros_like(scales)
        if self.zeros:
            scales = (most - least) / 255
            zeros = (-128 - least / scales).round()
        codes = (parts / scales + zeros).round().clamp(-128, 127).to(torch.int8)
        shape = (1,) if self.whole else (rows, -1)
        stored = {"weight": codes.view(rows, columns), "weight_scale": scales.reshape(shape)}
        if self.zeros:
            stored["weight_zero_point"] = zeros.to(torch.int8).reshape(shape)
        if self.inputs is not None and not self.inputs.get("dynamic"):
            stored["input_scale"] = torch.tensor([0.02])
            if self.inputs.get("symmetric") is False:
                stored["input_zero_point"] = torch.tensor([-7], dtype=torch.int8)
        return stored


class TestRows(SmoothQuantContract):
    weights_args: ClassVar[Mapping[str, Any]] = {"strategy": "channel"}


class TestRowsWithZeros(TestRows):
    weights_args: ClassVar[Mapping[str, Any]] = {"strategy": "channel", "symmetric": False}
    zeros = True


class TestGroups(SmoothQuantContract):
    weights_args: ClassVar[Mapping[str, Any]] = {"strategy": "group", "group_size": 32}
    group = 32


class TestWholeAndStatic(SmoothQuantContract):
    weights_args: ClassVar[Mapping[str, Any]] = {"strategy": "tensor"}
    inputs: ClassVar[Mapping[str, Any] | None] = {
        "num_bits": 8,
        "type": "int",
        "strategy": "tensor",
        "symmetric": False,
    }
    whole = True


class TestFloatInputsOnRequest(TestWholeAndStatic):
    options = CheckpointOptions(activations="float")


class TestFloatInputs(TestRows):
    inputs: ClassVar[Mapping[str, Any] | None] = None
