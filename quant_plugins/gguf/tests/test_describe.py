"""A file's facts are those of the model it was made from."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pegboard.errors import CheckpointError
from pegboard.testing.tiny import FAMILIES, ODD_SHAPE, parameter_shapes
from pegboard_gguf.describe import describe

F32 = gguf.GGMLQuantizationType.F32


def test_config_of_smollm2_is_the_published_one(smollm2: Path) -> None:
    config = dict(describe(smollm2).config)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    published = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in published} == published


def test_facts_name_what_the_model_needs(smollm2: Path) -> None:
    facts = describe(smollm2)
    assert {name: fact.shape for name, fact in facts.tensors.items()} == {
        name: tuple(shape) for name, shape in parameter_shapes(dict(facts.config)).items()
    }
    assert facts.quantization == "gguf"
    assert facts.tensors["model.layers.0.mlp.up_proj.weight"].format == "Q4_1"
    assert facts.tensors["model.norm.weight"].format == "plain"
    # <|im_end|>, which the file names; <|endoftext|> and <reponame>, as to llama.cpp.
    assert facts.eos_token_ids == (2, 0, 4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_family_is_described_as_what_it_is(write_model: Any, family: str) -> None:
    config = {**ODD_SHAPE, **FAMILIES[family]}
    tensors = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
    facts = describe(write_model(config, tensors))
    assert facts.quantization is None
    known = {key: value for key, value in config.items() if key in facts.config}
    assert {key: facts.config[key] for key in known} == known
    # Keys that a config may leave out, and those that only a tokenizer has.
    assert set(config) - set(known) <= {
        "use_sliding_window",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
    }


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma3", {}, r"general\.architecture: is 'gemma3'; allowed: llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture of experts"),
        ("llama", {}, r"llama\.embedding_length: is missing"),
        ("llama", {"llama.embedding_length": "x"}, r"llama\.embedding_length: is 'x'"),
    ],
)
def test_other_models_are_refused_by_name(
    write_gguf: Any, architecture: str, metadata: dict[str, Any], message: str
) -> None:
    tensors = {"token_embd.weight": (np.zeros((8, 32), np.float32), F32)}
    path = write_gguf(metadata, tensors, architecture=architecture)
    with pytest.raises(CheckpointError, match=message):
        describe(path)


def test_a_setting_of_each_layer_must_be_the_same_everywhere(
    write_model: Any, tiny_config: dict[str, Any], tiny_tensors: dict[str, torch.Tensor]
) -> None:
    same = {"llama.attention.head_count_kv": [2, 2]}
    path = write_model(tiny_config, tiny_tensors, metadata=same)
    assert describe(path).config["num_key_value_heads"] == 2
    differing = {"llama.attention.head_count_kv": [2, 4]}
    path = write_model(tiny_config, tiny_tensors, metadata=differing)
    with pytest.raises(CheckpointError, match="differs from layer to layer"):
        describe(path)


def test_a_tensor_of_its_own_makes_the_head_untied(
    write_model: Any, tiny_config: dict[str, Any], tiny_tensors: dict[str, torch.Tensor]
) -> None:
    tensors = tiny_tensors | {"lm_head.weight": torch.ones(288, 64)}
    facts = describe(write_model(tiny_config, tensors))
    assert facts.config["tie_word_embeddings"] is False
    assert facts.tensors["lm_head.weight"].shape == (288, 64)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_rotary_embedding_of_llama3_is_recognised(
    write_gguf: Any, tiny_file: Path, factor: float
) -> None:
    """`rope_freqs.weight` as transformers computes the inverse of the same rule."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    described = describe(_with_rope(write_gguf, (plain / scaled).numpy(), 500000.0))
    assert described.config["rope_parameters"] == parameters
    assert "rope_freqs.weight" not in described.tensors
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        describe(_with_rope(write_gguf, np.linspace(1, 8, 32, dtype=np.float32), 500000.0))


