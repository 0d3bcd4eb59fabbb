"""Dequantized weights are those of other tools, bit for bit, and of the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.testing.quantized_checkpoint import (
    dequantized,
    facts_of,
    weights_that_differ,
    write_checkpoint,
)
from pegboard_quant.options import CheckpointOptions
from pegboard_smoothquant.quantizer import SmoothQuantizer

LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("name", ["ct-w8a8-int8-dynamic", "ct-w8a8-int8-static"])
def test_weights_are_the_tools_bit_for_bit(quant_data: Path, name: str) -> None:
    differ = weights_that_differ(
        quant_data / name,
        lambda facts: SmoothQuantizer(QuantizerContext(facts, "float32"), CheckpointOptions()),
    )
    assert differ and not any(differ.values()), differ


def loaded(folder: Path, args: dict[str, object], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The dequantized weight of one layer, whose inputs stay float."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **args}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    named = {f"{LAYER}.{key}": tensor for key, tensor in tensors.items()}
    facts = facts_of(write_checkpoint(folder, {"quantization_config": config}, named))
    quantizer = SmoothQuantizer(QuantizerContext(facts, "float32"), CheckpointOptions())
    return dequantized(quantizer, facts)[f"{LAYER}.weight"]


CODES = torch.arange(-128, 128).to(torch.int8).view(8, 32)


@pytest.mark.parametrize("columns", [8, 12])
def test_groups_and_a_shorter_last_one(tmp_path: Path, columns: int) -> None:
    groups = -(-32 // columns)
    scales = torch.rand(8, groups) + 0.5
    zeros = torch.randint(-128, 128, (8, groups)).to(torch.int8)
    args = {"strategy": "group", "group_size": columns, "symmetric": False}
    stored = {"weight": CODES, "weight_scale": scales, "weight_zero_point": zeros}
    got = loaded(tmp_path, args, stored)
    for row in range(8):
        for column in range(32):
            group = column // columns
            code = float(CODES[row, column]) - float(zeros[row, group])
            assert got[row, column] == scales[row, group] * code


def test_groups_in_an_order_of_their_own(tmp_path: Path) -> None:
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3)).to(torch.int32) // 8
    scales = torch.rand(8, 4) + 0.5
    args = {"strategy": "group", "group_size": 8, "actorder": "group"}
    stored = {"weight": CODES, "weight_scale": scales, "weight_g_idx": order}
    assert torch.equal(loaded(tmp_path, args, stored), CODES.float() * scales[:, order.long()])


def test_zeros_that_a_tool_left_out_are_0(tmp_path: Path) -> None:
    args = {"strategy": "tensor", "symmetric": False}
    got = loaded(tmp_path, args, {"weight": CODES, "weight_scale": torch.tensor([0.5])})
    assert torch.equal(got, CODES.float() * 0.5)


def test_codes_of_fewer_bits_travel_in_bytes(tmp_path: Path) -> None:
    codes = CODES.clamp(-8, 7)
    args = {"strategy": "channel", "num_bits": 4}
    got = loaded(tmp_path, args, {"weight": codes, "weight_scale": torch.full((8, 1), 0.25)})
    assert torch.equal(got, codes.float() * 0.25)
