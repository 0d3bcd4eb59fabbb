"""The `quantization_config` of GPTQ checkpoints, as several tools spell it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard_quant.auto_round import METHOD as AUTO_ROUND
from pegboard_quant.auto_round import plain_settings
from pegboard_quant.keys import check_keys
from pegboard_quant.names import begins_with
from pegboard_quant.planning import flag, whole

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")

_METHOD = "gptq"
_SYNONYMS = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format", "version"),
}
_HEEDED = frozenset(
    {
        *("desc_act", "sym", "zero_point", "dynamic", "pack_dtype"),
        *("is_marlin_format", *(name for names in _SYNONYMS.values() for name in names)),
    }
)
_LEAVE = "-:"


@dataclass(frozen=True, slots=True)
class GPTQSettings:
    """The storage of one module.

    Attributes:
        bits: of a code.
        group_size: inputs that share a scale; -1: all.
        symmetric: every zero is the middle code; None: not said.
        reordered: groups follow the order in which inputs were quantized.
        zeros_less_one: zeros are stored less one (format `gptq`), not as they are (`gptq_v2`).
        borrowed: one was taken from whole words, so that fields of 0 borrowed from their neighbours.
    """

    bits: int
    group_size: int
    symmetric: bool | None
    reordered: bool
    zeros_less_one: bool
    borrowed: bool


def settings_of(module: str, facts: CheckpointFacts) -> GPTQSettings | None:
    """The config's settings of a module; None: it is not quantized.

    Raises:
        CheckpointError: something that is not known or not read.
    """
    config = facts.quantization_config
    if facts.quantization == AUTO_ROUND:
        config, kept = plain_settings(config)
        if module in kept:
            return None
    check_keys(config, _HEEDED, _METHOD)
    own = _override(config, module)
    if own is None:
        return None
    check_keys(own, _HEEDED, _METHOD)
    said = {**_named(config), **_named(own)}
    bits, group_size = whole(said, "bits"), whole(said, "group_size", -1)
    if bits not in BITS:
        raise CheckpointError(
            f"quantization_config.bits of {module}", f"{bits}", allowed=", ".join(map(str, BITS))
        )
    if group_size != -1 and group_size < 1:
        raise CheckpointError(
            f"quantization_config.group_size of {module}",
            f"{group_size}",
            allowed="-1 or a positive number",
        )
    return GPTQSettings(
        bits=bits,
        group_size=group_size,
        symmetric=_symmetric(said),
        reordered=flag(said, "desc_act", default=False),
        zeros_less_one=_format(said) == "gptq",
        borrowed=_is_by_gptqmodel(config),
    )


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under the first of their names."""
    said = {key: value for key, value in config.items() if value is not None}
    for name, synonyms in _SYNONYMS.items():
        values = [said[key] for key in synonyms if key in said]
        if any(value != values[0] for value in values):
            raise CheckpointError(
                "quantization_config",
                f"{' and '.join(key for key in synonyms if key in said)} differ",
                allowed="one value",
            )
        said |= {name: values[0]} if values else {}
    return said


def _override(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Settings of the first pattern of `dynamic` that the name begins with; None: left as it is."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(
            "quantization_config.dynamic", f"{dynamic!r}", allowed="patterns to settings"
        )
    for pattern, settings in dynamic.items():
        if begins_with(pattern.removeprefix(_LEAVE).removeprefix("+:"), module):
            if pattern.startswith(_LEAVE):
                return None
            if not isinstance(settings, Mapping):
                raise CheckpointError(
                    f"quantization_config.dynamic.{pattern}", f"{settings!r}", allowed="settings"
                )
            return settings
    return {}


def _symmetric(said: Mapping[str, Any]) -> bool | None:
    if "sym" in said:
        return flag(said, "sym", default=True)
    return not flag(said, "zero_point", default=False) if "zero_point" in said else None


def _format(said: Mapping[str, Any]) -> str:
    """`gptq` or `gptq_v2`; a file that does not say is `gptq`, which is older than the key."""
    stored = "marlin" if said.get("is_marlin_format") else said.get("checkpoint_format", "gptq")
    if stored not in FORMATS:
        raise CheckpointError(
            "quantization_config.checkpoint_format",
            f"{stored!r}",
            allowed=", ".join(FORMATS),
            fix="convert the checkpoint to gptq with the tool that wrote it",
        )
    pack_dtype = said.get("pack_dtype", "int32")
    if pack_dtype != "int32":
        raise CheckpointError("quantization_config.pack_dtype", f"{pack_dtype!r}", allowed="int32")
    return str(stored)


def _is_by_gptqmodel(config: Mapping[str, Any]) -> bool:
    meta = config.get("meta")
    return isinstance(meta, Mapping) and "gptqmodel" in str(meta.get("quantizer"))
