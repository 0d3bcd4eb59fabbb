"""The float8 calibrator writes a checkpoint that its quantizer reads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from pegboard.interfaces.quantizer import WeightSpec
from pegboard.testing.calibrator import CalibratorContract, CalibratorUnderTest
from pegboard_fp8.calibrator import FP8Calibrator, FP8Settings
from pegboard_fp8.quantizer import FP8Quantizer
from pegboard_quant.options import CheckpointOptions

WEIGHT = WeightSpec("model.layers.0.mlp.down_proj", (16, 64), "linear")


class TestFP8Calibrator(CalibratorContract):
    settings = (
        {},
        {"weights": "tensor", "activations": "static"},
        {"weights": "block"},
        {"weights": "channel", "activations": "none"},
    )

    @pytest.fixture
    def make(self) -> CalibratorUnderTest:
        quantizer = partial(FP8Quantizer, options=CheckpointOptions())
        return CalibratorUnderTest(FP8Calibrator, quantizer)


@pytest.mark.parametrize("weights", ["tensor", "channel", "block"])
def test_no_weight_is_further_off_than_its_type_allows(weights: str) -> None:
    values = torch.randn(WEIGHT.shape, generator=torch.Generator().manual_seed(4))
    values[3] *= 100
    settings = FP8Settings.model_validate({"weights": weights})
    made = FP8Calibrator({WEIGHT.name: settings}, []).quantize([WEIGHT], [values])[0]
    # Three bits of mantissa, and the least step of subnormal numbers at the scale of the largest.
    share = {"tensor": values.abs().max(), "channel": values.abs().amax(1, keepdim=True)}
    largest = share.get(weights, values.abs().max())
    step = largest / 448 * 2.0**-9 * 1.01
    assert bool(((made.values - values).abs() <= values.abs() / 15 + step).all())


def test_blocks_have_dynamic_inputs() -> None:
    with pytest.raises(ValidationError, match="weights in blocks have dynamic inputs"):
        FP8Settings(weights="block", activations="static")
