"""Checkpoints by other tools: weights bit for bit as theirs, logits as near as their README says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.testing.quantized_checkpoint import (
    largest_logprob_error,
    tools_logits,
    weights_that_differ,
)
from pegboard_gptq.quantizer import GPTQQuantizer
from pegboard_quant.options import ActivationOptions

TOLERANCE = {
    "gptq-3b-g32-sym": 5e-3,
    "gptq-4b-g32-asym-v1": 5e-3,
    "gptq-4b-g32-asym-v2": 5e-3,
    "gptq-4b-g32-desc-act": 5e-3,
    "gptq-4b-g32-sym": 5e-3,
    "gptq-8b-g32-sym": 5e-3,
    "ct-w3a16-g32": 1e-2,
    "ct-w4a16-g32-asym": 1e-2,
    "ct-w4a16-g32-sym": 1e-2,
}
"""Of logits, absolute."""


@pytest.fixture(params=TOLERANCE)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / "tests" / "data" / "quant" / str(request.param)


def test_weights_are_those_of_the_tool_bit_for_bit(folder: Path) -> None:
    differ = weights_that_differ(
        folder, lambda facts: GPTQQuantizer(QuantizerContext(facts, "float32"), ActivationOptions())
    )
    assert len(differ) == 4 and not any(differ.values()), differ


def test_logits_are_those_of_the_tool(folder: Path) -> None:
    config = {"model": str(folder), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}
    assert largest_logprob_error(config, *tools_logits(folder)) <= TOLERANCE[folder.name]


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_auto_round_says_more_and_means_the_same(root: Path, tmp_path: Path, method: str) -> None:
    """It writes how it rounded beside what the tensors are, under either name."""
    folder = root / "tests" / "data" / "quant" / "gptq-4b-g32-sym"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "packing_format": "auto_round:auto_gptq" if method == "auto-round" else None,
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int" if method == "auto-round" else None,
        "autoround_version": "0.8.0",
        "iters": 200,
        "lr": 0.005,
        "low_gpu_mem_usage": True,
        "block_name_to_quantize": "model.layers",
        "extra_config": {"lm_head": {"bits": 16}} if method == "auto-round" else None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = {"model": str(tmp_path), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}
    assert largest_logprob_error(small, *tools_logits(folder)) <= TOLERANCE[folder.name]


def test_settings_in_a_file_of_their_own_are_found(root: Path, tmp_path: Path) -> None:
    """Older tools wrote `quantize_config.json` and left the model's config as it was."""
    folder = root / "tests" / "data" / "quant" / "gptq-4b-g32-desc-act"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": True, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    small = {"model": str(tmp_path), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}
    assert largest_logprob_error(small, *tools_logits(folder)) <= 5e-3


@pytest.mark.parametrize("name", ["gptq-4b-g32-desc-act", "gptq-8b-g32-sym", "ct-w4a16-g32-asym"])
def test_quantized_inputs_change_logits_a_little(name: str, root: Path) -> None:
    folder = root / "tests" / "data" / "quant" / name
    config = {
        "model": str(folder),
        "dtype": "float32",
        "kv_cache": {"memory": "16MiB"},
        "quantizer": {"name": "gptq", "options": {"activations": "int8"}},
    }
    ids, logits = tools_logits(folder)
    error = largest_logprob_error(config, ids, logits)
    assert TOLERANCE[name] < error < 0.1 * float(logits.std())
