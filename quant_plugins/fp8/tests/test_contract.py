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
from pegboard_fp8.e4m3 import to_e4m3
from pegboard_fp8.plan import parameters, resident_bytes
from pegboard_fp8.quantizer import FP8Quantizer
from pegboard_quant.options import CheckpointOptions


class FP8Contract(QuantizerContract):
    """One form. `block` is rows and columns that share a scale; 0: all."""

    options: ClassVar[CheckpointOptions] = CheckpointOptions()
    block: ClassVar[tuple[int, int]] = (0, 0)
    scale: ClassVar[str] = "weight_scale"
    config: ClassVar[Mapping[str, Any]]
    tolerance = 0.036  # half a step of e4m3, of the largest

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        return QuantizerUnderTest(
            partial(FP8Quantizer, options=self.options),
            parameters,
            resident_bytes,
            self.write,
            open=source_of,
            options=self.options,
        )

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            codes, scales = quantized(weight, self.block)
            layer = name.removesuffix(".weight")
            tensors |= {name: codes, f"{layer}.{self.scale}": scales}
            if self.config.get("activation_scheme") == "static":
                tensors[f"{layer}.input_scale"] = torch.tensor(0.5)
        return facts_of(write_checkpoint(folder, {"quantization_config": self.config}, tensors))


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight, a block after the other."""
    height, width = (step or size for step, size in zip(block, weight.shape, strict=True))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = []
    for row in range(0, weight.shape[0], height):
        for column in range(0, weight.shape[1], width):
            part = weight[row : row + height, column : column + width]
            scales.append(part.abs().max() / 448)
            codes[row : row + height, column : column + width] = to_e4m3(part / scales[-1])
    return codes, torch.stack(scales).reshape(-(-weight.shape[0] // height), -1)


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear", "Embedding"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


FLOAT8 = {"num_bits": 8, "type": "float"}


class TestBlocks(FP8Contract):
    block = (48, 32)
    scale = "weight_scale_inv"
    config: ClassVar[Mapping[str, Any]] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [48, 32],
    }


class TestBlocksThatDoNotDivide(TestBlocks):
    block = (40, 48)
    config: ClassVar[Mapping[str, Any]] = {**TestBlocks.config, "weight_block_size": [40, 48]}


class TestRows(FP8Contract):
    block = (1, 0)
    config: ClassVar[Mapping[str, Any]] = compressed(
        {**FLOAT8, "strategy": "channel"}, {**FLOAT8, "strategy": "token", "dynamic": True}
    )


class TestGroupsOfRows(FP8Contract):
    block = (1, 32)
    config: ClassVar[Mapping[str, Any]] = compressed(
        {**FLOAT8, "strategy": "group", "group_size": 32}, None
    )


class TestWholeAndStatic(FP8Contract):
    config: ClassVar[Mapping[str, Any]] = {"quant_method": "fp8", "activation_scheme": "static"}


class TestFloatInputsOnRequest(TestWholeAndStatic):
    options = CheckpointOptions(activations="float")
