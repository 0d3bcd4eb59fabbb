"""Formats, parameters and sizes of float8 weights, for planning. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredKVScales, StoredParameter, WeightSpec
from pegboard_fp8.rules import fp8_rules, modelopt_rules
from pegboard_quant.compressed_tensors import METHODS, parse
from pegboard_quant.eight_bit import Rules, compressed_rules
from pegboard_quant.eight_bit_layers import FLOAT8, EightBitLayer, eight_bit_layer
from pegboard_quant.keys import undeclared_notes
from pegboard_quant.kv_scales import compressed_kv_scales, find_kv_scales
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.planning import bytes_of, parameters_of, wrong_method

_RULES: dict[str, Callable[[CheckpointFacts], Rules]] = {
    "fp8": fp8_rules,
    "modelopt": modelopt_rules,
    **dict.fromkeys(METHODS, lambda facts: compressed_rules(parse(facts), "float")),
}


def stored_layer(layer: WeightSpec, facts: CheckpointFacts) -> EightBitLayer | None:
    """The form of a layer in codes; None: its weight is in floats.

    Raises:
        CheckpointError: it is in neither, or config and tensors disagree.
    """
    return eight_bit_layer(layer, facts, FLOAT8, rules_of(facts).of)


def rules_of(facts: CheckpointFacts) -> Rules:
    """The config's rules for the layers.

    Raises:
        CheckpointError: the method is none of this package's, or the config says what is not known.
    """
    if facts.quantization not in _RULES:
        raise wrong_method(facts, _RULES)
    return _RULES[facts.quantization](facts)


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """A layer's tensors: codes, their scales, and the scale of static inputs; or floats.

    Raises:
        CheckpointError: as `stored_layer`.
    """
    return parameters_of(layer, stored_layer(layer, facts))


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: CheckpointOptions | None
) -> int:
    """Bytes in memory: a byte a code and float32 scales of each row; or floats."""
    return bytes_of(layer, stored_layer(layer, facts), dtype)


def formats(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """The weight formats of the checkpoint."""
    return rules_of(facts).formats(FLOAT8.kind, options)


def kv_scales(facts: CheckpointFacts) -> tuple[StoredKVScales, ...]:
    """The tensors with static scales of keys and values."""
    if facts.quantization in METHODS:
        return compressed_kv_scales(facts)
    return find_kv_scales(facts, "float8")


def notes(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """Differences from the checkpoint's settings, and unknown settings."""
    return (*rules_of(facts).notes(options), *undeclared_notes(facts))
