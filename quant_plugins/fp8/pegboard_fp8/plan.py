"""What planning needs to know of float8 weights, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredKVScales, StoredParameter, WeightSpec
from pegboard_fp8.rules import fp8_rules, modelopt_rules
from pegboard_quant import compressed_tensors
from pegboard_quant.eight_bit import Rule, Rules, compressed_rules
from pegboard_quant.kv_scales import compressed_kv_scales, find_kv_scales
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

CODES = "float8_e4m3fn"
SCALE, SCALE_INV = "weight_scale", "weight_scale_inv"
"""Names of a weight's scales. The second is not the inverse of anything: both are multiplied."""

_RULES: dict[str, Callable[[CheckpointFacts], Rules]] = {
    "fp8": fp8_rules,
    "modelopt": modelopt_rules,
    **dict.fromkeys(compressed_tensors.METHODS, lambda facts: compressed_rules(facts, "float")),
}


@dataclass(frozen=True, slots=True)
class Float8Form:
    """How a checkpoint keeps a weight in float8.

    Attributes:
        rule: what the config says of it.
        scale: name of the parameter with its scales.
        blocks: what shares one of them.
    """

    rule: Rule
    scale: str
    blocks: ScaleBlocks


def form_of(layer: WeightSpec, facts: CheckpointFacts) -> Float8Form | None:
    """How a weight is kept; None: in floats. What is in floats is taken as it is, whatever the config
    says; what is in float8 the config must say so of.

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
    scale = SCALE_INV if f"{layer.name}.{SCALE_INV}" in facts.tensors else SCALE
    return Float8Form(rule, scale, rule.blocks(layer, f"{layer.name}.{scale}", facts))


def rules_of(facts: CheckpointFacts) -> Rules:
    """What the checkpoint's config says of its layers.

    Raises:
        CheckpointError: the method is none of this package's, or the config says what is not known.
    """
    if facts.quantization not in _RULES:
        raise CheckpointError(
            facts.path,
            f"is quantized by {facts.quantization or 'nothing'}",
            allowed=", ".join(_RULES),
            fix="quantizer: auto",
        )
    return _RULES[facts.quantization](facts)


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """A layer's tensors: codes, their scales, and the scale of static inputs; or floats.

    Raises:
        CheckpointError: as `form_of`.
    """
    form = form_of(layer, facts)
    if form is None:
        return plain_parameters(layer)
    stored = [
        StoredParameter("weight", layer.shape, CODES, {"out": 0, "in": 1}),
        form.blocks.stored(layer.name, form.scale, facts),
    ]
    if form.rule.inputs.activations == "static":
        whole = ScaleBlocks(layer.shape, layer.shape)
        stored.append(whole.stored(layer.name, "input_scale", facts))
    return tuple(stored)


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: CheckpointOptions | None
) -> int:
    """Bytes in memory: a byte a code and float32 scales of each row; or floats."""
    form = form_of(layer, facts)
    if form is None:
        return plain_bytes(layer, dtype)
    return code_bytes("float8", layer.shape, form.blocks.num_groups)


def formats(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """The weight formats of the checkpoint."""
    return rules_of(facts).formats("float8", options)


def kv_scales(facts: CheckpointFacts) -> tuple[StoredKVScales, ...]:
    """The tensors with static scales of keys and values."""
    if facts.quantization in compressed_tensors.METHODS:
        return compressed_kv_scales(facts)
    return find_kv_scales(facts, "float8")


def notes(facts: CheckpointFacts, options: CheckpointOptions | None) -> tuple[str, ...]:
    """What is done otherwise than the checkpoint says."""
    return rules_of(facts).notes(options)
