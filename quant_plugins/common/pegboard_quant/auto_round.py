"""AutoRound's checkpoints: the tensors of GPTQ or AWQ under a method of their own. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import CheckpointError

METHOD = "auto-round"

_FLOAT_BITS = 16
_HOW_IT_WAS_ROUNDED = frozenset({"packing_format", "act_group_size", "act_sym", "act_dynamic"})


def plain_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The settings in the words of the format that the tensors are in, and the modules that stay in
    floats. Which format that is `packing_format` says; the quantizer was chosen by it.

    Raises:
        CheckpointError: activations or scales are quantized too, or modules differ in more than being
            quantized.
    """
    _one_of(config, "data_type", (None, "int"))
    for key in ("act_bits", "super_bits"):
        bits = config.get(key)
        if bits is not None and (type(bits) is not int or bits < _FLOAT_BITS):
            raise CheckpointError(f"quantization_config.{key}", f"{bits!r}", allowed="16, null")
    plain = {key: value for key, value in config.items() if not _is_own(key)}
    return plain, frozenset(_kept(config))


def _is_own(key: str) -> bool:
    own = {"data_type", "act_bits", "act_data_type", "super_bits", "super_group_size"}
    return key in own | _HOW_IT_WAS_ROUNDED | {"extra_config"}


def _kept(config: Mapping[str, Any]) -> list[str]:
    """Names of the modules that `extra_config` leaves in floats."""
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise CheckpointError(
            "quantization_config.extra_config", f"{extra!r:.80}", allowed="modules to settings"
        )
    kept = []
    for module, said in extra.items():
        bits = said.get("bits") if isinstance(said, Mapping) else said
        if type(bits) is int and bits >= _FLOAT_BITS:
            kept.append(module)
        elif not isinstance(said, Mapping) or _differs(said, config):
            raise CheckpointError(
                f"quantization_config.extra_config.{module}",
                f"{said!r:.80}",
                allowed="the settings of all, or bits: 16",
            )
    return kept


def _differs(said: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a module is stored otherwise than the others."""
    return any(
        value is not None and value != config.get(key)
        for key, value in said.items()
        if key in ("bits", "group_size", "sym", "data_type")
    )


def _one_of(config: Mapping[str, Any], key: str, allowed: tuple[str | None, ...]) -> None:
    if config.get(key) not in allowed:
        said = ", ".join(name for name in allowed if name is not None)
        raise CheckpointError(f"quantization_config.{key}", f"{config[key]!r}", allowed=said)
