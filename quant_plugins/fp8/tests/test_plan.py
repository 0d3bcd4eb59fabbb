"""Which layers are in float8, by config and tensors; what is said of them before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, TensorFact, TokenizerFacts
from pegboard.interfaces.quantizer import StoredKVScales, WeightSpec
from pegboard_fp8.plan import formats, kv_scales, notes, parameters, resident_bytes, stored_layer
from pegboard_quant.options import CheckpointOptions

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = FP8 | {"activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
LAYER = WeightSpec("model.layers.3.mlp.gate_proj", (32, 64), "linear")
HEAD = WeightSpec("lm_head", (96, 64), "head")
EMBEDDING = WeightSpec("model.embed_tokens", (96, 64), "embedding")
E4M3, BF16 = "float8_e4m3fn", "bfloat16"


def facts_of(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> CheckpointFacts:
    facts = {name: TensorFact(shape, dtype, "plain", 0) for name, (shape, dtype) in tensors.items()}
    return CheckpointFacts(
        source="safetensors",
        path="/model",
        fingerprint="0",
        config={},
        tensors=facts,
        quantization=config["quant_method"],
        quantization_config=config,
        eos_token_ids=(),
        tokenizer=TokenizerFacts(file=None),
    )


def stored(
    layer: WeightSpec, dtype: str = E4M3, scale: tuple[int, ...] | None = ()
) -> dict[str, tuple[tuple[int, ...], str]]:
    tensors: dict[str, tuple[tuple[int, ...], str]] = {f"{layer.name}.weight": (layer.shape, dtype)}
    if scale is not None:
        tensors[f"{layer.name}.weight_scale"] = (scale, "float32")
    return tensors


def compressed(group: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        **others,
    }


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    "ignored",
    [
        "model.layers.3.mlp.gate_proj",
        "model.layers.3.mlp.gate_up_proj",
        "layers.3.mlp.gate_proj",
        "model.layers.3",
        "mlp",
    ],
)
@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_a_layer_is_ignored_by_any_spelling_of_its_name(key: str, ignored: str) -> None:
    facts = facts_of(FP8 | {key: [ignored]}, stored(LAYER, BF16, None))
    assert stored_layer(LAYER, facts) is None
    (weight,) = parameters(LAYER, facts)
    assert (weight.name, weight.dtype) == ("weight", None)
    assert resident_bytes(LAYER, facts, "bfloat16", None) == 32 * 64 * 2


@pytest.mark.parametrize("other", ["mlp.gate", "model.layers.31", "gate", "up_proj", "lm_head"])
def test_part_of_a_word_ignores_nothing(other: str) -> None:
    facts = facts_of(FP8 | {"modules_to_not_convert": [other]}, stored(LAYER))
    assert stored_layer(LAYER, facts) is not None


@pytest.mark.parametrize("ignored", [["model.layers.*"], ["*gate_proj"], ["*gate_up_proj*"]])
def test_modelopt_ignores_by_patterns(ignored: list[str]) -> None:
    config = MODELOPT | {"exclude_modules": ignored}
    assert stored_layer(LAYER, facts_of(config, stored(LAYER, BF16, None))) is None
    with pytest.raises(CheckpointError, match=r"leaves .* in floats"):
        stored_layer(LAYER, facts_of(config, stored(LAYER)))


@pytest.mark.parametrize(
    "config",
    [
        FP8 | {"ignored_layers": ["model.layers.3.mlp.gate_proj"]},
        compressed({"weights": WEIGHTS}, ignore=["re:.*gate.*"]),
        compressed({"weights": WEIGHTS, "targets": ["re:.*self_attn.*"]}),
    ],
)
def test_codes_of_which_the_config_says_nothing_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="stored as float8_e4m3fn, and quantization_config"):
        stored_layer(LAYER, facts_of(config, stored(LAYER)))


def test_a_quantized_embedding_and_head_are_read_where_the_config_means_them() -> None:
    tensors = stored(HEAD) | stored(EMBEDDING)
    for layer in (HEAD, EMBEDDING):
        assert stored_layer(layer, facts_of(FP8, tensors)) is not None
    linear_only = compressed({"weights": WEIGHTS})
    assert stored_layer(HEAD, facts_of(linear_only, tensors)) is not None
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: stored as float8"):
        stored_layer(EMBEDDING, facts_of(linear_only, tensors))


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "uint8"])
def test_other_codes_are_refused(dtype: str) -> None:
    with pytest.raises(CheckpointError, match=f"stored as {dtype}.*allowed: a weight in floats"):
        stored_layer(LAYER, facts_of(FP8, stored(LAYER, dtype)))


@pytest.mark.parametrize(
    ("scale", "is_whole"),
    [((), True), ((1,), True), ((1, 1), True), ((32, 1), False), ((32,), False)],
)
def test_one_scale_or_one_a_row_as_its_shape_says(scale: tuple[int, ...], is_whole: bool) -> None:
    facts = facts_of(STATIC, stored(LAYER, E4M3, scale))
    form = stored_layer(LAYER, facts)
    assert form is not None and form.blocks.block == ((32, 64) if is_whole else (1, 64))
    names = {one.name: one.shape for one in parameters(LAYER, facts)}
    assert names["weight_scale"] == scale and "input_scale" in names


@pytest.mark.parametrize("scale", [(3,), (64,), (32, 64), (1, 32), (2, 1)])
def test_a_scale_of_another_shape_is_not_what_is_declared(scale: tuple[int, ...]) -> None:
    declared = {
        one.name: one for one in parameters(LAYER, facts_of(FP8, stored(LAYER, E4M3, scale)))
    }
    assert declared["weight_scale"].shape != scale


@pytest.mark.parametrize(
    ("shape", "grid"), [((64, 128), (1, 1)), ((576, 576), (5, 5)), ((192, 1536), (2, 12))]
)
def test_blocks_are_counted_up(shape: tuple[int, int], grid: tuple[int, int]) -> None:
    layer = replace(LAYER, shape=shape)
    tensors = stored(layer, scale=None) | {f"{layer.name}.weight_scale_inv": (grid, "float32")}
    facts = facts_of(FP8 | {"weight_block_size": [128, 128]}, tensors)
    scale = {one.name: one for one in parameters(layer, facts)}["weight_scale_inv"]
    assert scale.shape == grid and scale.shard_axis == {
        "out": None,
        "in": 1 if grid[1] > 1 else None,
    }
    out_features, in_features = shape
    expected = out_features * (in_features + 4 * grid[1])
    assert resident_bytes(layer, facts, "float32", None) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_scheme", "per_row"),
        ("activation_scheme", None),
        ("fmt", "e5m2"),
        ("scale_fmt", "int8"),
        ("weight_block_size", [128]),
        ("weight_block_size", [0, 128]),
        ("weight_block_size", "128x128"),
        ("ignored_layers", "lm_head"),
        ("hadamard_group_size", 32),
    ],
)
def test_what_is_not_known_of_a_config_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key}"):
        stored_layer(LAYER, facts_of(FP8 | {key: value}, stored(LAYER)))


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ({"weights": WEIGHTS | {"strategy": "attn_head"}}, "weights"),
        ({"weights": WEIGHTS | {"strategy": "rows"}}, "strategy"),
        ({"weights": WEIGHTS | {"num_bits": 4}}, "weights: float of 4 bits"),
        ({"weights": WEIGHTS | {"type": "int"}}, "weights: int of 8 bits"),
        ({"weights": WEIGHTS | {"symmetric": False}}, "not symmetric"),
        ({"weights": WEIGHTS, "output_activations": WEIGHTS}, "output_activations"),
        ({"weights": WEIGHTS, "input_activations": WEIGHTS | {"strategy": "token"}}, "static"),
        ({"weights": WEIGHTS, "input_activations": WEIGHTS | {"type": "int"}}, "int of 8 bits"),
    ],
)
def test_what_is_not_float8_of_a_group_is_refused(group: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        stored_layer(LAYER, facts_of(compressed(group), stored(LAYER)))


def test_formats_are_those_of_the_inputs_unless_they_are_to_stay_float() -> None:
    inputs = WEIGHTS | {"strategy": "token", "dynamic": True}
    for config, expected in (
        (FP8, "float8:dynamic"),
        (STATIC, "float8:static"),
        (MODELOPT, "float8:static"),
        (compressed({"weights": WEIGHTS}), "float8"),
        (compressed({"weights": WEIGHTS, "input_activations": inputs}), "float8:dynamic"),
    ):
        facts = facts_of(config, {})
        assert formats(facts, CheckpointOptions()) == ("float", expected)
        assert formats(facts, CheckpointOptions(activations="float")) == ("float", "float8")


def test_a_scale_of_the_whole_batch_is_taken_for_each_token_and_said() -> None:
    (note,) = notes(facts_of(FP8, {}), CheckpointOptions())
    assert "each token, not of the whole batch" in note
    (note,) = notes(facts_of(FP8, {}), CheckpointOptions(activations="float"))
    assert "inputs stay float" in note
    for config in (STATIC, FP8 | {"weight_block_size": [128, 128]}):
        assert notes(facts_of(config, {}), CheckpointOptions()) == ()


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
def test_kv_scales_are_found_under_every_name_that_they_had(k: str, v: str) -> None:
    attention = [f"model.layers.{layer}.self_attn" for layer in (0, 11)]
    tensors = {f"{one}.{name}": ((1,), "float32") for one in attention for name in (k, v)}
    assert kv_scales(facts_of(FP8, tensors)) == tuple(
        StoredKVScales(layer, "float8", f"{one}.{k}", f"{one}.{v}")
        for layer, one in zip((0, 11), attention, strict=True)
    )


def test_a_scale_for_keys_alone_is_refused() -> None:
    facts = facts_of(FP8, {"model.layers.0.self_attn.k_scale": ((1,), "float32")})
    with pytest.raises(CheckpointError, match=r"self_attn\.v_scale: missing"):
        kv_scales(facts)


def test_kv_scales_of_a_compressed_checkpoint_are_for_what_its_scheme_says() -> None:
    tensors = {f"model.layers.0.self_attn.{one}_scale": ((1,), "float32") for one in "kv"}
    group = {"weights": WEIGHTS}
    assert kv_scales(facts_of(compressed(group), tensors)) == ()
    for kind, codes in (("float", "float8"), ("int", "int8")):
        scheme = {"num_bits": 8, "type": kind, "strategy": "tensor"}
        (found,) = kv_scales(facts_of(compressed(group, kv_cache_scheme=scheme), tensors))
        assert found.codes == codes
    four = {"num_bits": 4, "type": "int", "strategy": "tensor"}
    with pytest.raises(CheckpointError, match="kv_cache_scheme"):
        kv_scales(facts_of(compressed(group, kv_cache_scheme=four), tensors))
