"""A checkpoint that cannot be right is refused in a line before a request is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pegboard.testing.quantized_checkpoint import (
    changed_checkpoint,
    largest_logprob_error,
    refusal,
)
from pegboard_awq.packing import pack_outputs, unpack_outputs

UP = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], object]


@pytest.fixture
def changed(root: Path, tmp_path: Path) -> Callable[[Change], dict[str, Any]]:
    """`changed(change) -> config`: of an engine on a copy of a foreign checkpoint, after
    `change(tensors, quantization_config)`."""

    def make(change: Change) -> dict[str, Any]:
        path = changed_checkpoint(root / "tests/data/quant/awq-4b-g32", tmp_path / "model", change)
        return {"model": str(path), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}

    return make


def _say(**said: Any) -> Change:
    # The tool says the version three times.
    others = {"checkpoint_format": None, "format": None} if "version" in said else {}
    return lambda tensors, config: config.update({**said, **others})


def _put(**parts: Any) -> Change:
    return lambda tensors, config: tensors.update(
        {f"{UP}.{part}": value for part, value in parts.items()}
    )


def _set_scale(value: float) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{UP}.scales"][1, 3] = value

    return change


DAMAGES: list[tuple[Change, str]] = [
    (_say(version="gemv"), "version: gemv; allowed: gemm"),
    (_say(version="gemv_fast"), "version: gemv_fast; allowed: gemm"),
    (_say(version="llm-awq"), "version: llm-awq; allowed: gemm"),
    (_say(version="marlin"), "version: marlin; allowed: gemm"),
    (_say(checkpoint_format="gemv"), "checkpoint_format: gemv; allowed: gemm"),
    (_say(pack_dtype="int16"), "pack_dtype: 'int16'; allowed: int32"),
    (_say(bits=8), "bits: 8; allowed: 4"),
    (_say(group_size=0), "group_size: 0; allowed: -1 or a positive number"),
    (_say(group_size=None), "q_group_size: is missing"),
    (_say(group_size=64), "qzeros' has shape [2, 16], not [1, 16]"),
    (_say(zero_point="no"), "zero_point: 'no'; allowed: true or false"),
    (_say(zero_point=False), "qzeros: holds zeros from"),
    (_say(modules_to_not_convert="lm_head"), "'lm_head'; allowed: a list of module names"),
    (_say(modules_to_not_convert=["mlp.gate_up_proj"]), "though modules_to_not_convert names"),
    (_say(super_bits=6), "super_bits: 6, and awq checkpoints are not known to have it"),
    (_say(quant_method="hqq"), "the checkpoint is quantized by hqq"),
    (
        lambda tensors, config: tensors["lm_head.weight"].fill_(torch.nan),
        "lm_head.weight: holds numbers that are not finite",
    ),
    (_set_scale(torch.inf), f"{UP}.scales: holds numbers that are not finite"),
    (_set_scale(torch.nan), f"{UP}.scales: holds numbers that are not finite"),
    (
        _put(qweight=torch.zeros(64, 15, dtype=torch.int32)),
        f"'{UP}.qweight' has shape [64, 15], not [64, 16]",
    ),
    (
        # The version gemv's axes.
        _put(qweight=torch.zeros(128, 8, dtype=torch.int32)),
        f"'{UP}.qweight' has shape [128, 8], not [64, 16]",
    ),
    (_put(qzeros=torch.zeros(2, 128)), f"'{UP}.qzeros' has shape [2, 128], not [2, 16]"),
    (_put(weight_scale=torch.ones(1)), f"'{UP}.weight_scale' is unknown"),
    (_put(g_idx=torch.zeros(64, dtype=torch.int32)), f"'{UP}.g_idx' is unknown"),
    (lambda tensors, config: tensors.pop(f"{UP}.qzeros"), f"'{UP}.qzeros' is missing"),
    (
        lambda tensors, config: tensors.pop(f"{UP}.qweight"),
        f"tensor {UP}.weight: missing in",
    ),
]


@pytest.mark.parametrize(("change", "line"), DAMAGES, ids=[line for _, line in DAMAGES])
def test_what_cannot_be_right_is_refused_in_a_line(
    changed: Callable[[Change], dict[str, Any]], change: Change, line: str
) -> None:
    said = refusal(changed(change))
    assert said is not None and line in said


def test_a_file_that_was_cut_is_refused(changed: Callable[[Change], dict[str, Any]]) -> None:
    config = changed(_say())
    file = Path(config["model"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    said = refusal(config)
    assert said is not None and "model.safetensors: damaged or not safetensors" in said


def test_zeros_are_as_they_are_stored_0_and_15_included(root: Path) -> None:
    """Readers that take one from packed words, as GPTQ's do, make 15 of 0."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 1)
    assert torch.equal(unpack_outputs(pack_outputs(codes)), codes)
    (word,) = pack_outputs(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8))[0].tolist()
    assert word % 2**32 == 0x7531_6420


def test_layers_in_floats_need_no_mention(
    changed: Callable[[Change], dict[str, Any]], root: Path
) -> None:
    """`modules_to_not_convert` is often missing, or in another model's names."""
    source = root / "tests/data/quant/awq-4b-g32"
    expected = load_file(source / "expected.safetensors")
    weight = expected["dequant.model.layers.0.mlp.gate_proj.weight"]

    def convert_back(tensors: Tensors, config: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"model.layers.0.mlp.gate_proj.{part}"]
        tensors["model.layers.0.mlp.gate_proj.weight"] = weight
        config["modules_to_not_convert"] = ["transformer.h.0.mlp"]

    ids = expected["input_ids"][0].tolist()
    assert largest_logprob_error(changed(convert_back), ids, expected["logits"][0]) <= 5e-3
