"""Layers in codes of 8 bits, one an element: which tensors, of which shapes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant.eight_bit import Rule
from pegboard_quant.planning import code_bytes, is_plain, missing_weight, unsaid_codes
from pegboard_quant.scale_blocks import ScaleBlocks

SCALE, SCALE_INV = "weight_scale", "weight_scale_inv"
"""Names of a weight's scales. The second is not the inverse of anything: both are multiplied."""

ZERO, ORDER = "weight_zero_point", "weight_g_idx"
INPUT_SCALE, INPUT_ZERO = "input_scale", "input_zero_point"


@dataclass(frozen=True, slots=True)
class ElementCodes:
    """The kind of codes.

    Attributes:
        kind: as of `LinearWeight`.
        dtype: as stored.
        scales: names of the tensors that may hold a weight's scales, the usual one last.
        zeros: there may be zeros beside scales.
    """

    kind: str
    dtype: str
    scales: tuple[str, ...]
    zeros: bool


INT8 = ElementCodes("int8", "int8", (SCALE,), zeros=True)
FLOAT8 = ElementCodes("float8", "float8_e4m3fn", (SCALE_INV, SCALE), zeros=False)


@dataclass(frozen=True, slots=True)
class EightBitLayer:
    """A layer in codes.

    Attributes:
        codes: what they are.
        rule: what the config says of it.
        scale: name of the parameter with its scales.
        blocks: what shares a scale, and a zero.
        parameters: the tensors.
    """

    codes: ElementCodes
    rule: Rule
    scale: str
    blocks: ScaleBlocks
    parameters: tuple[StoredParameter, ...]

    @property
    def num_bytes(self) -> int:
        """In memory: a byte a code, float32 scales and zeros of each row and group."""
        numbers = 2 if self.rule.zeros else 1
        return code_bytes(self.codes.kind, self.blocks.shape, self.blocks.num_groups, numbers)


def eight_bit_layer(
    layer: WeightSpec,
    facts: CheckpointFacts,
    codes: ElementCodes,
    rule_of: Callable[[WeightSpec], Rule | None],
) -> EightBitLayer | None:
    """The form in which a layer is stored; None: its weight is in floats. Floats are taken whatever the
    config says; codes must be in the config.

    Args:
        layer: which.
        facts: the checkpoint.
        codes: in which it may be.
        rule_of: what the config says of a layer.

    Raises:
        CheckpointError: it is in neither, or config and tensors disagree.
    """
    if is_plain(layer, facts):
        return None
    fact = facts.tensors.get(f"{layer.name}.weight")
    if fact is None or fact.format != "plain" or fact.dtype != codes.dtype:
        raise missing_weight(layer, facts, f"in {codes.dtype} with {SCALE}")
    rule = rule_of(layer)
    if rule is None:
        raise unsaid_codes(layer, codes.dtype)
    there = (name for name in codes.scales if f"{layer.name}.{name}" in facts.tensors)
    scale = next(there, SCALE)
    blocks = rule.blocks(layer, f"{layer.name}.{scale}", facts)
    scales = blocks.stored(layer.name, scale, facts)
    parameters = (
        StoredParameter("weight", layer.shape, codes.dtype, {"out": 0, "in": 1}),
        scales,
        *_zeros(layer, facts, codes, ZERO, scales),
        *_order(layer, rule),
        *_inputs(layer, facts, codes, rule),
    )
    return EightBitLayer(codes, rule, scale, blocks, parameters)


def _zeros(
    layer: WeightSpec,
    facts: CheckpointFacts,
    codes: ElementCodes,
    name: str,
    scales: StoredParameter,
) -> tuple[StoredParameter, ...]:
    """Zeros, where they are: the tools leave out those that are all 0, and older ones wrote them for
    symmetric codes too."""
    if not codes.zeros or f"{layer.name}.{name}" not in facts.tensors:
        return ()
    return (StoredParameter(name, scales.shape, codes.dtype, scales.shard_axis),)


def _order(layer: WeightSpec, rule: Rule) -> tuple[StoredParameter, ...]:
    if not rule.reordered:
        return ()
    return (StoredParameter(ORDER, (layer.shape[1],), "int32", {"out": None, "in": 0}),)


def _inputs(
    layer: WeightSpec, facts: CheckpointFacts, codes: ElementCodes, rule: Rule
) -> tuple[StoredParameter, ...]:
    """Scale and zero of static inputs."""
    if rule.inputs.activations != "static":
        return ()
    scale = ScaleBlocks(layer.shape, layer.shape).stored(layer.name, INPUT_SCALE, facts)
    return (scale, *_zeros(layer, facts, codes, INPUT_ZERO, scale))