def _with_rope(write_gguf: Any, factors: np.ndarray[Any, Any], theta: float) -> Path:
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 131072,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": theta,
    }
    tensors = {
        "token_embd.weight": (np.zeros((8, 256), np.float32), F32),
        "rope_freqs.weight": (factors.astype(np.float32), F32),
    }
    path: Path = write_gguf(metadata, tensors)
    return path


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_type": "linear", "factor": 2.5},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_other_scaling_rules_keep_their_numbers(
    write_model: Any,
    tiny_config: dict[str, Any],
    tiny_tensors: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    path = write_model(tiny_config, tiny_tensors, metadata=metadata)
    rope = describe(path).config["rope_parameters"]
    assert rope == {"rope_theta": 10000.0, **expected}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, {}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, {}),
    ],
)
def test_a_factor_means_what_it_means_to_llama_cpp(
    write_model: Any,
    tiny_config: dict[str, Any],
    tiny_tensors: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    """Without a rule it is linear; with the rule `none` it is nothing, and 0 is no factor."""
    path = write_model(tiny_config, tiny_tensors, metadata=metadata)
    rope = describe(path).config["rope_parameters"]
    assert rope == {"rope_theta": 10000.0, **(expected or {"rope_type": "default"})}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.yarn_attn_factor", 0.5),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("attention.causal", False),
        ("attention.scale", 0.1),
        ("attention.clamp_kqv", 8.0),
        ("attention.key_length_swa", 8),
        ("attention.sliding_window_pattern", [True, False]),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("expert_used_count", 2),
    ],
)
def test_a_key_that_nothing_acts_on_is_refused_by_name(
    write_model: Any,
    tiny_config: dict[str, Any],
    tiny_tensors: dict[str, torch.Tensor],
    key: str,
    value: Any,
) -> None:
    path = write_model(tiny_config, tiny_tensors, metadata={f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=rf"llama\.{key}"):
        describe(path)


def test_neutral_values_pass_and_keys_of_nobody_go_into_the_config(
    write_model: Any, tiny_config: dict[str, Any], tiny_tensors: dict[str, torch.Tensor]
) -> None:
    plain = describe(write_model(tiny_config, tiny_tensors))
    neutral = {
        "rope.scaling.attn_factor": 1.0,
        "logit_scale": 0.0,
        "attention.causal": True,
        "expert_used_count": 0,
        "rope.scaling.finetuned": True,
        "nobody.knows": 3,
    }
    metadata = {f"llama.{key}": value for key, value in neutral.items()}
    facts = describe(write_model(tiny_config, tiny_tensors, metadata=metadata))
    assert facts.config == {**plain.config, "llama.nobody.knows": 3}


def test_a_folder_with_one_file_is_that_file(tiny_file: Path) -> None:
    assert describe(tiny_file.parent) == describe(tiny_file)
    tiny_file.with_name("other.gguf").write_bytes(tiny_file.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(model\.gguf, other\.gguf\)"):
        describe(tiny_file.parent)


def test_a_second_look_gives_equal_facts_without_the_library(smollm2: Path) -> None:
    """The second process recalls; what it needs to convert is not even imported."""
    script = (
        "import sys; from pathlib import Path; from pegboard_gguf.describe import describe;"
        "print(describe(Path(sys.argv[1])));"
        "print([name for name in ('gguf', 'torch', 'numpy') if name in sys.modules])"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-c", script, str(smollm2)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ,
        ).stdout.splitlines()
        for _ in range(2)
    )
    assert first[0] == second[0]
    assert "torch" not in first[1]
    assert second[1] == "[]" or second[1] == "['numpy']"


def test_a_changed_file_gets_other_facts(tiny_file: Path) -> None:
    before = describe(tiny_file)
    content = bytearray(tiny_file.read_bytes())
    content[-40] ^= 1
    tiny_file.write_bytes(content)
    after = describe(tiny_file)
    assert after.fingerprint != before.fingerprint
    assert dataclasses.replace(after, fingerprint=before.fingerprint) == before
