"""The size of plain weights, in the checkpoint and in memory. Torch-free."""

from __future__ import annotations

import math

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.dtypes import FLOAT_BYTES
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """One tensor, `weight`, [out_features, in_features] of any floating type."""
    return (StoredParameter("weight", layer.shape, shard_axis={"out": 0, "in": 1}),)


def resident_bytes(layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: None) -> int:
    """Bytes in memory: one element of the activation dtype for each weight."""
    return math.prod(layer.shape) * FLOAT_BYTES[dtype]
