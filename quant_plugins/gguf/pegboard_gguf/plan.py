"""What planning needs to know of GGUF's weights, without torch."""

from __future__ import annotations

import math

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_gguf.options import GGUFOptions

# What `gguf.quants.dequantize` reads, beside plain elements.
BLOCK_FORMATS = frozenset(
    {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    }
)
PLAIN_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """The one tensor of a layer. Its shape is logical, as in `TensorFact`.

    Raises:
        CheckpointError: it is in a format that cannot be dequantized.
    """
    fact = facts.tensors.get(f"{layer.name}.weight")
    dtype = None
    if fact is not None:
        readable = BLOCK_FORMATS if fact.format != "plain" else PLAIN_DTYPES
        stored = fact.format if fact.format != "plain" else fact.dtype
        if stored not in readable:
            raise CheckpointError(
                f"{facts.path}: tensor '{layer.name}.weight'",
                f"is stored as {stored}",
                allowed=", ".join(sorted(BLOCK_FORMATS | PLAIN_DTYPES)),
            )
        dtype = fact.dtype
    return (StoredParameter("weight", layer.shape, dtype, {"out": 0, "in": 1}),)


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: GGUFOptions | None
) -> int:
    """Bytes of the dequantized weight in the activation dtype."""
    return math.prod(layer.shape) * _ITEM_BYTES[dtype]
