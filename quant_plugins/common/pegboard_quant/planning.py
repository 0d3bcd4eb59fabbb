"""Functions that plans of quantized checkpoints share. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pegboard.errors import CheckpointError, ConfigError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.dtypes import FLOAT_BYTES
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec

CODE_BITS = {"int8": 8, "uint4": 4, "float8": 8}
"""Bits that a packed code takes, by its kind."""

SCALE_BYTES = 4

WORD_BITS = 32

ACTIVATION_BLOCK = 32
"""Inputs that share a scale where activations are quantized in groups."""


_MAP_BYTES = 4


class CodedLayer(Protocol):
    """The form of a layer in codes.

    Attributes:
        parameters: the tensors.
        num_bytes: in memory.
    """

    @property
    def parameters(self) -> tuple[StoredParameter, ...]: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GroupedLayer:
    """A layer in whole-number codes, with a scale and a zero for each group of a row's inputs.

    Attributes:
        bits: of a code.
        shape: [out_features, in_features].
        num_groups: of a row.
        group_size: inputs a group.
        parameters: the tensors.
    """

    bits: int
    shape: tuple[int, int]
    num_groups: int
    group_size: int
    parameters: tuple[StoredParameter, ...]

    @property
    def num_bytes(self) -> int:
        """In memory: codes of 4 or 8 bits, scales and zeros; and the group of each input, where a
        tensor says it."""
        kind = code_format(self.bits, "float")
        num_bytes = code_bytes(kind, self.shape, self.num_groups, numbers=2)
        mapped = any(parameter.name.endswith("g_idx") for parameter in self.parameters)
        return num_bytes + (_MAP_BYTES * self.shape[1] if mapped else 0)


def parameters_of(layer: WeightSpec, found: CodedLayer | None) -> tuple[StoredParameter, ...]:
    """The tensors of a layer: those of its codes, or, where there are none, of its floats."""
    return plain_parameters(layer) if found is None else found.parameters


def bytes_of(layer: WeightSpec, found: CodedLayer | None, dtype: str) -> int:
    """Bytes in memory of a layer, in codes, or in floats of a type."""
    return plain_bytes(layer, dtype) if found is None else found.num_bytes


def is_plain(layer: WeightSpec, facts: CheckpointFacts) -> bool:
    """Whether the checkpoint keeps the layer's weight in floats."""
    fact = facts.tensors.get(f"{layer.name}.weight")
    return fact is not None and fact.format == "plain" and fact.dtype in FLOAT_BYTES


def plain_parameters(layer: WeightSpec) -> tuple[StoredParameter, ...]:
    """The one tensor of a weight in floats, [out_features, in_features]."""
    return (StoredParameter("weight", layer.shape, shard_axis={"out": 0, "in": 1}),)


def plain_bytes(layer: WeightSpec, dtype: str) -> int:
    """Bytes in memory of a weight in floats."""
    return math.prod(layer.shape) * FLOAT_BYTES[dtype]


def code_bytes(kind: str, shape: tuple[int, int], num_groups: int, numbers: int = 1) -> int:
    """Bytes in memory of a weight in codes, packed as kernels do.

    Args:
        kind: of codes, a key of `CODE_BITS`.
        shape: [out_features, in_features].
        num_groups: scales of a row.
        numbers: float32 numbers a group: 1 for a scale alone, 2 for scale and zero or minimum.
    """
    out_features, in_features = shape
    row = -(-in_features * CODE_BITS[kind] // 8) + num_groups * numbers * SCALE_BYTES
    return out_features * row


def code_format(bits: int, activations: str) -> str:
    """The weight format of whole-number codes: up to 4 bits travel as `uint4`, more as `int8`.

    Args:
        bits: of a code.
        activations: `float`, or `int8`: inputs are quantized in groups of `ACTIVATION_BLOCK`.
    """
    kind = "uint4" if bits <= 4 else "int8"
    return f"{kind}:grouped" if activations == "int8" else kind


def wrong_method(facts: CheckpointFacts, allowed: Iterable[str]) -> CheckpointError:
    """The error of a checkpoint whose method is none of those that are read."""
    return CheckpointError(
        facts.path,
        f"is quantized by {facts.quantization or 'nothing'}",
        allowed=", ".join(allowed),
        fix="quantizer: auto",
    )


def missing_weight(layer: WeightSpec, facts: CheckpointFacts, *others: str) -> CheckpointError:
    """The error of a layer none of whose tensors are there; `others` are those that would do too."""
    fact = facts.tensors.get(f"{layer.name}.weight")
    was = "missing" if fact is None else f"stored as {fact.dtype}"
    return CheckpointError(
        f"tensor {layer.name}.weight",
        f"{was} in {facts.path}",
        allowed=" or ".join(("a weight in floats", *others)),
    )


def unsaid_codes(layer: WeightSpec, codes: str) -> CheckpointError:
    """The error of a layer kept in codes, of which the config does not say so."""
    return CheckpointError(
        f"tensor {layer.name}.weight",
        f"stored as {codes}, and quantization_config leaves {layer.name} in floats",
        fix="get the checkpoint's config.json again",
    )


def group_count(layer: WeightSpec, group_size: int, *, where: str) -> int:
    """Groups of a row, the last one perhaps shorter.

    Args:
        layer: whose.
        group_size: inputs a group; -1: all.
        where: what said so, for the error.

    Raises:
        CheckpointError: the size is neither -1 nor positive.
    """
    if group_size == -1:
        return 1
    if group_size < 1:
        raise CheckpointError(where, f"{group_size}", allowed="-1 or a positive number")
    return -(-layer.shape[1] // group_size)


def check_activation_groups(group_size: int, activations: str) -> None:
    """Raises ConfigError where groups of weights would cut those of quantized activations.

    Args:
        group_size: inputs that share a weight scale; -1: all.
        activations: the option's value.
    """
    if activations == "int8" and group_size > 0 and group_size % ACTIVATION_BLOCK != 0:
        raise ConfigError(
            "quantizer.options.activations",
            f"int8 needs groups of a multiple of {ACTIVATION_BLOCK}, and the weights' have {group_size}",
            fix="activations: float",
        )


def num_words(num_codes: int, bits: int) -> int:
    """32-bit words of a stream of codes."""
    return -(-num_codes * bits // WORD_BITS)


def num_words_apart(num_codes: int, bits: int) -> int:
    """32-bit words of a stream whose codes do not cross from word to word."""
    return -(-num_codes // (WORD_BITS // bits))


def modules_with(suffix: str, facts: CheckpointFacts) -> tuple[str, ...]:
    """Names of the modules that have a tensor of that name."""
    ending = f".{suffix}"
    return tuple(name.removesuffix(ending) for name in facts.tensors if name.endswith(ending))


def whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of a quantization config.

    Raises:
        CheckpointError: it is missing or something else.
    """
    value = config.get(key, default)
    if type(value) is not int:
        was = "is missing" if value is None else f"{value!r}"
        raise CheckpointError(f"quantization_config.{key}", was, allowed="a whole number")
    return value


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """A flag of a quantization config; null counts as missing.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise CheckpointError(f"quantization_config.{key}", f"{value!r}", allowed="true or false")
    return value


def texts(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts of a quantization config; null or missing: none.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(
            f"quantization_config.{key}", f"{value!r}", allowed="a list of module names"
        )
    return tuple(value)
