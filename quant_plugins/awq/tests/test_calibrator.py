"""AWQ writes a checkpoint that its quantizer reads; its searches never make things worse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.quantizer import WeightSpec
from pegboard.testing.calibrator import CalibratorContract, CalibratorUnderTest
from pegboard.testing.command_context import TinyCommandContext
from pegboard.testing.tiny import write_tiny_model
from pegboard_awq.calibrator import AWQCalibrator, AWQSettings
from pegboard_awq.quantizer import AWQQuantizer
from pegboard_awq.search import clipped, meaning, nearest
from pegboard_quant.options import ActivationOptions

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


class TestAWQCalibrator(CalibratorContract):
    settings = ({}, {"group_size": 32, "clip": False}, {"group_size": -1})

    @pytest.fixture
    def make(self) -> CalibratorUnderTest:
        quantizer = partial(AWQQuantizer, options=ActivationOptions())
        return CalibratorUnderTest(AWQCalibrator, quantizer)


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 1), ("qwen2", 2)])
def test_folding_leaves_the_layers_outputs(tmp_path: Path, family: str, kv_heads: int) -> None:
    folder = write_tiny_model(tmp_path, family, num_key_value_heads=kv_heads, **SIZES)
    stream = TinyCommandContext().stream_layers(str(folder))
    rows = stream.parameter("model.embed_tokens.weight")
    # Inputs with outliers, as those of real models have.
    rows[:, ::13] *= 30
    layer = stream.layer(0, [rows[:12], rows[40:50]])
    before, plain = list(layer.outputs()), dict(layer.parameters)
    names = [weight.name for group in layer.groups for weight in group]
    AWQCalibrator(dict.fromkeys(names, AWQSettings(group_size=32)), []).fold(layer)
    changed = {n for n, v in layer.parameters.items() if not torch.equal(v, plain[n])}
    norm, v_proj = "input_layernorm.weight", "self_attn.v_proj.weight"
    prefix = "model.layers.0."
    assert prefix + norm in changed and prefix + "self_attn.q_proj.weight" in changed
    assert prefix + "mlp.down_proj.weight" in changed
    # Heads that share keys and values cannot take scales of each output.
    assert (prefix + "self_attn.o_proj.weight" in changed) <= (kv_heads == 2)
    assert prefix + v_proj in changed
    for one, other in zip(before, layer.outputs(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_cutting_ranges_never_loses_on_the_inputs() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(16, 64, generator=generator)
    values[:, 7] *= 12
    inputs = torch.randn(200, 64, generator=generator)
    inputs[:, 7] *= 0.01
    groups = inputs.view(200, 2, 32).transpose(0, 1)
    cut = clipped(values, 32, torch.bmm(groups.transpose(1, 2), groups))

    def losses(weight: torch.Tensor) -> torch.Tensor:
        wrong = (meaning(nearest(weight, 32)) - values).view(16, 2, 32)
        return torch.einsum("ngi,gti->ngt", wrong, groups).square().sum(-1)

    assert bool((losses(cut) <= losses(values) * (1 + 1e-4)).all())
    assert float(losses(cut).sum()) < 0.8 * float(losses(values).sum())


def test_inputs_of_very_different_sizes_keep_all_finite(tmp_path: Path) -> None:
    """Scales are stored in float16, and a weight times the scale of its input may be beyond it."""
    folder = write_tiny_model(tmp_path, num_key_value_heads=2, **SIZES)
    stream = TinyCommandContext().stream_layers(str(folder))
    rows = stream.parameter("model.embed_tokens.weight")
    rows[:, ::13] *= 1e6
    rows[:, 1::13] *= 1e-6
    layer = stream.layer(0, [rows[:12]])
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layer.parameters[f"model.layers.0.{norm}.weight"][::13] = 3e4
    names = [weight.name for group in layer.groups for weight in group]
    for name in names:
        layer.parameters[f"{name}.weight"] *= 1e3
    calibrator = AWQCalibrator(dict.fromkeys(names, AWQSettings(group_size=32)), [])
    calibrator.fold(layer)
    for group in layer.groups:
        for inputs in layer.inputs(group[0].name):
            calibrator.observe(group, inputs)
        values = [layer.parameters[f"{weight.name}.weight"] for weight in group]
        for made in calibrator.quantize(group, values):
            assert bool(made.parameters["scales"].isfinite().all())
            assert bool(made.values.isfinite().all())


def test_one_checkpoint_has_one_form() -> None:
    with pytest.raises(ConfigError, match="settings: differ between weights"):
        AWQCalibrator({"a": AWQSettings(), "b": AWQSettings(group_size=32)}, [])


def test_outputs_that_fill_no_words_are_refused() -> None:
    calibrator = AWQCalibrator({"a": AWQSettings()}, [])
    with pytest.raises(ConfigError, match="a has 12"):
        calibrator.check(WeightSpec("a", (12, 64), "linear"))
    with pytest.raises(ConfigError, match="64 does not divide the 96 inputs"):
        calibrator.check(WeightSpec("a", (16, 96), "linear"))
