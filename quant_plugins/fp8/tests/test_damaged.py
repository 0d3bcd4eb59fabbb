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
Refused = Callable[[str, Change], str | None]

ATTENTION = "model.layers.0.self_attn"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def refused(quant_data: Path, tmp_path: Path) -> Refused:
    """`refused(fixture's name, change) -> the refusal of the changed checkpoint`."""

    def start(name: str, change: Change) -> str | None:
        config = json.loads((quant_data / name / "config.json").read_text())
        tensors = tensors_of(quant_data / name)
        change(config, tensors)
        folder = write_checkpoint(tmp_path / name, config, tensors)
        return refusal({"model": str(folder), "kernels": "torch", "attention": "torch"})

    return start


def setting(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: tensor})


def leaving_out(name: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return change


def reshaped(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name].reshape(shape)})


def saying(**values: Any) -> Change:
    return lambda config, tensors: config["quantization_config"].update(values)


@pytest.mark.parametrize(
    "name", ["ct-fp8-block", "ct-fp8-static-kv", "fp8-block-inv", "fp8-tensor-static"]
)
def test_the_checkpoints_that_are_damaged_below_start(refused: Refused, name: str) -> None:
    assert refused(name, lambda config, tensors: None) is None


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("fp8-block-inv", reshaped(f"{DOWN}.weight", 200, 160), "shape"),
        ("fp8-block-inv", reshaped(f"{DOWN}.weight_scale_inv", 4, 1), "shape"),
        ("fp8-block-inv", leaving_out(f"{DOWN}.weight_scale_inv"), "missing"),
        ("ct-fp8-block", leaving_out(f"{DOWN}.weight_scale"), "missing"),
        ("ct-fp8-static-kv", leaving_out(f"{DOWN}.input_scale"), "missing"),
        ("ct-fp8-static-kv", setting(f"{DOWN}.weight_scale", torch.ones(3)), "shape"),
        (
            "fp8-block-inv",
            setting(f"{DOWN}.weight_scale_inv", torch.tensor([[1, 1], [1, math.inf]])),
            "not finite",
        ),
        ("ct-fp8-static-kv", setting(f"{DOWN}.weight_scale", torch.tensor([math.nan])), "finite"),
        ("ct-fp8-static-kv", setting(f"{DOWN}.input_scale", torch.zeros(1)), "not positive"),
        ("fp8-tensor-static", setting(f"{DOWN}.input_scale", torch.tensor(-1.0)), "not positive"),
        ("fp8-tensor-static", setting(f"{DOWN}.weight_scale", torch.tensor(3)), "int64"),
        ("fp8-block-inv", setting(f"{DOWN}.weight", torch.zeros(160, 200).to(torch.int8)), "int8"),
        ("fp8-block-inv", setting(f"{DOWN}.weight_scale", torch.ones(2, 2)), "unknown"),
        ("ct-fp8-block", setting("lm_head.weight_scale", torch.ones(4, 1)), "tie_word_embeddings"),
        ("ct-fp8-dynamic", setting(f"{DOWN}.input_scale", torch.ones(1)), "unknown"),
        ("ct-fp8-dynamic", setting(f"{ATTENTION}.k_scale", torch.ones(1)), "unknown"),
        ("ct-fp8-dynamic", setting(f"{ATTENTION}.rotary_scale", torch.ones(1)), "unknown"),
        ("fp8-block-inv", saying(activation_scheme="row"), "activation_scheme"),
        ("ct-fp8-dynamic", saying(transform_config={"config_groups": 1}), "transform_config"),
    ],
)
def test_tensors_and_config_that_do_not_go_together(
    refused: Refused, name: str, change: Change, line: str
) -> None:
    found = refused(name, change)
    assert found is not None and line in found


@pytest.mark.parametrize("scale", [0.0, -0.5, math.inf, math.nan])
@pytest.mark.parametrize(
    ("name", "key"), [("ct-fp8-static-kv", "v_scale"), ("fp8-tensor-static", "kv_scale")]
)
def test_kv_scales_that_are_not_positive_numbers(
    refused: Refused, name: str, key: str, scale: float
) -> None:
    found = refused(name, setting(f"{ATTENTION}.{key}", torch.tensor([scale])))
    assert found is not None and f"self_attn.{key}" in found and "positive" in found


def test_kv_scales_of_other_heads(refused: Refused) -> None:
    assert refused("ct-fp8-static-kv", setting(f"{ATTENTION}.k_scale", torch.ones(2))) is None
    found = refused("ct-fp8-static-kv", setting(f"{ATTENTION}.k_scale", torch.ones(3)))
    assert found is not None and "shape [3]" in found


def test_a_nan_among_the_codes(refused: Refused) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"].view(torch.uint8)[3, 5] = 0x7F

    found = refused("fp8-block-inv", change)
    assert found is not None and f"{DOWN}.weight: holds NaNs" in found


@pytest.mark.parametrize("strategy", ["rows", "attn_head", 8])
def test_a_strategy_that_is_not_known(refused: Refused, strategy: object) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["weights"]["strategy"] = strategy

    found = refused("ct-fp8-dynamic", change)
    assert found is not None and f"{strategy}" in found and "weights" in found


def test_a_head_in_codes_that_the_config_leaves_in_floats(refused: Refused) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.ones(1)

    found = refused("ct-fp8-static-kv", change)
    assert found is not None and "lm_head.weight: stored as float8_e4m3fn" in found


def test_a_file_that_was_cut_off(quant_data: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((quant_data / "ct-fp8-block" / name).read_bytes())
    model = tmp_path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1000])
    found = refusal({"model": str(tmp_path)})
    assert found is not None and "model.safetensors: damaged" in found


def test_a_quantized_head_and_embedding_run(refused: Refused) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["quantization_config"]["ignore"] = []
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["targets"] = ["Linear", "Embedding"]
        for name in ("lm_head", "model.embed_tokens"):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale"] = torch.ones(512, 1)

    assert refused("ct-fp8-dynamic", change) is None


def test_modelopts_settings_in_a_file_of_their_own(quant_data: Path, tmp_path: Path) -> None:
    config = json.loads((quant_data / "fp8-tensor-static" / "config.json").read_text())
    del config["quantization_config"]
    write_checkpoint(tmp_path, config, tensors_of(quant_data / "fp8-tensor-static"))
    ignored = ["lm_head", "*.gate_up_proj"]
    settings = {"kv_cache_quant_algo": "FP8", "exclude_modules": ignored}
    model = {"model": str(tmp_path), "kernels": "torch", "attention": "torch"}
    for algorithm, expected in (("FP8", None), ("NVFP4", "quant_algo: 'NVFP4'; allowed: FP8")):
        said = {"quantization": {**settings, "quant_algo": algorithm}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
        found = refusal(model)
        assert found is None if expected is None else expected in str(found)
