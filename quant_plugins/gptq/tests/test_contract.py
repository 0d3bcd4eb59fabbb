"""The plugin keeps the contract, in each of the forms that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
from pegboard.testing.quantized_checkpoint import facts_of, source_of, write_checkpoint
from pegboard.testing.quantizer import QuantizerContract, QuantizerUnderTest
from pegboard_gptq.plan import parameters, resident_bytes
from pegboard_gptq.quantizer import GPTQQuantizer
from pegboard_quant import gptq_layout, packed_scheme
from pegboard_quant.codes import UnsignedCodes
from pegboard_quant.options import ActivationOptions
from pegboard_quant.rounding import Zeros, round_to_nearest

Written = Mapping[str, torch.Tensor]
Write = Callable[[UnsignedCodes], Written]


def write_with(
    folder: Path,
    weights: Written,
    config: Mapping[str, Any],
    stored: Callable[[torch.Tensor], Written],
) -> CheckpointFacts:
    """A checkpoint whose linear layers are stored in codes."""
    tensors = {name: tensor for name, tensor in weights.items() if "_proj" not in name}
    for name, tensor in weights.items():
        if "_proj" in name:
            layer = name.removesuffix("weight")
            tensors |= {f"{layer}{part}": value for part, value in stored(tensor).items()}
    return facts_of(write_checkpoint(folder, {"quantization_config": config}, tensors))


class GPTQContract(QuantizerContract):
    bits: ClassVar[int]
    group_size: ClassVar[int] = 32
    zeros: ClassVar[Zeros] = "middle"
    options: ClassVar[ActivationOptions] = ActivationOptions()

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": self.zeros == "middle",
            "checkpoint_format": "gptq" if self.zeros == "middle" else "gptq_v2",
        }

    def written(self, values: torch.Tensor) -> Written:
        codes = round_to_nearest(values, self.bits, self.group_size, self.zeros, torch.float16)
        return gptq_layout.stored(codes, minus_one=self.zeros == "middle")

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        def write(folder: Path, weights: Written) -> CheckpointFacts:
            return write_with(folder, weights, self.config(), self.written)

        def make(context: QuantizerContext) -> Quantizer:
            return GPTQQuantizer(context, self.options)

        return QuantizerUnderTest(make, parameters, resident_bytes, write, source_of, self.options)


class TestTwoBits(GPTQContract):
    bits = 2
    tolerance = 0.36


class TestThreeBits(GPTQContract):
    bits = 3
    zeros = "fitted"
    tolerance = 0.16


class TestFourBits(GPTQContract):
    bits = 4
    tolerance = 0.07


class TestFourBitsOfRowsWithQuantizedInputs(GPTQContract):
    bits = 4
    group_size = -1
    zeros = "fitted"
    options = ActivationOptions(activations="int8")
    tolerance = 0.07


class TestEightBits(GPTQContract):
    bits = 8
    tolerance = 0.005


class PackedContract(GPTQContract):
    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.zeros == "middle",
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": self.group_size,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }

    def written(self, values: torch.Tensor) -> Written:
        codes = round_to_nearest(values, self.bits, self.group_size, self.zeros, torch.bfloat16)
        symmetric = self.zeros == "middle"
        return packed_scheme.stored_tensors(codes, torch.bfloat16, symmetric=symmetric)


class TestPackedThreeBits(PackedContract):
    bits = 3
    tolerance = 0.16


class TestPackedFourBits(PackedContract):
    bits = 4
    zeros = "fitted"
    tolerance = 0.07


class TestPackedEightBitsOfRows(PackedContract):
    bits = 8
    group_size = -1
    tolerance = 0.01
