"""What plain weights take, in the checkpoint and in memory. Torch-free."""

from __future__ import annotations

import math

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes an element, of the dtypes in which a plain weight may come."""


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """One tensor, `weight`, [out_features, in_features] of any floating type."""
    return (StoredParameter("weight", layer.shape, shard_axis={"out": 0, "in": 1}),)


def resident_bytes(layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: None) -> int:
    """Bytes in memory: one element of the activation dtype for each weight."""
    return math.prod(layer.shape) * ITEM_BYTES[dtype]
