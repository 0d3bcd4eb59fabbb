"""A checkpoint that is no head for the target refuses to start, and the reason names the thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from pegboard import Config, Engine
from pegboard.errors import UserError
from pegboard_eagle.options import EagleOptions

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
"""Changes a head's tensors and config."""


def _drop(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def _say(key: str, value: object) -> Change:
    return lambda tensors, config: config.update({key: value})


def _put(name: str, *shape: int) -> Change:
    return lambda tensors, config: tensors.update({name: torch.zeros(shape)})


def _twice(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _marks_none(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["t2d"][:] = False


WRONG: dict[str, tuple[str, Change, str]] = {
    "no fc": ("EAGLE-3", _drop("fc.weight"), "fc.weight"),
    "no norm": ("EAGLE-3", _drop("norm.weight"), "norm.weight"),
    "no head": ("EAGLE-3", _drop("lm_head.weight"), "lm_head.weight"),
    "no map": ("EAGLE-3", _drop("d2t"), "t2d"),
    "unknown tensor": ("EAGLE-3", _put("midlayer.extra.weight", 4), "midlayer.extra.weight"),
    "norm of EAGLE-1": ("EAGLE-1", _put("norm.weight", 40), "norm.weight"),
    "map of EAGLE-1": ("EAGLE-1", _put("d2t", 203), "d2t"),
    "second layer": ("EAGLE-3", _put("layers.1.mlp.up_proj.weight", 50, 40), "layers"),
    "shape": ("EAGLE-3", _put("midlayer.mlp.up_proj.weight", 50, 41), "up_proj"),
    "unused bias": ("EAGLE-3", _put("midlayer.input_layernorm.bias", 40), "input_layernorm.bias"),
    "norms that the config denies": ("EAGLE-3.1", _say("fc_norm", False), "fc_norm"),
    "norms that the config adds": ("EAGLE-3", _say("norm_before_fc", True), "input_norm"),
    "another target": ("EAGLE-3", _say("target_hidden_size", 41), "41"),
    "map to nothing": ("EAGLE-3", _put("t2d", 3), "t2d"),
    "ids mapped twice": ("EAGLE-3", _twice, "d2t"),
    "maps that disagree": ("EAGLE-3", _marks_none, "t2d"),
    "activation": ("EAGLE-3", _say("hidden_act", "gelu"), "hidden_act"),
    "rotation": ("EAGLE-3", _say("rope_scaling", {"rope_type": "odd"}), "rope_type"),
    "no norm before the head": ("EAGLE-3", _say("norm_output", False), "norm_output"),
    "no such taps": (
        "EAGLE-3",
        _say("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}),
        "31",
    ),
    "two taps": (
        "EAGLE-3",
        _say("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        "fc.weight",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_head_refuses_to_start(
    what: str,
    target_folder: Path,
    heads: Mapping[str, Any],
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    layout, change, named = WRONG[what]
    folder = write(tmp_path / "h", heads[layout])
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    wanted = Config.model_validate(
        {
            "model": str(target_folder),
            "drafter": {"name": "eagle", "model": str(folder), "num_speculative_tokens": 2},
        }
    )
    with pytest.raises(UserError, match=named), Engine(wanted):
        pass


def test_a_drafter_without_a_model_is_refused(target_folder: Path) -> None:
    wanted = Config.model_validate({"model": str(target_folder), "drafter": "eagle"})
    with pytest.raises(UserError, match=r"drafter\.model"), Engine(wanted):
        pass


def test_taps_are_what_the_option_says(
    target_folder: Path,
    heads: Mapping[str, Any],
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "h", heads["EAGLE-3"])
    config: dict[str, Any] = {
        "model": str(target_folder),
        "drafter": {"name": "eagle", "model": str(folder), "num_speculative_tokens": 2},
    }
    for said, taps in (("auto", (2, 3, 4)), ([0, 7, 1], (0, 7, 1))):
        config["drafter"]["options"] = {"taps": said}
        with Engine(Config.model_validate(config)) as engine:
            drafter = engine.prepared.composition.drafter
            assert drafter is not None and drafter.taps == taps


def test_a_missing_head_is_refused_with_what_makes_one(target_folder: Path, tmp_path: Path) -> None:
    config = {
        "model": str(target_folder),
        "drafter": {"name": "eagle", "model": str(tmp_path / "none")},
    }
    with pytest.raises(
        UserError, match=rf"train-eagle --model {target_folder} .*--out {tmp_path}/none"
    ):
        Engine(Config.from_values(config))


def test_the_quantizer_is_the_heads(
    target_folder: Path,
    heads: Mapping[str, Any],
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "h", heads["EAGLE-3"])
    drafter = {"name": "eagle", "model": str(folder), "num_speculative_tokens": 2}
    config = {"model": str(target_folder), "drafter": {**drafter, "options": {"quantizer": "int8"}}}
    with Engine(Config.model_validate(config)) as engine:
        models = engine.prepared.composition.models
    quantizers = [plan.parts["quantizer"].name for plan in models]
    assert quantizers == ["none", "int8"]


def test_trees_are_not_drawn() -> None:
    with pytest.raises(ValidationError, match="top_k"):
        EagleOptions(sampled=True, top_k=2)
