"""Every quantization format has one rule for the keys of its settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.cli.check import report
from pegboard.compose.preparing import prepare
from pegboard.config import Config
from pegboard.errors import UserError

DATA = Path(__file__).parents[1] / "data" / "quant"
FORMATS = {
    "gptq": "gptq-4b-g32-sym",
    "awq": "awq-4b-g32",
    "packed integers": "ct-w4a16-g32-sym",
    "float8": "ct-fp8-dynamic",
    "int8": "ct-w8a8-int8-dynamic",
}
BOOKKEEPING = {
    "autoround_version": "0.8.0",
    "iters": 200,
    "lr": 0.005,
    "nsamples": 512,
    "seqlen": 2048,
    "low_gpu_mem_usage": True,
    "enable_quanted_input": False,
    "to_quant_block_names": None,
    "provider": "auto-round",
}
Checkpoint = Callable[..., Config]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """`checkpoint(format, key=value) -> the config`, of a copy with more settings; `...` strikes one."""

    def make(name: str, **said: Any) -> Config:
        shutil.copytree(DATA / FORMATS[name], tmp_path, dirs_exist_ok=True)
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        settings = {**config["quantization_config"], **said}
        config["quantization_config"] = {k: v for k, v in settings.items() if v is not ...}
        file.write_text(json.dumps(config))
        return Config.from_values({"model": str(tmp_path), "kv_cache": {"memory": "16MiB"}})

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_bookkeeping_passes_and_what_nobody_declares_is_told(
    checkpoint: Checkpoint, name: str
) -> None:
    config = checkpoint(name, **BOOKKEEPING)
    prepared = prepare(config)
    notes = report(config, prepared.composition, prepared.ledger)["notes"]
    (line,) = [note for note in notes if "no known quantization declares" in note]
    assert "'iters'" in line and "autoround_version" not in line


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "said",
    [
        {"super_bits": 6},
        {"hadamard_group_size": 32},
        {"nbits_per_codebook": 8},
        {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
    ],
)
def test_what_can_change_the_meaning_is_refused_by_name(
    checkpoint: Checkpoint, name: str, said: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=f"quantization_config.{next(iter(said))}") as error:
        prepare(checkpoint(name, **said))
    assert "\n" not in str(error.value)


AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "act_bits": 16, **BOOKKEEPING}


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("gptq", "auto_round:auto_gptq"),
        ("gptq", "auto_round:gptq"),
        ("awq", "auto_round:auto_awq"),
        ("awq", "auto_round:awq"),
    ],
)
def test_auto_round_is_the_same_tensors_under_another_name(
    checkpoint: Checkpoint, name: str, packing: str
) -> None:
    said = AUTO_ROUND | {"packing_format": packing, "version": ..., "checkpoint_format": ...}
    prepared = prepare(checkpoint(name, **said))
    assert prepared.composition.target.parts["quantizer"].name == name


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "auto-round/auto_round:llm_compressor"),
        ({"data_type": "mx_fp"}, "quantization_config.data_type: 'mx_fp'; allowed: int"),
        ({"act_bits": 8}, "quantization_config.act_bits: 8; allowed: 16"),
        ({"super_group_size": 8, "super_bits": 4}, "quantization_config.super_bits: 4"),
        (
            {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
            "quantization_config.extra_config.model.layers.0.mlp.up_proj",
        ),
        (
            {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}},
            "tensor model.layers.0.mlp.up_proj.qweight: is there",
        ),
    ],
)
def test_what_auto_round_says_otherwise_is_refused_by_name(
    checkpoint: Checkpoint, said: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError) as error:
        prepare(checkpoint("gptq", **(AUTO_ROUND | {"packing_format": "auto_round:gptq"} | said)))
    assert line in str(error.value)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_method_that_nobody_reads_is_one_line_whatever_the_tensors(
    checkpoint: Checkpoint, tmp_path: Path, repeated: bool
) -> None:
    """As MLX writes it: the settings under a key of their own, and no method."""
    made = checkpoint("gptq")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    config["quantization"] = {"group_size": 64, "bits": 4}
    if repeated:
        config["quantization_config"] = config["quantization"]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="mlx") as error:
        prepare(made)
    said = "is quantized by mlx, which nothing installed reads; allowed: auto-round, awq, "
    assert said in str(error.value) and len(str(error.value)) < 200


def test_settings_without_a_method_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match=r"quantization_config names no method: .*bits"):
        prepare(checkpoint("gptq", quant_method=..., method=...))
