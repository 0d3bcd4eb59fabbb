"""Each key that can change arithmetic is acted on, or refused by name."""

from __future__ import annotations

import json
import math
import tomllib
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from pegboard.builtin.safetensors_describe import describe as describe_checkpoint
from pegboard.errors import CheckpointError
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.discovery import discover
from pegboard.plugins.inspect import inspect_model, undeclared_keys
from pegboard.testing.tiny import FAMILIES, write_tiny_model

FILES = resources.files("pegboard.plugins")
TABLE = tomllib.loads((FILES / "declared_keys.toml").read_text())
DECLARED = [*TABLE["off"], *TABLE["others"]]
PASSED = tomllib.loads((FILES / "passed_keys.toml").read_text())
HARMLESS = [pattern for patterns in PASSED["harmless"].values() for pattern in patterns]
CATALOG = discover()
ODD = 7.25
"""No neutral value of any key."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: write_tiny_model(folder / family, family) for family in FAMILIES}


class Checkpoint:
    """A family's tiny checkpoint under changing configs."""

    def __init__(self, folder: Path) -> None:
        self.facts = describe_checkpoint(folder)

    def shape(self, **changes: Any) -> ModelShape:
        return inspect_model(CATALOG, self._with(changes))[0]

    def undeclared(self, **changes: Any) -> tuple[str, ...]:
        facts = self._with(changes)
        return undeclared_keys(inspect_model(CATALOG, facts)[1], facts)

    def _with(self, changes: dict[str, Any]) -> Any:
        import dataclasses

        return dataclasses.replace(self.facts, config={**self.facts.config, **changes})


@pytest.fixture(params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Checkpoint:
    return Checkpoint(folders[request.param])


def test_every_declared_key_is_acted_on_refused_by_name_or_harmless(
    checkpoint: Checkpoint,
) -> None:
    passed, usual = [], checkpoint.shape()
    for key in DECLARED:
        try:
            if checkpoint.shape(**{key: ODD}) == usual and not _is_harmless(key):
                passed.append(key)
        except CheckpointError as error:
            assert key in str(error), str(error)
    # Without effect where no window is switched on, and where the tensors say it.
    assert set(passed) <= {"max_window_layers", "sliding_window", "attention_bias"}


def _is_harmless(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in HARMLESS)


def test_absent_values_of_declared_keys_pass(checkpoint: Checkpoint) -> None:
    usual = checkpoint.shape()
    # a window that is null is switched off, whatever its family's default
    keys = {*DECLARED} - checkpoint.facts.config.keys() - {"sliding_window"}
    absents: list[Any] = [None, {}, []]
    for absent in absents:
        assert checkpoint.shape(**dict.fromkeys(keys, absent)) == usual


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_that_transformers_writes_of_a_family_passes(
    folders: dict[str, Path], family: str
) -> None:
    checkpoint = Checkpoint(folders[family])
    given = {k: v for k, v in checkpoint.facts.config.items() if k != "model_type"}
    theirs = AutoConfig.for_model(family, **given)
    whole = json.loads(json.dumps(theirs.to_dict(), default=str))
    assert checkpoint.shape(**whole) == checkpoint.shape()
    assert checkpoint.undeclared(**whole) == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "num_local_experts"),
        ({"text_config": {"hidden_size": 8}}, "text_config"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"alibi": True}, "alibi"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"sliding_window": 5}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 5}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}},
         "attention_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "type": "yarn"}}, "type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0},
          "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_scaling"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        ({"model_type": "qwen2"}, "model_type"),
    ],
)  # fmt: skip
def test_what_llama_does_not_act_on_is_refused_by_name(
    folders: dict[str, Path], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"model config \S*{named}") as error:
        Checkpoint(folders["llama"]).shape(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"logits_scaling": 1.0, "logit_scale": 1, "partial_rotary_factor": 1.0},
        {"attention_bias": False, "qk_layernorm": False, "alibi": False, "use_bias": False},
        {"num_local_experts": 0, "scale_attn_weights": True, "final_logit_softcapping": None},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1},
        {"rope_scaling": {}, "text_config": {}, "layer_types": None, "per_layer_config": None},
        {"attention_dropout": 0.1, "pretraining_tp": 4, "use_cache": False, "pad_token_id": 3},
    ],
)
def test_neutral_values_change_nothing(folders: dict[str, Path], changes: dict[str, Any]) -> None:
    checkpoint = Checkpoint(folders["llama"])
    assert checkpoint.shape(**changes) == checkpoint.shape()


def test_a_key_that_nobody_declares_passes_and_is_told(folders: dict[str, Path]) -> None:
    checkpoint = Checkpoint(folders["llama"])
    rope = {**checkpoint.facts.config["rope_parameters"], "finetuned": True}
    changes = {"is_llama_config": True, "rope_parameters": rope, "nothing": None}
    assert checkpoint.shape(**changes) == checkpoint.shape()
    assert checkpoint.undeclared(**changes) == ("rope_parameters.finetuned", "is_llama_config")


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4 * 64),
        ({"rope_type": "linear", "factor": 2.5, "original_max_position_embeddings": 32}, 80),
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 4 * 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "default"}, 64),
    ],
)  # fmt: skip
def test_the_context_is_as_long_as_scaling_makes_it(
    folders: dict[str, Path], rope: dict[str, Any], longest: int
) -> None:
    changes = {"rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": 64}
    shape = Checkpoint(folders["llama"]).shape(**changes)
    assert shape.max_position == longest
    assert math.isfinite(shape.rope.theta)
