"""Formats, parameters and sizes of weights that are rounded while they load. Torch-free."""

from __future__ import annotations

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant.options import RoundingOptions
from pegboard_quant.planning import (
    code_bytes,
    code_format,
    group_count,
    plain_bytes,
    plain_parameters,
)

INT8_BITS = 8
W4_BITS = 4


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """One tensor, `weight`, in floats."""
    return plain_parameters(layer)


def is_rounded(layer: WeightSpec, options: RoundingOptions) -> bool:
    """Whether a weight is rounded. The embedding and the output head, which every token passes and
    whose errors nothing evens out, stay as they are unless the options say otherwise."""
    return layer.kind == "linear" or options.embedding


def int8_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: RoundingOptions
) -> int:
    """Bytes in memory of a weight that `int8` loads."""
    return _bytes(layer, dtype, options, kind="int8", numbers=1)


def w4_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: RoundingOptions
) -> int:
    """Bytes in memory of a weight that `w4` loads."""
    return _bytes(layer, dtype, options, kind="uint4", numbers=2)


def int8_formats(facts: CheckpointFacts, options: RoundingOptions) -> tuple[str, ...]:
    """Formats of the weights that `int8` loads."""
    return ("float", code_format(INT8_BITS, options.activations))


def w4_formats(facts: CheckpointFacts, options: RoundingOptions) -> tuple[str, ...]:
    """Formats of the weights that `w4` loads."""
    return ("float", code_format(W4_BITS, options.activations))


def _bytes(
    layer: WeightSpec, dtype: str, options: RoundingOptions, *, kind: str, numbers: int
) -> int:
    if not is_rounded(layer, options):
        return plain_bytes(layer, dtype)
    groups = group_count(layer, options.group_size, where="quantizer.options.group_size")
    return code_bytes(kind, layer.shape, groups, numbers)
