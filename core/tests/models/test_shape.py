"""Configs as they are published, and configs that are wrong."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pegboard.errors import CheckpointError
from pegboard.models.rope import rotary_frequencies
from pegboard.models.shape import describe

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN_2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
}
QWEN_3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
LINEAR = {"type": "linear", "factor": 4.0}


def test_published_llama() -> None:
    shape = describe(LLAMA_3_2_1B)
    assert shape.num_layers == 16
    assert shape.max_position == 131072
    assert shape.tied_embeddings and not shape.qk_norm
    layer = shape.attention[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (32, 8, 64)
    assert layer.scale == 0.125 and layer.window is None
    assert shape.tensor_parallel == (1, 2, 4, 8)
    num_parameters = sum(torch.Size(p.shape).numel() for p in shape.parameters)
    assert num_parameters == 1_235_814_400  # as its model card counts
    assert any(fnmatch("lm_head.weight", pattern) for pattern in shape.ignored)


def test_published_mistral_has_a_window_in_every_layer() -> None:
    assert {layer.window for layer in describe(MISTRAL_7B).attention} == {4096}
    assert {
        layer.window for layer in describe(MISTRAL_7B | {"sliding_window": None}).attention
    } == {None}


def test_published_qwen2_has_biases_and_its_window_off() -> None:
    shape = describe(QWEN_2_5_0_5B)
    assert {layer.window for layer in shape.attention} == {None}
    biases = {p.name.split(".", 3)[-1] for p in shape.parameters if p.kind == "bias"}
    assert biases == {f"self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_window_layers": 0},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": None},
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 12},
    ],
)
def test_windows_of_qwen_are_in_the_layers_where_transformers_has_them(
    change: dict[str, Any],
) -> None:
    given = {k: v for k, v in (QWEN_2_5_0_5B | change).items() if v is not None}
    theirs = AutoConfig.for_model("qwen2", **given)
    expected = [
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types
    ]
    assert [layer.window for layer in describe(QWEN_2_5_0_5B | change).attention] == expected


def test_published_qwen3_has_norms_of_q_and_k() -> None:
    shape = describe(QWEN_3_0_6B)
    assert shape.qk_norm
    names = {p.name: p.shape for p in shape.parameters}
    assert names["model.layers.27.self_attn.k_norm.weight"] == (128,)
    assert names["model.layers.0.self_attn.o_proj.weight"] == (1024, 2048)


def test_yarn_lengthens_the_context() -> None:
    assert describe(QWEN_2_5_0_5B | {"rope_scaling": YARN}).max_position == 131072


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_3_2_1B,
        LLAMA_3_2_1B | {"rope_scaling": LINEAR},
        QWEN_2_5_0_5B,
        QWEN_2_5_0_5B | {"rope_scaling": YARN},
        QWEN_2_5_0_5B | {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 1.1}},
        QWEN_2_5_0_5B | {"rope_scaling": YARN | {"truncate": False, "beta_fast": 20}},
        QWEN_2_5_0_5B | {"rope_scaling": YARN | {"truncate": False, "beta_fast": 1}},
        QWEN_2_5_0_5B | {"rope_scaling": YARN | {"beta_slow": 1e-6}, "rope_theta": 1e4},
        MISTRAL_7B,
        QWEN_3_0_6B,
    ],
)
def test_frequencies_are_those_of_transformers_bit_for_bit(config: dict[str, Any]) -> None:
    family = config["architectures"][0].removesuffix("ForCausalLM").lower()
    theirs = AutoConfig.for_model(family, **config)
    rule = theirs.rope_parameters["rope_type"]
    ours, amplitude = rotary_frequencies(describe(config).rope)
    if rule == "default":
        head_dim = getattr(theirs, "head_dim", None) or 64
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        expected, expected_amplitude = 1.0 / (theirs.rope_parameters["rope_theta"] ** steps), 1.0
    else:
        expected, expected_amplitude = ROPE_INIT_FUNCTIONS[rule](theirs)
    assert torch.equal(ours, expected)
    assert amplitude == expected_amplitude


@pytest.mark.parametrize("config", [LLAMA_3_2_1B, QWEN_2_5_0_5B, MISTRAL_7B, QWEN_3_0_6B])
def test_both_spellings_of_rope_are_one(config: dict[str, Any]) -> None:
    older = ("rope_theta", "rope_scaling", "torch_dtype")
    current = {key: value for key, value in config.items() if key not in older}
    current["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config["rope_theta"],
        **(config.get("rope_scaling") or {}),
    }
    assert describe(current) == describe(config)


@pytest.mark.parametrize("config", [LLAMA_3_2_1B, QWEN_2_5_0_5B, MISTRAL_7B, QWEN_3_0_6B])
def test_keys_left_out_mean_what_they_mean_to_transformers(config: dict[str, Any]) -> None:
    required = (
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "vocab_size",
    )
    sparse = {key: config[key] for key in required} | {"num_attention_heads": 32}
    family = config["architectures"][0].removesuffix("ForCausalLM").lower()
    theirs, ours = AutoConfig.for_model(family, **sparse), describe(sparse)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.attention[0].num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or sparse["hidden_size"] // 32
    assert ours.attention[0].head_dim == head_dim
    assert ours.attention[0].window == getattr(theirs, "sliding_window", None)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel; allowed: Llama"),
        ({"architectures": None}, "architectures: missing"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "2048"}, "hidden_size: '2048'"),
        ({"vocab_size": True}, "vocab_size: True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5; allowed: a divisor of 32"),
        ({"head_dim": 63}, "head_dim: 63; allowed: an even number"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'; allowed: silu"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'"),
        ({"rope_theta": -1}, "rope_theta: -1"),
        ({"rope_scaling": 4.0}, "rope_scaling: 4.0; allowed: a mapping"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type: 'dynamic' is not supported; allowed: default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: a partial rotation"),
    ],
)
def test_wrong_config_is_one_line_that_names_the_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as error:
        describe(LLAMA_3_2_1B | change)
    assert str(error.value).startswith(f"model config {says}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["chunked_attention"] * 24},
        {"layer_types": ["sliding_attention"] * 24},
    ],
)
def test_layer_types_that_cannot_be_followed_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="model config layer_types"):
        describe(QWEN_2_5_0_5B | change)


def test_planning_does_not_import_torch() -> None:
    code = (
        "import sys; import pegboard.models.shape, pegboard.builtin.safetensors_describe, "
        "pegboard.builtin.unquantized_plan; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
