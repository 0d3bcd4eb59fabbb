"""GPTQ's config in the spelling of each tool, and what it says of single modules."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard_gptq.config import GPTQSettings, settings_of

UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.11.mlp.down_proj"


def _settings(module: str = UP, **config: Any) -> GPTQSettings | None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, **config}
    kept = {key: value for key, value in said.items() if value is not ...}
    return settings_of(
        module,
        CheckpointFacts(
            "safetensors", "/model", "", {}, {}, "gptq", kept, (), TokenizerFacts(None)
        ),
    )


def _of(module: str = UP, **config: Any) -> GPTQSettings:
    settings = _settings(module, **config)
    assert settings is not None
    return settings


def test_keys_have_synonyms() -> None:
    old = _of(bits=..., w_bit=3, group_size=..., q_group_size=64, sym=..., zero_point=True)
    assert (old.bits, old.group_size, old.symmetric) == (3, 64, False)
    assert _of(bits=..., wbits=8).bits == 8
    assert not _of(format="gptq_v2").zeros_less_one
    assert not _of(checkpoint_format="gptq_v2", format="gptq_v2").zeros_less_one
    assert not _of(version="gptq_v2").zeros_less_one


def test_a_file_that_names_no_format_is_of_the_first() -> None:
    assert _of().zeros_less_one and not _of().borrowed
    assert _of(meta={"quantizer": ["gptqmodel:7.7.0"]}).borrowed


def test_synonyms_that_differ_are_refused() -> None:
    with pytest.raises(CheckpointError, match="checkpoint_format and format differ"):
        _settings(checkpoint_format="gptq", format="gptq_v2")


def test_modules_have_settings_of_their_own_and_the_first_pattern_wins() -> None:
    dynamic = {
        r"+:model\.layers\.0\.": {"bits": 8, "group_size": 32},
        r".*up_proj": {"bits": 2},
        r"-:.*down_proj": {},
    }
    assert (_of(UP, dynamic=dynamic).bits, _of(UP, dynamic=dynamic).group_size) == (8, 32)
    assert _of("model.layers.3.mlp.up_proj", dynamic=dynamic).bits == 2
    assert _of("model.layers.3.mlp.up_proj", dynamic=dynamic).group_size == 128
    assert _settings(DOWN, dynamic=dynamic) is None
    assert _of("model.layers.3.mlp.gate_proj", dynamic=dynamic).bits == 4
    # Patterns begin at the beginning of a name.
    assert _of(UP, dynamic={"up_proj": {"bits": 2}}).bits == 4


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"bits": 5}, "bits of model.layers.0.mlp.up_proj: 5; allowed: 2, 3, 4, 8"),
        ({"bits": "4"}, "bits: '4'; allowed: a whole number"),
        ({"bits": ...}, "bits: is missing"),
        ({"group_size": 0}, "group_size of model.layers.0.mlp.up_proj: 0; allowed: -1"),
        ({"group_size": -7}, "-7; allowed: -1 or a positive number"),
        ({"checkpoint_format": "gptq_p"}, "'gptq_p'; allowed: gptq, gptq_v2"),
        ({"checkpoint_format": "marlin"}, "'marlin'; allowed: gptq, gptq_v2"),
        ({"is_marlin_format": True}, "'marlin'; allowed: gptq, gptq_v2"),
        ({"format": "exl3"}, "'exl3'; allowed: gptq, gptq_v2"),
        ({"pack_dtype": "int16"}, "pack_dtype: 'int16'; allowed: int32"),
        ({"rotation": "hadamard"}, "rotation: 'hadamard', and gptq checkpoints are not known"),
        ({"dynamic": {".*": {"num_bits": 8}}}, "num_bits: 8, and gptq checkpoints are not known"),
        ({"dynamic": {".*": 8}}, "dynamic..*: 8; allowed: settings"),
        ({"dynamic": {"(": {}}}, "pattern '(': is no regular expression"),
        ({"dynamic": ["-:lm_head"]}, "dynamic: ['-:lm_head']; allowed: patterns to settings"),
        ({"desc_act": "yes"}, "desc_act: 'yes'; allowed: true or false"),
    ],
)
def test_what_is_not_known_or_not_read_is_refused_by_name(
    config: dict[str, Any], line: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        _settings(**config)
    assert line in str(refusal.value)


def test_how_a_checkpoint_was_made_changes_nothing() -> None:
    plain = _of()
    made: dict[str, Any] = {
        "damp_percent": 0.01,
        "true_sequential": True,
        "static_groups": False,
        "model_file_base_name": "model",
        "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]],
        "tokenizer": None,
        "is_marlin_format": False,
        "use_exllama": True,
    }
    assert _of(**made) == plain
