"""The quantizers that round while they load keep the contract."""

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
from pegboard_quant import online_plan
from pegboard_quant.online import INT8, W4, OnlineQuantizer, Rounding
from pegboard_quant.options import RoundingOptions


def write(folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
    return facts_of(write_checkpoint(folder, {}, weights))


class RoundingContract(QuantizerContract):
    rounding_of: ClassVar[Rounding]
    options: ClassVar[RoundingOptions] = RoundingOptions()

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        def make(context: QuantizerContext) -> Quantizer:
            return OnlineQuantizer(context, self.options, self.rounding_of)

        resident_bytes = (
            online_plan.int8_bytes if self.rounding_of is INT8 else online_plan.w4_bytes
        )
        return QuantizerUnderTest(
            make, online_plan.parameters, resident_bytes, write, source_of, self.options
        )


class TestInt8(RoundingContract):
    rounding_of = INT8
    tolerance = 0.005


class TestW4(RoundingContract):
    rounding_of = W4
    tolerance = 0.07


class TestW4OfEverythingInSmallGroups(RoundingContract):
    rounding_of = W4
    options = RoundingOptions(group_size=32, activations="int8", embedding=True)
    tolerance = 0.07


class TestInt8OfRows(RoundingContract):
    rounding_of = INT8
    options = RoundingOptions(group_size=-1)
    tolerance = 0.005
