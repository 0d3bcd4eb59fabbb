"""Whole files whose dequantized weights and logits are other tools': the weights bit for bit, packed or
not, and the logits as near as sums in another order are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
from pegboard.testing.linear_weight import dense
from pegboard.testing.quantized_checkpoint import largest_logprob_error
from pegboard_gguf.describe import describe
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.quantizer import GGUFQuantizer
from pegboard_gguf.source import GGUFSource

KINDS = {
    "gguf-q8_0": {"Q8_0"},
    "gguf-q4_0": {"Q4_0"},
    "gguf-q4_k-mixed-tied": {"Q4_K", "Q5_K", "Q6_K"},
}
"""Types of each file's matrices."""

FLOATS = [
    GGUFOptions(mode="dequantize", activations="float"),
    GGUFOptions(mode="packed", activations="float"),
]


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, quant_data: Path) -> Path:
    return quant_data / str(request.param)


@pytest.mark.parametrize("options", FLOATS, ids=lambda options: options.mode)
def test_weights_are_those_of_the_tool_bit_for_bit(folder: Path, options: GGUFOptions) -> None:
    facts = describe(folder / "model.gguf")
    kinds = {fact.format for fact in facts.tensors.values() if len(fact.shape) == 2}
    assert kinds == KINDS[folder.name]
    quantizer = GGUFQuantizer(QuantizerContext(facts, "float32"), options)
    source, compared = GGUFSource(facts), 0
    for key, wanted in load_file(folder / "expected.safetensors").items():
        what, _, name = key.partition(".")
        if what in ("dequant", "dequant_rows8"):
            rows, columns = facts.tensors[name].shape
            spec = WeightSpec(name.removesuffix(".weight"), (rows, columns), "linear")
            weight = quantizer.scheme(spec).load({"weight": source.read(name)})
            assert (weight.format != "float") == options.keeps_codes
            assert torch.equal(dense(weight).float()[: len(wanted)], wanted), key
            compared += 1
    source.close()
    assert compared >= 4


@pytest.mark.parametrize("options", FLOATS, ids=lambda options: options.mode)
def test_logits_are_those_of_the_dequantized_model(folder: Path, options: GGUFOptions) -> None:
    assert _error(folder, options) < 1e-4


def test_rounded_inputs_change_logits_a_little(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")["logits"]
    error = _error(folder, GGUFOptions(mode="packed", activations="int8"))
    assert 1e-3 < error < 0.1 * float(expected.std())


def _error(folder: Path, options: GGUFOptions) -> float:
    expected = load_file(folder / "expected.safetensors")
    config = {
        "model": str(folder / "model.gguf"),
        "dtype": "float32",
        "kv_cache": {"memory": "16MiB"},
        "quantizer": {"name": "gguf", "options": options.model_dump()},
    }
    return largest_logprob_error(config, expected["input_ids"][0].tolist(), expected["logits"][0])
