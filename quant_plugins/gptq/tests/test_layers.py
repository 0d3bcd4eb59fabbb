"""How layers may be split over devices, and layers of one input that are stored in different ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.quantized_checkpoint import (
    changed_checkpoint,
    facts_of,
    largest_logprob_error,
    tensors_of,
)
from pegboard_gptq.plan import parameters
from pegboard_gptq.quantizer import GPTQQuantizer
from pegboard_quant.options import ActivationOptions

DOWN = WeightSpec("model.layers.0.mlp.down_proj", (64, 128), "linear")
SIZES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
IDS = [7, 300, 12, 12, 511, 3, 99, 41]


def _cut(folder: Path) -> dict[str, Any]:
    return {one.name: one.shard_axis for one in parameters(DOWN, facts_of(folder))}


def test_groups_are_cut_with_the_inputs_unless_a_map_may_name_any(root: Path) -> None:
    mapped = _cut(root / "tests/data/quant/gptq-4b-g32-desc-act")
    assert mapped["qweight"] == {"out": 1, "in": 0} and mapped["g_idx"] == {"out": None, "in": 0}
    # Where inputs are in any order, each part of them needs the scales of all groups.
    assert mapped["scales"] == mapped["qzeros"] == {"out": 1, "in": None}
    packed = _cut(root / "tests/data/quant/ct-w4a16-g32-asym")
    assert packed["weight_scale"] == packed["weight_zero_point"] == {"out": 0, "in": 1}


def test_words_are_not_cut_through(root: Path) -> None:
    stored = {
        one.name: one
        for one in parameters(DOWN, facts_of(root / "tests/data/quant/gptq-8b-g32-sym"))
    }
    assert (stored["qweight"].packing, stored["qweight"].packed_axis) == (4, "in")
    assert (stored["qzeros"].packing, stored["qzeros"].packed_axis) == (4, "out")


@pytest.mark.parametrize("order", ["as they are", "mapped"])
def test_layers_of_one_input_may_differ_in_bits_and_order(
    root: Path, tmp_path: Path, order: str
) -> None:
    """q in 8 bits and up in its own order beside k, v and gate: what others join and refuse."""
    data = root / "tests/data/quant"
    others = {
        "self_attn.q_proj": tensors_of(data / "gptq-8b-g32-sym"),
        "mlp.up_proj": tensors_of(data / "gptq-4b-g32-desc-act"),
    }
    if order == "as they are":
        del others["mlp.up_proj"]

    def mix(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for layer, donor in others.items():
            tensors |= {name: one for name, one in donor.items() if f".{layer}." in name}
        config["dynamic"] = {r".*\.q_proj": {"bits": 8}}

    folder = changed_checkpoint(data / "gptq-4b-g32-sym", tmp_path / "model", mix)
    expected, _ = DenseDecoder(facts_of(folder).config, _dequantized(folder)).forward(IDS)
    config = {"model": str(folder), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}
    assert largest_logprob_error(config, IDS, expected) < 1e-3


def _dequantized(folder: Path) -> dict[str, torch.Tensor]:
    facts, tensors = facts_of(folder), tensors_of(folder)
    quantizer = GPTQQuantizer(QuantizerContext(facts, "float32"), ActivationOptions())
    weights = {name: one for name, one in tensors.items() if name.endswith("weight")}
    for layer in (f"model.layers.{index}.{name}" for index in range(2) for name in SIZES):
        scheme = quantizer.scheme(WeightSpec(layer, SIZES[layer.split(".", 3)[3]], "linear"))
        stored = {one.name: tensors[f"{layer}.{one.name}"] for one in scheme.parameters}
        weights[f"{layer}.weight"] = scheme.dequantize(stored)
    return weights
