"""Configs name modules in many ways; each is understood as its writer meant it."""

from __future__ import annotations

import pytest

from pegboard.errors import CheckpointError
from pegboard_quant.names import begins_with, contains_any, is_any, rank

UP = "model.layers.1.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "entry",
    [
        "Linear",
        UP,
        "layers.1.mlp.up_proj",
        f"language_model.{UP}",
        r"re:.*up_proj$",
        r"re:model\.layers\.[01]\.mlp",
        "model.layers.1.mlp.gate_up_proj",
        "re:.*gate_up_proj",
    ],
)
def test_a_module_is_meant_by_name_pattern_class_prefix_or_fused_name(entry: str) -> None:
    assert is_any([entry], UP, "linear")


@pytest.mark.parametrize(
    "entry",
    [
        "Embedding",
        "model.layers.11.mlp.up_proj",
        "odel.layers.1.mlp.up_proj",
        "up_pro",
        r"re:up_proj",
        "model.layers.1.mlp",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.qkv_proj",
    ],
)
def test_names_that_only_look_alike_mean_others(entry: str) -> None:
    assert not is_any([entry], UP, "linear")


@pytest.mark.parametrize("fused", ["qkv_proj", "qkv"])
def test_attention_is_known_by_its_fused_names(fused: str) -> None:
    assert is_any([f"model.layers.0.self_attn.{fused}"], Q, "linear")
    assert not is_any([f"model.layers.1.self_attn.{fused}"], Q, "linear")
    assert not is_any([f"model.layers.0.self_attn.{fused}"], UP, "linear")


def test_the_head_is_a_linear_layer_and_the_embedding_is_not() -> None:
    assert is_any(["Linear"], "lm_head", "head") and is_any(["lm_head"], "lm_head", "head")
    assert is_any(["Embedding"], "model.embed_tokens", "embedding")
    assert not is_any(["Linear"], "model.embed_tokens", "embedding")


def test_a_name_is_narrower_than_a_pattern_and_that_than_a_class() -> None:
    entries = ("model.layers.1.mlp.gate_up_proj", "re:.*mlp.*", "Linear", "Embedding")
    assert [rank(entry, UP, "linear") for entry in entries] == [0, 1, 2, None]


def test_a_part_of_a_name_is_one_or_more_whole_words() -> None:
    assert contains_any(["mlp"], UP) and contains_any(["layers.1", "x"], UP)
    assert contains_any(["gate_up_proj"], UP)
    # `mlp.gate` is a router of experts, which is kept while gate_proj is not.
    assert not contains_any(["mlp.gate"], "model.layers.1.mlp.gate_proj")
    assert not contains_any(["layers.1"], "model.layers.11.mlp.up_proj")


def test_a_pattern_that_is_none_is_refused_in_a_line() -> None:
    with pytest.raises(CheckpointError, match=r"pattern '\(': is no regular expression"):
        begins_with("(", UP)
