"""Checkpoints by other tools: weights bit for bit as theirs, logits as near as their kind of numbers is."""

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
from pegboard_awq.quantizer import AWQQuantizer
from pegboard_quant.options import ActivationOptions

# Logits in float32 of weights rounded to float16; logits in float16.
TOLERANCE = {"awq-4b-g32": 5e-3, "awq-4b-g32-gemm": 1e-2}


@pytest.fixture(params=TOLERANCE)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / "tests" / "data" / "quant" / str(request.param)


def test_weights_are_those_of_the_tool_bit_for_bit(folder: Path) -> None:
    differ = weights_that_differ(
        folder, lambda facts: AWQQuantizer(QuantizerContext(facts, "float32"), ActivationOptions())
    )
    assert len(differ) == 4 and not any(differ.values()), differ


def test_logits_are_those_of_the_tool(folder: Path, tmp_path: Path) -> None:
    error = largest_logprob_error(_running(folder, tmp_path), *tools_logits(folder))
    assert error <= TOLERANCE[folder.name]


def test_settings_in_a_file_of_their_own_are_found(root: Path, tmp_path: Path) -> None:
    """Older tools wrote `quant_config.json`, in other words, and left the model's config as it was."""
    folder = root / "tests" / "data" / "quant" / "awq-4b-g32-gemm"
    config = _running(folder, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    assert largest_logprob_error(config, *tools_logits(folder)) <= 1e-2


def test_quantized_inputs_change_logits_a_little(root: Path, tmp_path: Path) -> None:
    folder = root / "tests" / "data" / "quant" / "awq-4b-g32"
    quantizer = {"name": "awq", "options": {"activations": "int8"}}
    config = {**_running(folder, tmp_path), "quantizer": quantizer}
    ids, logits = tools_logits(folder)
    error = largest_logprob_error(config, ids, logits)
    assert 5e-3 < error < 0.1 * float(logits.std())


def _running(folder: Path, copy: Path) -> dict[str, object]:
    """An engine's config. The config of one of the checkpoints names no architecture."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    return {"model": str(copy), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}
