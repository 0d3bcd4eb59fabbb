"""The plugin keeps the contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
from pegboard.testing.quantized_checkpoint import facts_of, source_of, write_checkpoint
from pegboard.testing.quantizer import QuantizerContract, QuantizerUnderTest
from pegboard_awq.packing import stored_tensors
from pegboard_awq.plan import parameters, resident_bytes
from pegboard_awq.quantizer import AWQQuantizer
from pegboard_quant.options import ActivationOptions
from pegboard_quant.rounding import Zeros, round_to_nearest


class AWQContract(QuantizerContract):
    group_size: ClassVar[int] = 32
    zeros: ClassVar[Zeros] = "fitted"
    options: ClassVar[ActivationOptions] = ActivationOptions()
    tolerance = 0.07

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        def write(folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
            tensors = {}
            for name, values in weights.items():
                if "_proj" not in name:
                    tensors[name] = values
                    continue
                codes = round_to_nearest(values, 4, self.group_size, self.zeros, torch.float16)
                layer = name.removesuffix("weight")
                for part, tensor in stored_tensors(codes, torch.float16).items():
                    tensors[f"{layer}{part}"] = tensor
            config = {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group_size,
                "zero_point": self.zeros == "fitted",
                "version": "gemm",
            }
            folder = write_checkpoint(folder, {"quantization_config": config}, tensors)
            return facts_of(folder)

        def make(context: QuantizerContext) -> Quantizer:
            return AWQQuantizer(context, self.options)

        return QuantizerUnderTest(make, parameters, resident_bytes, write, source_of, self.options)


class TestZeros(AWQContract):
    pass


class TestNoZeros(AWQContract):
    zeros = "middle"


class TestRowsWithQuantizedInputs(AWQContract):
    group_size = -1
    options = ActivationOptions(activations="int8")
