"""Formats, parameters and sizes of compressed-tensors checkpoints whose groups have each a layout of
their own (`format: mixed-precision`). Torch-free."""

from __future__ import annotations

from dataclasses import replace

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant.compressed_tensors import METHODS, CompressedConfig, Group, Kind, parse
from pegboard_quant.eight_bit import Rules, compressed_rules
from pegboard_quant.eight_bit_layers import (
    FLOAT8,
    INT8,
    EightBitLayer,
    ElementCodes,
    eight_bit_layer,
)
from pegboard_quant.keys import undeclared_notes
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.packed_layers import CODES as PACKED_CODES
from pegboard_quant.packed_layers import LAYOUT as PACKED
from pegboard_quant.packed_layers import PackedLayer, packed_layer, packed_sizes
from pegboard_quant.planning import (
    bytes_of,
    code_format,
    is_plain,
    missing_weight,
    parameters_of,
    wrong_method,
)

_ELEMENTS: dict[Kind, ElementCodes] = {"int": INT8, "float": FLOAT8}


def config_of(facts: CheckpointFacts) -> CompressedConfig:
    """The checkpoint's config.

    Raises:
        CheckpointError: the method is not compressed-tensors, or the config says what is not known.
    """
    if facts.quantization not in METHODS:
        raise wrong_method(facts, METHODS)
    return parse(facts)


def stored_layer(layer: WeightSpec, facts: CheckpointFacts) -> EightBitLayer | PackedLayer | None:
    """The form of a layer in codes, by its group; None: its weight is in floats.

    Raises:
        CheckpointError: it is in neither, or config and tensors disagree.
    """
    config = config_of(facts)
    if is_plain(layer, facts):
        return None
    group = config.group_of(layer.name, layer.kind)
    if group is None or group.weights is None:
        raise missing_weight(layer, facts)
    if group.layout != PACKED:
        kind = group.weights.kind
        return eight_bit_layer(layer, facts, _ELEMENTS[kind], _rules(config, kind).of)
    found = packed_layer(layer, facts)
    if found is None:
        raise missing_weight(layer, facts, f"{layer.name}.{PACKED_CODES}")
    return found


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """The tensors of a layer.

    Raises:
        CheckpointError: as `stored_layer`.
    """
    return parameters_of(layer, stored_layer(layer, facts))


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: CheckpointOptions | None
) -> int:
    """Bytes in memory: of codes, their scales and zeros; or of the weight in floats."""
    return bytes_of(layer, stored_layer(layer, facts), dtype)


def formats(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """Formats of the checkpoint's weights.

    Raises:
        CheckpointError: the config says what is not known.
    """
    config = config_of(facts)
    packed = packed_sizes(group for group in config.groups if group.layout == PACKED)
    found = {code_format(bits, "float") for bits, _ in packed}
    for kind, codes in _ELEMENTS.items():
        found.update(_rules(config, kind).formats(codes.kind, options))
    return tuple(sorted(found))


def notes(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """Differences from the checkpoint's settings, and unknown settings."""
    config = config_of(facts)
    said = [note for kind in _ELEMENTS for note in _rules(config, kind).notes(options)]
    return (*dict.fromkeys(said), *undeclared_notes(facts))


def _rules(config: CompressedConfig, kind: Kind) -> Rules:
    """The rules of the groups with a code of this kind an element."""
    groups = tuple(group for group in config.groups if _has_elements(group, kind))
    return compressed_rules(replace(config, groups=groups), kind)


def _has_elements(group: Group, kind: Kind) -> bool:
    return group.layout != PACKED and group.weights is not None and group.weights.kind == kind
