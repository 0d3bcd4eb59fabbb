"""The rules of a config whose whole method is float8, by layer. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import WeightSpec
from pegboard_quant.eight_bit import Inputs, Rule, Rules
from pegboard_quant.keys import check_keys
from pegboard_quant.names import contains_any, spellings
from pegboard_quant.planning import texts

_FP8_KEYS = frozenset(
    {
        *("activation_scheme", "ignored_layers", "modules_to_not_convert"),
        *("weight_block_size", "fmt", "scale_fmt"),
        *("kv_cache_scheme", "kv_cache_quant_targets"),
    }
)
_MODELOPT_KEYS = frozenset(
    {
        *("quant_algo", "kv_cache_quant_algo", "kv_cache_scheme"),
        *("exclude_modules", "ignore", "config_groups"),
    }
)


def fp8_rules(facts: CheckpointFacts) -> Rules:
    """The rules of a `quant_method: fp8` checkpoint.

    Raises:
        CheckpointError: the config says what is not known.
    """
    config = facts.quantization_config
    check_keys(config, _FP8_KEYS, "fp8")
    _one_of(config, "fmt", (None, "e4m3"))
    _one_of(config, "scale_fmt", (None, "ue8m0", "float"))
    scheme = _one_of(config, "activation_scheme", ("dynamic", "static"))
    block = _block_size(config)
    ignored = (*texts(config, "ignored_layers"), *texts(config, "modules_to_not_convert"))
    inputs = Inputs("static")
    if scheme == "dynamic":
        inputs = Inputs("dynamic", None if block is None else block[1], per_tensor=block is None)
    rule = Rule("whole_or_row" if block is None else "block", block, inputs)
    return Rules((rule,), lambda layer: None if contains_any(ignored, layer.name) else rule)


def modelopt_rules(facts: CheckpointFacts) -> Rules:
    """The rules of a ModelOpt FP8 checkpoint.

    Raises:
        CheckpointError: the config says what is not known, or another algorithm.
    """
    config = facts.quantization_config
    check_keys(config, _MODELOPT_KEYS, "modelopt")
    _one_of(config, "quant_algo", ("FP8",))
    _one_of(config, "kv_cache_quant_algo", (None, "FP8"))
    ignored = (*texts(config, "exclude_modules"), *texts(config, "ignore"))
    rule = Rule("tensor", inputs=Inputs("static"))

    def of(layer: WeightSpec) -> Rule | None:
        names = spellings(layer.name)
        matched = any(fnmatchcase(name, pattern) for name in names for pattern in ignored)
        return None if matched or contains_any(ignored, layer.name) else rule

    return Rules((rule,), of)


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    block = config.get("weight_block_size")
    if block is None:
        return None
    right = isinstance(block, list) and len(block) == 2
    if not right or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            "quantization_config.weight_block_size",
            f"{block!r}",
            allowed="two positive numbers, rows and columns",
        )
    return block[0], block[1]


def _one_of(config: Mapping[str, Any], key: str, allowed: tuple[str | None, ...]) -> str | None:
    value = config.get(key)
    if value not in allowed:
        said = ", ".join(name for name in allowed if name is not None)
        was = "is missing" if value is None else f"{value!r}"
        raise CheckpointError(f"quantization_config.{key}", was, allowed=said)
    return value if isinstance(value, str) else None
