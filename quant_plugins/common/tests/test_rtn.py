"""Rounding to nearest writes a checkpoint. Its reader is another package's: `tests/system` reads it."""

from __future__ import annotations

import torch

from pegboard.interfaces.quantizer import WeightSpec
from pegboard_quant.bitstream import unpack
from pegboard_quant.rtn import RTNCalibrator, RTNSettings

WEIGHT = WeightSpec("model.layers.0.mlp.down_proj", (32, 64), "linear")


def test_symmetric_zeros_are_stored_less_one_and_others_as_they_are() -> None:
    values = torch.randn(WEIGHT.shape, generator=torch.Generator().manual_seed(0))
    for sym, version in ((True, "gptq"), (False, "gptq_v2")):
        calibrator = RTNCalibrator({WEIGHT.name: RTNSettings(sym=sym, group_size=32)}, ["lm_head"])
        made = calibrator.quantize([WEIGHT], [values])[0]
        config = calibrator.export({WEIGHT.name: list(made.parameters)})
        assert config["checkpoint_format"] == version
        zeros = unpack(made.parameters["qzeros"], 4, 32).float() + (1 if sym else 0)
        codes = unpack(made.parameters["qweight"], 4, 64, axis=0).float()
        scales = made.parameters["scales"].float()
        groups = made.parameters["g_idx"].long()
        meant = ((codes - zeros[groups]) * scales[groups]).T
        assert torch.equal(meant, made.values)
        assert float((meant - values).abs().max()) <= float(scales.max()) * 0.51


def test_what_differs_from_most_weights_is_said_of_each() -> None:
    names = ["model.layers.0.a", "model.layers.0.b", "model.layers.0.c"]
    settings = {name: RTNSettings(bits=4) for name in names}
    settings[names[2]] = RTNSettings(bits=8, group_size=-1)
    config = RTNCalibrator(settings, ["model.layers.0.d"]).export({})
    assert (config["bits"], config["group_size"]) == (4, 64)
    assert config["dynamic"] == {
        r"-:^model\.layers\.0\.d$": {},
        r"+:^model\.layers\.0\.c$": {"bits": 8, "group_size": -1, "sym": True},
    }
