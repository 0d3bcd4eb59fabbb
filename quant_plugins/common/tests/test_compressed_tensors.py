"""The config of compressed-tensors: every version's spelling, and what cannot be honoured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard_quant.compressed_tensors import parse

ARGS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": ARGS, "input_activations": None}


def _facts(**config: Any) -> CheckpointFacts:
    return CheckpointFacts(
        source="safetensors",
        path="/model",
        fingerprint="",
        config={},
        tensors={},
        quantization="compressed-tensors",
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": GROUP},
            "ignore": ["lm_head"],
            **config,
        },
        eos_token_ids=(),
        tokenizer=TokenizerFacts(None),
    )


def _with_weights(**args: Any) -> CheckpointFacts:
    return _facts(config_groups={"group_0": {**GROUP, "weights": {**ARGS, **args}}})


def test_every_config_of_the_tools_is_understood(root: Path) -> None:
    found = {}
    for file in sorted(root.glob("tests/data/quant/ct-*/config.json")):
        config = json.loads(file.read_text())["quantization_config"]
        parsed = parse(dataclasses.replace(_facts(), quantization_config=config))
        group = parsed.group_of("model.layers.0.mlp.up_proj", "linear")
        assert group is not None and group.weights is not None
        assert parsed.group_of("lm_head", "head") is None
        found[file.parent.name] = (group.layout, group.weights.bits, group.weights.strategy)
    assert found["ct-w3a16-g32"] == ("pack-quantized", 3, "group")
    assert found["ct-mixed"] == ("pack-quantized", 4, "group")
    assert found["ct-fp8-block"] == ("float-quantized", 8, "block")
    assert found["ct-w8a8-int8-dynamic"] == ("int-quantized", 8, "channel")
    assert len(found) >= 9


def test_what_is_ignored_goes_before_targets() -> None:
    parsed = parse(_facts(ignore=["lm_head", "re:.*layers.0.self_attn.qkv"]))
    assert parsed.group_of("model.layers.0.self_attn.k_proj", "linear") is None
    assert parsed.group_of("model.layers.1.self_attn.k_proj", "linear") is not None
    assert parsed.group_of("model.embed_tokens", "embedding") is None


def test_the_narrowest_target_counts_wherever_it_stands() -> None:
    targets = {
        "class": ["Linear"],
        "pattern": ["re:.*down_proj"],
        "name": ["model.layers.0.mlp.down_proj", "re:.*mlp.up.*"],
        "later pattern": ["re:.*mlp.*"],
    }
    groups = {name: {**GROUP, "targets": entries} for name, entries in targets.items()}
    parsed = parse(_facts(config_groups=groups))
    meant = {
        "model.layers.0.mlp.down_proj": "name",
        "model.layers.1.mlp.down_proj": "pattern",
        "model.layers.1.mlp.gate_proj": "later pattern",
        "model.layers.1.mlp.up_proj": "later pattern",  # of patterns, that which sorts first
        "model.layers.1.self_attn.q_proj": "class",
    }
    for module, name in meant.items():
        group = parsed.group_of(module, "linear")
        assert group is not None and group.name == name


@pytest.mark.parametrize(
    ("args", "strategy"),
    [
        ({"strategy": None, "group_size": None}, "tensor"),
        ({"strategy": None, "group_size": 64}, "group"),
        ({"strategy": None, "group_size": -1}, "channel"),
        ({"strategy": "channel", "group_size": None}, "channel"),
    ],
)
def test_a_strategy_that_is_left_out_follows_from_the_group_size(
    args: dict[str, Any], strategy: str
) -> None:
    (group,) = parse(_with_weights(**args)).groups
    assert group.weights is not None and group.weights.strategy == strategy


@pytest.mark.parametrize(
    ("actorder", "reordered"),
    [(None, False), ("weight", False), ("static", False), ("group", True), (True, True)],
)
def test_groups_follow_activations_only_where_the_order_is_stored(
    actorder: object, reordered: bool
) -> None:
    (group,) = parse(_with_weights(actorder=actorder)).groups
    assert group.weights is not None and group.weights.reordered is reordered


@pytest.mark.parametrize("spelled", ["128x128", [128, 128]])
def test_blocks_are_spelled_in_two_ways(spelled: object) -> None:
    (group,) = parse(
        _with_weights(strategy="block", block_structure=spelled, group_size=None)
    ).groups
    assert group.weights is not None and group.weights.block == (128, 128)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"config_groups": None}, "config_groups: is missing"),
        ({"config_groups": {"group_0": "W4A16"}}, "group_0: 'W4A16'; allowed: an object"),
        ({"transform_config": {"R1": {}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"ignore": "lm_head"}, "ignore: 'lm_head'; allowed: a list of module names"),
        ({"format": "marlin-24"}, "marlin-24; allowed: pack-quantized"),
        (
            {"config_groups": {"group_0": {**GROUP, "format": "nvfp4-pack-quantized"}}},
            "nvfp4-pack-quantized; allowed",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config: dict[str, Any], line: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        parse(_facts(**config))
    assert line in str(refusal.value)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"group_size": 0}, "group_size: 0; allowed"),
        ({"group_size": -2}, "group_size: -2; allowed"),
        ({"group_size": None}, "group_size: None; allowed: a positive number"),
        ({"num_bits": 16}, "num_bits: 16; allowed: 1 to 8"),
        ({"type": "mxfp"}, "type: 'mxfp'; allowed: int, float"),
        ({"actorder": "columns"}, "actorder: 'columns'; allowed: None, False, 'weight'"),
        ({"actorder": ["group"]}, "actorder: ['group']; allowed"),
        ({"strategy": "rows"}, "strategy: 'rows'; allowed"),
        ({"dynamic": "local"}, "dynamic: 'local'"),
        ({"num_codebooks": 3}, "num_codebooks: 3"),
        ({"strategy": "block", "block_structure": "128"}, "block_structure: '128'; allowed"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(args: dict[str, Any], line: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        parse(_with_weights(**args))
    assert line in str(refusal.value)


def test_keys_that_change_nothing_are_passed_over() -> None:
    config = {"version": "0.19.0", "global_compression_ratio": 1.5, "transform_config": {}}
    assert parse(_facts(**config, quantization_status="frozen", sparsity_config=None)).groups
