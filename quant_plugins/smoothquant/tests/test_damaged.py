"""A checkpoint with something wrong in it is refused before it runs, in one line that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.testing.quantized_checkpoint import refusal, tensors_of, write_checkpoint

Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], None]

DYNAMIC, STATIC = "ct-w8a8-int8-dynamic", "ct-w8a8-int8-static"
DOWN = "model.layers.0.mlp.down_proj"


def setting(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: tensor})


def leaving_out(name: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return change


def saying(part: str, **values: Any) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["quantization_config"]["config_groups"]["group_0"][part].update(values)

    return change


def ignoring(*names: str) -> Change:
    return lambda config, tensors: config["quantization_config"].update(ignore=list(names))


def refused(source: Path, folder: Path, change: Change) -> str | None:
    config, tensors = json.loads((source / "config.json").read_text()), tensors_of(source)
    change(config, tensors)
    write_checkpoint(folder, config, tensors)
    return refusal({"model": str(folder), "kernels": "torch", "attention": "torch"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (DYNAMIC, lambda config, tensors: None),
        (STATIC, setting(f"{DOWN}.input_zero_point", torch.zeros(1, dtype=torch.int8))),
        (DYNAMIC, setting(f"{DOWN}.weight_zero_point", torch.zeros((64, 1), dtype=torch.int8))),
        (DYNAMIC, saying("input_activations", strategy="tensor")),
    ],
)
def test_what_is_right_starts(quant_data: Path, tmp_path: Path, name: str, change: Change) -> None:
    assert refused(quant_data / name, tmp_path, change) is None


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (DYNAMIC, leaving_out(f"{DOWN}.weight_scale"), "missing"),
        (STATIC, leaving_out(f"{DOWN}.input_scale"), "missing"),
        (DYNAMIC, setting(f"{DOWN}.weight_scale", torch.ones(128, 1)), "shape"),
        (DYNAMIC, setting(f"{DOWN}.weight_scale", torch.full((64, 1), math.nan)), "not finite"),
        (STATIC, setting(f"{DOWN}.input_scale", torch.tensor([-0.1])), "not positive"),
        (STATIC, setting(f"{DOWN}.input_scale", torch.tensor([math.inf])), "not finite"),
        (STATIC, setting(f"{DOWN}.input_zero_point", torch.tensor([3]).char()), "symmetric"),
        (DYNAMIC, setting(f"{DOWN}.weight_zero_point", torch.ones(64, 1).char()), "symmetric"),
        (DYNAMIC, setting(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.uint8)), "uint8"),
        (DYNAMIC, setting(f"{DOWN}.input_scale", torch.ones(1)), "unknown"),
        (DYNAMIC, setting("lm_head.weight_scale", torch.ones(512, 1)), "unknown"),
        (DYNAMIC, ignoring("lm_head", "re:.*gate_up_proj"), "gate_proj in floats"),
        (DYNAMIC, ignoring("lm_head", "re:*"), "no regular expression"),
        (DYNAMIC, saying("weights", strategy="columns"), "strategy: 'columns'"),
        (DYNAMIC, saying("weights", type="float"), "float of 8 bits"),
        (DYNAMIC, saying("weights", actorder="group"), "g_idx"),
        (DYNAMIC, saying("input_activations", symmetric=False), "symmetric: false, dynamic"),
        (DYNAMIC, saying("input_activations", num_bits=4), "num_bits"),
        (DYNAMIC, saying("input_activations", dynamic=False), "'token', static"),
    ],
)
def test_what_is_wrong_is_named(
    quant_data: Path, tmp_path: Path, name: str, change: Change, line: str
) -> None:
    found = refused(quant_data / name, tmp_path, change)
    assert found is not None and line in found


def test_groups_that_an_order_does_not_have(quant_data: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        saying("weights", actorder="group", strategy="group", group_size=32)(config, tensors)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            layer = name.removesuffix(".weight_scale")
            rows, columns = tensors[f"{layer}.weight"].shape
            tensors[name] = torch.ones(rows, columns // 32)
            tensors[f"{layer}.weight_g_idx"] = torch.arange(columns, dtype=torch.int32) // 32
        tensors[f"{DOWN}.weight_g_idx"][5] = 4

    found = refused(quant_data / DYNAMIC, tmp_path, change)
    assert found is not None and f"{DOWN}.weight_g_idx" in found and "0 to 3" in found


def test_a_file_that_was_cut_off(quant_data: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((quant_data / STATIC / name).read_bytes())
    model = tmp_path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1000])
    found = refusal({"model": str(tmp_path)})
    assert found is not None and "model.safetensors: damaged" in found
