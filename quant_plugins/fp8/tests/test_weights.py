"""Dequantized weights are those of other tools, bit for bit, and of the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.interfaces.quantizer import QuantizerContext, StoredParameter, WeightSpec
from pegboard.testing.linear_weight import dense
from pegboard.testing.quantized_checkpoint import weights_that_differ
from pegboard_fp8.quantizer import FP8Quantizer
from pegboard_quant.eight_bit import Rule
from pegboard_quant.eight_bit_layers import FLOAT8, EightBitLayer
from pegboard_quant.eight_bit_scheme import EightBitScheme
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.scale_blocks import ScaleBlocks

FIXTURES = (
    "ct-fp8-block",
    "ct-fp8-block-ragged",
    "ct-fp8-dynamic",
    "ct-fp8-static-kv",
    "fp8-block-inv",
    "fp8-tensor-static",
)


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_are_the_tools_bit_for_bit(quant_data: Path, name: str) -> None:
    differ = weights_that_differ(
        quant_data / name,
        lambda facts: FP8Quantizer(QuantizerContext(facts, "float32"), CheckpointOptions()),
    )
    assert differ and not any(differ.values()), differ


sizes = st.integers(1, 9)


@given(sizes, sizes, sizes, sizes)
def test_a_code_is_multiplied_by_the_scale_of_its_block(
    rows: int, columns: int, height: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(rows + 10 * columns)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    grid = (-(-rows // height), -(-columns // width))
    scales = torch.rand(grid, generator=generator) + 0.5
    blocks = ScaleBlocks((rows, columns), (height, width))
    got = scheme(blocks, Rule("block", (height, width))).dequantize(
        {"weight": codes, "weight_scale": scales}
    )
    for row in range(rows):
        for column in range(columns):
            scale = scales[row // height, column // width]
            assert got[row, column] == codes[row, column].float() * scale


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_an_already_fused_weight_is_of_all_its_rows(shape: tuple[int, ...]) -> None:
    fused = ScaleBlocks((12, 4), (12, 4))
    codes = torch.ones(12, 4).to(torch.float8_e4m3fn)
    weight = scheme(fused, Rule("tensor"), shape).load(
        {"weight": codes, "weight_scale": torch.full(shape, 0.75)}
    )
    assert torch.equal(dense(weight), torch.full((12, 4), 0.75, dtype=torch.float64))


def scheme(
    blocks: ScaleBlocks, rule: Rule, scale_shape: tuple[int, ...] | None = None
) -> EightBitScheme:
    stored = (
        StoredParameter("weight", blocks.shape, "float8_e4m3fn"),
        StoredParameter("weight_scale", blocks.grid if scale_shape is None else scale_shape),
    )
    layer = EightBitLayer(FLOAT8, rule, "weight_scale", blocks, stored)
    return EightBitScheme(WeightSpec("fused", blocks.shape, "linear"), layer, CheckpointOptions())
