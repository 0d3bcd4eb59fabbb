"""Formats, parameters and sizes of GGUF's weights, for planning. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.dtypes import FLOAT_BYTES
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_gguf.forms import PACKED_FORMS
from pegboard_gguf.options import GGUFOptions

# The types that `gguf.quants.dequantize` reads, beside plain elements.
BLOCK_FORMATS = frozenset(
    {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    }
)

Settled = tuple[Literal["packed", "dequantize"], Literal["int8", "float"]]
"""`mode` and `activations`."""

_NAMES_SHOWN = 3


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """The one tensor of a layer. Its shape is logical, as in `TensorFact`.

    Raises:
        CheckpointError: it is in a format that cannot be dequantized.
    """
    fact = facts.tensors.get(f"{layer.name}.weight")
    dtype = None
    if fact is not None:
        readable = BLOCK_FORMATS if fact.format != "plain" else FLOAT_BYTES.keys()
        stored = fact.format if fact.format != "plain" else fact.dtype
        if stored not in readable:
            raise CheckpointError(
                f"{facts.path}: tensor '{layer.name}.weight'",
                f"is stored as {stored}",
                allowed=", ".join(sorted(BLOCK_FORMATS | FLOAT_BYTES.keys())),
            )
        dtype = fact.dtype
    return (StoredParameter("weight", layer.shape, dtype, {"out": 0, "in": 1}),)


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: GGUFOptions
) -> int:
    """Bytes of the codes and their groups' numbers, or of a float weight in the activation dtype."""
    fact = facts.tensors.get(f"{layer.name}.weight")
    num_weights = math.prod(layer.shape)
    if fact is None or format_of(fact.format, options) == "float":
        return num_weights * FLOAT_BYTES[dtype]
    return PACKED_FORMS[fact.format].num_bytes(num_weights)


def formats(facts: CheckpointFacts, options: GGUFOptions) -> tuple[str, ...]:
    """The canonical formats of a file's matrices."""
    found = {format_of(stored, options) for stored in _matrices(facts).values()}
    return tuple(sorted(found))


def format_of(stored: str, options: GGUFOptions) -> str:
    """The canonical format of a matrix, by `TensorFact.format`."""
    form = PACKED_FORMS.get(stored)
    if form is None or not options.keeps_codes:
        return "float"
    return f"{form.codes}:grouped" if options.rounds_inputs else form.codes


def alternatives(facts: CheckpointFacts, options: GGUFOptions) -> tuple[GGUFOptions, ...]:
    """The options with each choice that they leave open settled; the best first."""
    fallback: Settled = ("packed", "float") if options.mode == "packed" else ("dequantize", "float")
    ways: list[Settled] = [("packed", "int8"), ("packed", "float"), ("dequantize", "float")]
    if options.mode == "auto" and formats(facts, options) == ("float",):
        ways = [fallback]
    elif options.activations == "auto":
        ways = [("packed", "int8"), fallback]
    settled = [GGUFOptions(mode=mode, activations=activations) for mode, activations in ways]
    return tuple(
        way
        for way in settled
        if options.mode in ("auto", way.mode) and options.activations in ("auto", way.activations)
    ) or (options,)


def notes(facts: CheckpointFacts, options: GGUFOptions) -> tuple[str, ...]:
    """Notes on a file's weights, and on the inputs of packed ones."""
    if not options.keeps_codes:
        return ()
    packed = Counter[str]()
    floats: dict[str, list[str]] = {}
    for name, stored in _matrices(facts).items():
        if format_of(stored, options) != "float":
            packed[stored] += 1
        elif stored != "plain":
            floats.setdefault(stored, []).append(name)
    said = []
    if packed:
        counts = ", ".join(f"{count} of {stored}" for stored, count in sorted(packed.items()))
        said.append(
            f"matrices that stay packed: {counts}; {_bits(facts, options):.1f} bits a weight"
        )
    if packed and options.rounds_inputs:
        said.append(
            "their inputs are rounded to int8 in groups of 32, as llama.cpp does: logits differ from"
            " those of float inputs (activations: float)"
        )
    for stored, names in sorted(floats.items()):
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        said.append(f"{stored} has no packed form and becomes float: {shown}{more}")
    return tuple(said)


def _bits(facts: CheckpointFacts, options: GGUFOptions) -> float:
    """In memory, of a weight of the packed matrices."""
    num_weights = num_bytes = 0
    for name, stored in _matrices(facts).items():
        if format_of(stored, options) != "float":
            size = math.prod(facts.tensors[name].shape)
            num_weights += size
            num_bytes += PACKED_FORMS[stored].num_bytes(size)
    return 8 * num_bytes / num_weights


def _matrices(facts: CheckpointFacts) -> dict[str, str]:
    """Names of all matrices to their `TensorFact.format`."""
    return {name: fact.format for name, fact in facts.tensors.items() if len(fact.shape) == 2}
