"""Formats, parameters and sizes of int8 weights, for planning. Torch-free."""

from __future__ import annotations

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant.compressed_tensors import METHODS, parse
from pegboard_quant.eight_bit import Rules, compressed_rules
from pegboard_quant.eight_bit_layers import INT8, EightBitLayer, eight_bit_layer
from pegboard_quant.keys import undeclared_notes
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.planning import bytes_of, parameters_of, wrong_method


def stored_layer(layer: WeightSpec, facts: CheckpointFacts) -> EightBitLayer | None:
    """The form of a layer in codes; None: its weight is in floats.

    Raises:
        CheckpointError: it is in neither, or config and tensors disagree.
    """
    return eight_bit_layer(layer, facts, INT8, rules_of(facts).of)


def rules_of(facts: CheckpointFacts) -> Rules:
    """The config's rules for the layers.

    Raises:
        CheckpointError: the method is not compressed-tensors, or the config says what is not known.
    """
    if facts.quantization not in METHODS:
        raise wrong_method(facts, METHODS)
    return compressed_rules(parse(facts), "int")


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """A layer's tensors: codes, their scales and zeros, those of static inputs; or floats.

    Raises:
        CheckpointError: as `stored_layer`.
    """
    return parameters_of(layer, stored_layer(layer, facts))


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: CheckpointOptions | None
) -> int:
    """Bytes in memory: a byte a code, float32 scales and zeros of each row and group; or floats."""
    return bytes_of(layer, stored_layer(layer, facts), dtype)


def formats(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """The weight formats of the checkpoint."""
    return rules_of(facts).formats(INT8.kind, options)


def notes(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """Differences from the checkpoint's settings, and unknown settings."""
    return (*rules_of(facts).notes(options), *undeclared_notes(facts))
