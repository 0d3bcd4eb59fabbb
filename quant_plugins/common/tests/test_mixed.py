"""Checkpoints whose groups of weights have layouts of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.quantized_checkpoint import (
    REFERENCE,
    changed_checkpoint,
    dequantized,
    facts_of,
    logprob_errors,
    refusal,
    source_of,
    tools_logits,
    weights_that_differ,
    write_checkpoint,
)
from pegboard.testing.quantizer import QuantizerContract, QuantizerUnderTest
from pegboard_quant import mixed_plan, packed_scheme
from pegboard_quant.mixed import MixedQuantizer
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.rounding import round_to_nearest

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BY_TOKEN = {"dynamic": True, "strategy": "token"}
TOOLS_ROUNDING = 0.03  # what rounded inputs change, and float16
SAME = 1e-4
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "targets": ["Embedding"],
            "weights": FLOAT8,
            "input_activations": None,
            "format": "float-quantized",
        },
        "group_1": {
            "targets": ["Linear"],
            "weights": INT8,
            "input_activations": {**INT8, **BY_TOKEN},
            "format": "int-quantized",
        },
        "group_2": {
            "targets": ["re:.*down_proj"],
            "weights": INT4,
            "input_activations": None,
            "format": "pack-quantized",
        },
    },
}


class TestMixed(QuantizerContract):
    """The embedding in float8, q_proj in int8, down_proj packed."""

    options: ClassVar[CheckpointOptions] = CheckpointOptions()
    tolerance = 0.07

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        return QuantizerUnderTest(
            partial(MixedQuantizer, options=self.options),
            mixed_plan.parameters,
            mixed_plan.resident_bytes,
            write,
            source_of,
            self.options,
        )


class TestMixedWithFloatInputs(TestMixed):
    options = CheckpointOptions(activations="float")


def write(folder: Path, weights: Mapping[str, torch.Tensor]) -> CheckpointFacts:
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{key}": tensor for key, tensor in written(layer, weight).items()}
    return facts_of(write_checkpoint(folder, {"quantization_config": CONFIG}, tensors))


def written(layer: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    if layer.endswith("down_proj"):
        codes = round_to_nearest(weight, 4, 32, "middle", torch.bfloat16)
        return packed_scheme.stored_tensors(codes, torch.bfloat16, symmetric=True)
    most = weight.abs().amax(1, keepdim=True)
    if layer.endswith("embed_tokens"):
        scales = most / 448
        return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}
    scales = most / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def test_weights_are_the_tools_bit_for_bit(quant_data: Path) -> None:
    differ = weights_that_differ(
        quant_data / "ct-mixed",
        lambda facts: MixedQuantizer(QuantizerContext(facts, "float32"), CheckpointOptions()),
    )
    assert len(differ) == 4 and not any(differ.values()), differ


@pytest.mark.parametrize(
    ("activations", "formats"),
    [
        ("checkpoint", ("float", "float8:dynamic", "int8:dynamic", "uint4")),
        ("float", ("float", "float8", "int8", "uint4")),
    ],
)
def test_each_group_has_its_format(
    quant_data: Path, activations: str, formats: tuple[str, ...]
) -> None:
    facts = facts_of(quant_data / "ct-mixed")
    options = CheckpointOptions.model_validate({"activations": activations})
    assert mixed_plan.formats(facts, options) == formats
    quantizer = MixedQuantizer(QuantizerContext(facts, "float32"), options)
    for layer, shape, codes in (
        ("0.self_attn.v_proj", (32, 64), "float"),
        ("1.self_attn.v_proj", (32, 64), "int8"),
        ("1.mlp.up_proj", (96, 64), "uint4"),
        ("1.mlp.down_proj", (64, 96), "float8"),
    ):
        found = quantizer.scheme(WeightSpec(f"model.layers.{layer}", shape, "linear")).format
        assert found in formats and found.partition(":")[0] == codes


def engine_of(folder: Path, **options: str) -> dict[str, Any]:
    return {
        **REFERENCE,
        "model": str(folder),
        "quantizer": {"name": "mixed", "options": options} if options else "auto",
    }


def test_an_engine_finds_the_quantizer_and_gives_the_tools_logits(quant_data: Path) -> None:
    ids, logits = tools_logits(quant_data / "ct-mixed")
    (error,) = logprob_errors(engine_of(quant_data / "ct-mixed"), [ids], [logits])
    assert error < TOOLS_ROUNDING


def test_with_float_inputs_an_engine_computes_what_a_straight_decoder_does(
    quant_data: Path,
) -> None:
    folder = quant_data / "ct-mixed"
    facts = facts_of(folder)
    quantizer = MixedQuantizer(QuantizerContext(facts, "float32"), CheckpointOptions())
    decoder = DenseDecoder(facts.config, dequantized(quantizer, facts))
    ids = list(range(3, 40))
    (error,) = logprob_errors(
        engine_of(folder, activations="float"), [ids], [decoder.forward(ids)[0]]
    )
    assert error < SAME


def _nameless(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config["config_groups"]["group_0"]["format"]


def _unknown(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["config_groups"]["group_2"]["format"] = "nvfp4-pack-quantized"


def _ignored(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["ignore"].append("model.layers.1.mlp.down_proj")


def _swapped(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["config_groups"]["group_1"]["targets"] = ["re:.*down_proj"]
    config["config_groups"]["group_2"]["targets"] = ["Linear"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_nameless, "group_0.format: mixed-precision; allowed: pack-quantized, int-quantized"),
        (_unknown, "group_2.format: nvfp4-pack-quantized; allowed: pack-quantized"),
        (_ignored, "layers.1.mlp.down_proj.weight: stored as float8_e4m3fn in"),
        (_swapped, "mlp.gate_proj.weight: missing in"),
    ],
)
def test_what_contradicts_itself_is_refused_in_a_line(
    quant_data: Path, tmp_path: Path, change: Any, line: str
) -> None:
    folder = changed_checkpoint(quant_data / "ct-mixed", tmp_path / "model", change)
    said = refusal({"model": str(folder)})
    assert said is not None and line in said
