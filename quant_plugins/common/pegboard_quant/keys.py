"""The keys that a quantization config may have: one rule for all formats. Torch-free.

A key is refused where it can change what the tensors mean, has a value that is not neutral, and is not
acted on. Which can is a table: `declared_keys.toml`, what the tools' config classes declare, and
`MEANINGFUL`; less those that are `HARMLESS`. A key that nobody declares passes, and `check` names it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts

HARMLESS = frozenset(
    {
        # who wrote it, of what
        *("quant_method", "method", "version", "quantizer", "provider", "producer", "meta", "desc"),
        *("autoround", "autoround_version", "quantization_status", "global_compression_ratio"),
        *("model_name_or_path", "model_file_base_name", "tokenizer", "processor", "dataset"),
        # how it was rounded
        *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse"),
        *("act_group_aware", "hyb_act", "batch_size", "model_seqlen", "cache_block_outputs"),
        *("observer", "observer_kwargs", "duo_scaling", "modules_in_block_to_quantize"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id"),
        # how its tool runs it
        *("backend", "use_exllama", "use_cuda_fp16", "exllama_config", "disable_exllama", "device"),
        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "max_input_length", "pack_impl"),
        *("offload_to_disk", "offload_to_disk_path", "dequantize", "use_triton"),
        # said by the tensors
        *("lm_head", "scale_dtype", "zp_dtype"),
    }
)
MEANINGFUL = frozenset(
    {
        *("data_type", "act_bits", "act_data_type", "super_bits", "super_group_size"),
        *("extra_config", "packing_format", "transform_config", "rotation", "rotation_config"),
        *("w_bit", "wbits", "q_group_size", "pack_dtype", "is_marlin_format", "dynamic"),
        *("checkpoint_format", "format", "fmt", "scale_fmt", "exclude_modules"),
    }
)
"""Keys of tools whose config classes are not in the table."""


def check_keys(config: Mapping[str, Any], heeded: frozenset[str], method: str) -> None:
    """Raises CheckpointError where a key that can change what tensors mean is not heeded.

    Args:
        config: the settings, or a section of them.
        heeded: what the format's reader acts on, or knows to mean nothing in it.
        method: of quantization, for the error.
    """
    for key in sorted(config.keys() - heeded - HARMLESS):
        if key in _declared() and not _is_absent(config[key]):
            raise CheckpointError(
                f"quantization_config.{key}",
                f"{config[key]!r:.80}, and {method} checkpoints are not known to have it",
                fix="install a newer version, or quantize the model anew",
            )


def undeclared_notes(facts: CheckpointFacts, heeded: frozenset[str] = frozenset()) -> list[str]:
    """A line that names the settings that no known format declares, if there are any."""
    unknown = facts.quantization_config.keys() - heeded - HARMLESS - _declared()
    names = ", ".join(repr(key)[:60] for key in sorted(unknown))
    return [f"settings that no known quantization declares: {names}"] if unknown else []


def _is_absent(value: Any) -> bool:
    return value in (None, False, "", [], {})


@cache
def _declared() -> frozenset[str]:
    text = resources.files("pegboard_quant").joinpath("declared_keys.toml").read_text("utf-8")
    return MEANINGFUL | frozenset(tomllib.loads(text)["keys"])
