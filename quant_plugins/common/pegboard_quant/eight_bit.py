"""Weights in codes of 8 bits, one an element, whose inputs are quantized too: what configs say of them.

Torch-free. The `int-quantized` and `float-quantized` layouts of compressed-tensors differ in the kind
of their codes and in little else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import WeightSpec
from pegboard_quant.compressed_tensors import CompressedConfig, Group, Kind, QuantizationArgs
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.scale_blocks import ScaleBlocks

Scales = Literal["tensor", "channel", "block", "whole_or_row"]

_BITS = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """The quantization of a layer's inputs.

    Attributes:
        activations: as of `LinearWeight`.
        group: inputs of a token that share a dynamic scale; None: all.
        per_tensor: dynamic scales were meant to be of a whole batch.
        zeros: static inputs have a zero beside their scale.
    """

    activations: Literal["float", "static", "dynamic"] = "float"
    group: int | None = None
    per_tensor: bool = False
    zeros: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The quantization of a layer.

    Attributes:
        scales: what shares a scale: the whole weight (`tensor`), a row (`channel`), or a rectangle
            (`block`); `whole_or_row`: the first or the second, as the scale's shape says.
        block: rows and columns of a rectangle; None for others.
        inputs: how its inputs are.
        bits: of a code.
        zeros: the weight has zeros beside its scales.
        reordered: groups follow a stored order of the inputs.
    """

    scales: Scales
    block: tuple[int, int] | None = None
    inputs: Inputs = Inputs()
    bits: int = _BITS
    zeros: bool = False
    reordered: bool = False

    def blocks(self, layer: WeightSpec, scale: str, facts: CheckpointFacts) -> ScaleBlocks:
        """The blocks that share a scale in a layer, whose scales are in the tensor `scale`."""
        row = ScaleBlocks(layer.shape, (1, layer.shape[1]))
        whole = ScaleBlocks(layer.shape, layer.shape)
        if self.block is not None:
            return ScaleBlocks(layer.shape, self.block)
        if self.scales == "whole_or_row":
            fact = facts.tensors.get(scale)
            return row if fact is not None and fact.shape in row.stored_shapes else whole
        return row if self.scales == "channel" else whole

    def activations(
        self, options: CheckpointOptions | None
    ) -> Literal["float", "static", "dynamic"]:
        """The quantization of inputs under the options."""
        float_inputs = options is not None and options.activations == "float"
        return "float" if float_inputs else self.inputs.activations

    def weight_format(self, codes: str, options: CheckpointOptions | None) -> str:
        """The format of a weight of these codes."""
        activations = self.activations(options)
        return codes if activations == "float" else f"{codes}:{activations}"


@dataclass(frozen=True, slots=True)
class Rules:
    """A config's rules for all layers.

    Attributes:
        every: the rules that there are.
        of: the rule of a layer; None: it is kept in floats.
    """

    every: tuple[Rule, ...]
    of: Callable[[WeightSpec], Rule | None]

    def formats(self, codes: str, options: CheckpointOptions | None) -> tuple[str, ...]:
        """Weight formats: floats, for what is not quantized, and those of the rules."""
        return ("float", *sorted({rule.weight_format(codes, options) for rule in self.every}))

    def notes(self, options: CheckpointOptions | None) -> tuple[str, ...]:
        """Differences from the checkpoint's settings."""
        if options is not None and options.activations == "float":
            quantized = any(rule.inputs.activations != "float" for rule in self.every)
            said = "inputs stay float, though the checkpoint's are quantized: activations: float"
            return (said,) if quantized else ()
        if any(rule.inputs.per_tensor for rule in self.every):
            return (
                "dynamic input scales are of each token, not of the whole batch: what one request"
                " gets must not depend on others",
            )
        return ()


def compressed_rules(config: CompressedConfig, kind: Kind) -> Rules:
    """The rules of a compressed-tensors checkpoint.

    Args:
        config: what it says.
        kind: of its codes.

    Raises:
        CheckpointError: it says what is not known, or of other codes.
    """
    rules = {group.name: _rule(group, kind) for group in config.groups}

    def of(layer: WeightSpec) -> Rule | None:
        group = config.group_of(layer.name, layer.kind)
        return None if group is None else rules[group.name]

    return Rules(tuple(rule for rule in rules.values() if rule is not None), of)


def _rule(group: Group, kind: Kind) -> Rule | None:
    path = f"quantization_config.config_groups.{group.name}"
    weights = group.weights
    if weights is None:
        return None
    _check_kind(weights, kind, f"{path}.weights")
    if weights.dynamic or weights.strategy not in ("tensor", "channel", "group", "block"):
        was = "dynamic" if weights.dynamic else f"strategy {weights.strategy!r}"
        raise CheckpointError(f"{path}.weights", was, allowed="tensor, channel, group or block")
    if group.outputs is not None:
        raise CheckpointError(f"{path}.output_activations", "are quantized", allowed="null")
    block = (1, weights.group_size) if weights.group_size is not None else weights.block
    return Rule(
        cast(Scales, "block" if block is not None else weights.strategy),
        block,
        _inputs(group.inputs, kind, f"{path}.input_activations"),
        bits=weights.bits,
        zeros=not weights.symmetric,
        reordered=weights.reordered,
    )


def _inputs(inputs: QuantizationArgs | None, kind: Kind, path: str) -> Inputs:
    if inputs is None:
        return Inputs()
    _check_kind(inputs, kind, path)
    if inputs.bits != _BITS:
        raise CheckpointError(f"{path}.num_bits", f"{inputs.bits}", allowed="8")
    strategies = ("tensor", "token", "group") if inputs.dynamic else ("tensor",)
    if inputs.strategy not in strategies:
        how = "dynamic" if inputs.dynamic else "static"
        was = f"{inputs.strategy!r}, {how}"
        raise CheckpointError(f"{path}.strategy", was, allowed=", ".join(strategies))
    if not inputs.dynamic:
        return Inputs("static", zeros=not inputs.symmetric)
    if not inputs.symmetric:
        raise CheckpointError(f"{path}.symmetric", "false, dynamic", allowed="true")
    return Inputs("dynamic", inputs.group_size, per_tensor=inputs.strategy == "tensor")


def _check_kind(args: QuantizationArgs, kind: Kind, path: str) -> None:
    right = args.kind == kind and (kind == "int" or (args.bits == _BITS and args.symmetric))
    if not right:
        zeros = "" if args.symmetric else ", not symmetric"
        allowed = "int of up to 8 bits" if kind == "int" else "float of 8 bits, symmetric"
        raise CheckpointError(path, f"{args.kind} of {args.bits} bits{zeros}", allowed=allowed)
