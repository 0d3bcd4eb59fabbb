"""SmoothQuant writes a checkpoint that its quantizer reads; outliers move into weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pegboard.interfaces.quantizer import WeightSpec
from pegboard.testing.calibrator import CalibratorContract, CalibratorUnderTest
from pegboard.testing.command_context import TinyCommandContext
from pegboard.testing.tiny import write_tiny_model
from pegboard_quant.options import CheckpointOptions
from pegboard_smoothquant.calibrator import SmoothQuantCalibrator, SmoothQuantSettings
from pegboard_smoothquant.quantizer import SmoothQuantizer

WEIGHT = WeightSpec("model.layers.0.mlp.down_proj", (16, 64), "linear")


class TestSmoothQuantCalibrator(CalibratorContract):
    settings = (
        {},
        {"weights": "tensor", "activations": "static"},
        {"activations": "auto"},
        {"activations": "auto", "static_error": 1e9},
    )

    @pytest.fixture
    def make(self) -> CalibratorUnderTest:
        quantizer = partial(SmoothQuantizer, options=CheckpointOptions())
        return CalibratorUnderTest(SmoothQuantCalibrator, quantizer)


def test_smoothing_leaves_the_outputs_and_evens_the_inputs(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_hidden_layers=1)
    stream = TinyCommandContext().stream_layers(str(folder))
    rows = stream.parameter("model.embed_tokens.weight")
    rows[:, 3] *= 100
    layer = stream.layer(0, [rows[:24]])
    q_proj = layer.groups[0][0].name

    def unevenness() -> float:
        inputs = next(layer.inputs(q_proj)).abs().amax(0)
        return float(inputs.max() / inputs.median())

    before, uneven = list(layer.outputs()), unevenness()
    names = [weight.name for group in layer.groups for weight in group]
    SmoothQuantCalibrator(dict.fromkeys(names, SmoothQuantSettings(alpha=0.8)), []).fold(layer)
    assert unevenness() < 0.3 * uneven
    for one, other in zip(before, layer.outputs(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_static_inputs_are_chosen_only_where_they_are_as_good() -> None:
    even = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    outliers = even.clone()
    outliers[0] *= 300  # one token, as the first one of a text is in many models
    values = torch.randn(WEIGHT.shape, generator=torch.Generator().manual_seed(1))
    stored, notes = [], []
    for inputs in (even, outliers):
        settings = SmoothQuantSettings(activations="auto", static_error=4.0)
        calibrator = SmoothQuantCalibrator({WEIGHT.name: settings}, [])
        calibrator.observe([WEIGHT], inputs)
        made = calibrator.quantize([WEIGHT], [values])[0]
        stored.append(set(made.parameters))
        notes.append(made.note)
    assert "input_scale" in stored[0] and "input_scale" not in stored[1]
    assert "static inputs" in notes[0] and "dynamic inputs" in notes[1]


def test_a_static_scale_covers_the_largest_input_of_all_texts() -> None:
    settings = SmoothQuantSettings(activations="static")
    calibrator = SmoothQuantCalibrator({WEIGHT.name: settings}, [])
    for largest in (1.0, 12.7, 3.0):
        calibrator.observe([WEIGHT], torch.full((2, 64), -largest))
    made = calibrator.quantize([WEIGHT], [torch.ones(WEIGHT.shape)])[0]
    assert float(made.parameters["input_scale"]) == pytest.approx(0.1, rel=4e-3)
