"""What planning needs to know of int8 weights, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant import compressed_tensors
from pegboard_quant.eight_bit import Rule, Rules, compressed_rules
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.planning import (
    code_bytes,
    is_plain,
    missing_weight,
    plain_bytes,
    plain_parameters,
    unsaid_codes,
)
from pegboard_quant.scale_blocks import ScaleBlocks

CODES = "int8"
SCALE, ZERO, ORDER = "weight_scale", "weight_zero_point", "weight_g_idx"
INPUT_SCALE, INPUT_ZERO = "input_scale", "input_zero_point"


@dataclass(frozen=True, slots=True)
class Int8Form:
    """How a checkpoint keeps a weight in int8.

    Attributes:
        rule: what the config says of it.
        blocks: what shares a scale, and a zero.
    """

    rule: Rule
    blocks: ScaleBlocks


def form_of(layer: WeightSpec, facts: CheckpointFacts) -> Int8Form | None:
    """How a weight is kept; None: in floats. What is in floats is taken as it is, whatever the config
    says; what is in int8 the config must say so of.

    Raises:
        CheckpointError: it is in neither, or config and tensors disagree.
    """
    if is_plain(layer, facts):
        return None
    fact = facts.tensors.get(f"{layer.name}.weight")
    if fact is None or fact.format != "plain" or fact.dtype != CODES:
        raise missing_weight(layer, facts, f"in {CODES} with {SCALE}")
    rule = rules_of(facts).of(layer)
    if rule is None:
        raise unsaid_codes(layer, CODES)
    return Int8Form(rule, rule.blocks(layer, f"{layer.name}.{SCALE}", facts))


def rules_of(facts: CheckpointFacts) -> Rules:
    """What the checkpoint's config says of its layers.

    Raises:
        CheckpointError: the method is not compressed-tensors, or the config says what is not known.
    """
    if facts.quantization not in compressed_tensors.METHODS:
        raise CheckpointError(
            facts.path,
            f"is quantized by {facts.quantization or 'nothing'}",
            allowed=", ".join(compressed_tensors.METHODS),
            fix="quantizer: auto",
        )
    return compressed_rules(facts, "int")


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """A layer's tensors: codes, their scales and zeros, those of static inputs; or floats.

    The tools leave out zeros that are all 0, and older ones wrote them for symmetric codes too: they
    are read where they are.

    Raises:
        CheckpointError: as `form_of`.
    """
    form = form_of(layer, facts)
    if form is None:
        return plain_parameters(layer)
    scale = form.blocks.stored(layer.name, SCALE, facts)
    stored = [StoredParameter("weight", layer.shape, CODES, {"out": 0, "in": 1}), scale]
    if f"{layer.name}.{ZERO}" in facts.tensors:
        stored.append(StoredParameter(ZERO, scale.shape, CODES, scale.shard_axis))
    if form.rule.reordered:
        stored.append(StoredParameter(ORDER, (layer.shape[1],), "int32", {"out": None, "in": 0}))
    if form.rule.inputs.activations == "static":
        whole = ScaleBlocks(layer.shape, layer.shape).stored(layer.name, INPUT_SCALE, facts)
        stored.append(whole)
        if f"{layer.name}.{INPUT_ZERO}" in facts.tensors:
            stored.append(StoredParameter(INPUT_ZERO, whole.shape, CODES))
    return tuple(stored)


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: CheckpointOptions | None
) -> int:
    """Bytes in memory: a byte a code, float32 scales and zeros of each row and group; or floats."""
    form = form_of(layer, facts)
    if form is None:
        return plain_bytes(layer, dtype)
    return code_bytes("int8", layer.shape, form.blocks.num_groups, 2 if form.rule.zeros else 1)


def formats(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """The weight formats of the checkpoint."""
    return rules_of(facts).formats("int8", options)


def notes(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """What is done otherwise than the checkpoint says."""
    return rules_of(facts).notes(options)
