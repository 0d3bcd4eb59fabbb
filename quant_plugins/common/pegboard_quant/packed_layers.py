"""Layers in the layout `pack-quantized` of compressed-tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant.compressed_tensors import Group, QuantizationArgs, parse
from pegboard_quant.planning import (
    WORD_BITS,
    GroupedLayer,
    group_count,
    num_words,
    num_words_apart,
)

CODES = "weight_packed"
ZEROS = "weight_zero_point"
LAYOUT = "pack-quantized"
_STRATEGIES = ("tensor", "channel", "group")


@dataclass(frozen=True, slots=True)
class PackedLayer(GroupedLayer):
    """A layer in codes.

    Attributes:
        args: what the config says of its weight.
        codes_apart, zeros_apart: whether codes or zeros do not cross from word to word.
    """

    args: QuantizationArgs
    codes_apart: bool
    zeros_apart: bool


def packed_layer(layer: WeightSpec, facts: CheckpointFacts) -> PackedLayer | None:
    """The form in which a layer is stored; None: not in codes.

    Raises:
        CheckpointError: config and tensors contradict each other, or it says what is not read.
    """
    codes = f"{layer.name}.{CODES}"
    if codes not in facts.tensors:
        return None
    group = parse(facts).group_of(layer.name, layer.kind)
    if group is None or group.weights is None:
        raise CheckpointError(
            f"tensor {codes}",
            "is there, though the config leaves the layer unquantized",
            fix="get config and weights from one checkpoint",
        )
    args = checked(group)
    size = args.group_size if args.group_size is not None else -1
    num_groups = group_count(layer, size, where="quantization_config.group_size")
    zeros = f"{layer.name}.{ZEROS}"
    codes_apart = _apart(codes, 1, layer.shape[1], args.bits, facts)
    zeros_apart = not args.symmetric and _apart(zeros, 0, layer.shape[0], args.bits, facts)
    group_map = _group_map(layer, args, num_groups, facts)
    # With a map any input may be in any group, so that a part of the inputs needs all groups.
    cut = {"out": 0, "in": 1 if num_groups > 1 and not group_map else None}
    stored = [
        _codes(layer, args.bits, apart=codes_apart),
        _scales(layer, args, num_groups, cut),
        StoredParameter("weight_shape", (2,), "int64"),
        *group_map,
    ]
    if not args.symmetric:
        width = _width(layer.shape[0], args.bits, apart=zeros_apart)
        each = WORD_BITS // args.bits
        stored.append(StoredParameter(ZEROS, (width, num_groups), "int32", cut, each, "out"))
    return PackedLayer(
        args=args,
        bits=args.bits,
        shape=layer.shape,
        num_groups=num_groups,
        group_size=layer.shape[1] if size == -1 else size,
        codes_apart=codes_apart,
        zeros_apart=zeros_apart,
        parameters=tuple(stored),
    )


def packed_sizes(groups: Iterable[Group]) -> set[tuple[int, int]]:
    """Bits and group sizes (-1: a row) of groups whose weights are quantized.

    Raises:
        CheckpointError: one of them is not read.
    """
    args = [checked(group) for group in groups if group.weights is not None]
    return {(one.bits, one.group_size or -1) for one in args}


def checked(group: Group) -> QuantizationArgs:
    """The group's weights, where this layout and these strategies are read.

    Raises:
        CheckpointError: they are not.
    """
    path = f"quantization_config.config_groups.{group.name}"
    args = group.weights
    if args is None or args.kind != "int":
        raise CheckpointError(f"{path}.weights.type", "float", allowed="int, in " + LAYOUT)
    if group.layout != LAYOUT:
        raise CheckpointError(f"{path}.format", group.layout, allowed=LAYOUT)
    if args.bits < 2:
        raise CheckpointError(f"{path}.weights.num_bits", f"{args.bits}", allowed="2 to 8")
    if args.strategy not in _STRATEGIES:
        raise CheckpointError(
            f"{path}.weights.strategy", args.strategy, allowed=", ".join(_STRATEGIES)
        )
    for key, other in (("input_activations", group.inputs), ("output_activations", group.outputs)):
        if other is not None:
            raise CheckpointError(
                f"{path}.{key}", f"{other.bits} bits", allowed=f"null, in {LAYOUT}"
            )
    return args


def _apart(tensor: str, axis: int, num_codes: int, bits: int, facts: CheckpointFacts) -> bool:
    """Whether a stream leaves the top bits of words unused, as older versions of the tool wrote those
    of 3, 5, 6 and 7 bits; its length tells."""
    fact = facts.tensors.get(tensor)
    dense, apart = num_words(num_codes, bits), num_words_apart(num_codes, bits)
    if fact is None or WORD_BITS % bits == 0 or len(fact.shape) != 2:
        return False
    if dense == apart > 1:
        raise CheckpointError(
            f"tensor {tensor}",
            f"has {dense} words of {bits} bit codes, which two versions of the tool fill differently",
            fix="quantize the model anew with 4 or 8 bits",
        )
    return fact.shape[axis] == apart != dense


def _width(num_codes: int, bits: int, *, apart: bool) -> int:
    return num_words_apart(num_codes, bits) if apart else num_words(num_codes, bits)


def _codes(layer: WeightSpec, bits: int, *, apart: bool) -> StoredParameter:
    out_features, in_features = layer.shape
    shape = (out_features, _width(in_features, bits, apart=apart))
    return StoredParameter(CODES, shape, "int32", {"out": 0, "in": 1}, WORD_BITS // bits)


def _scales(
    layer: WeightSpec, args: QuantizationArgs, num_groups: int, cut: Mapping[str, int | None]
) -> StoredParameter:
    if args.strategy == "tensor":
        return StoredParameter("weight_scale", (1,))
    return StoredParameter("weight_scale", (layer.shape[0], num_groups), None, cut)


def _group_map(
    layer: WeightSpec, args: QuantizationArgs, num_groups: int, facts: CheckpointFacts
) -> tuple[StoredParameter, ...]:
    if f"{layer.name}.weight_g_idx" in facts.tensors:
        cut = {"out": None, "in": 0}
        return (StoredParameter("weight_g_idx", (layer.shape[1],), "int32", cut),)
    if args.reordered and num_groups > 1:
        raise CheckpointError(
            f"tensor {layer.name}.weight_g_idx",
            "is missing, and actorder says that groups are not consecutive",
            fix="get the checkpoint again, or quantize it with actorder: static",
        )
    return ()
