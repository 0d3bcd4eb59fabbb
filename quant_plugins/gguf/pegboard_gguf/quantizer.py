"""The `gguf` quantizer: weights in the file's codes, or as floats in the activation dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard_gguf.blocks import unpack
from pegboard_gguf.cache import Cache
from pegboard_gguf.forms import PACKED_FORMS
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.plan import format_of, parameters
from pegboard_gguf.source import GGUFSource
from pegboard_gguf.weights import DequantizedWeights, check_finite, dequantize

MIDDLE_CODE = 8.0
"""The code of 0 in Q4_0."""


class GGUFQuantizer(Quantizer):
    """Reads GGUF's block formats. Where none stays packed, weights are dequantized while it is built,
    unless cached.

    Raises:
        CheckpointError: the checkpoint is no GGUF file, or a tensor is damaged.
    """

    def __init__(self, context: QuantizerContext, options: GGUFOptions) -> None:
        if context.facts.source != "gguf":
            raise CheckpointError(
                f"{context.facts.path}",
                f"is read by {context.facts.source!r}, not as GGUF",
                fix="quantizer: auto",
            )
        self._facts = context.facts
        self._dtype: torch.dtype = getattr(torch, context.dtype)
        self._options = options
        self._weights = (
            None
            if options.keeps_codes
            else DequantizedWeights(
                context.facts, context.dtype, Cache.from_environment(), GGUFSource
            )
        )

    def scheme(self, weight: WeightSpec) -> Scheme:
        stored = parameters(weight, self._facts)
        fact = self._facts.tensors.get(f"{weight.name}.weight")
        if fact is None:
            raise CheckpointError(
                f"{self._facts.path}: tensor '{weight.name}.weight'", "is missing"
            )
        if fact.format == "plain":
            return PlainScheme(weight, stored, self._dtype)
        canonical = format_of(fact.format, self._options)
        if canonical != "float":
            return PackedScheme(weight, stored, fact.format, canonical)
        return BlockScheme(
            weight, stored, self._dtype, block_format=fact.format, weights=self._weights
        )


class PackedScheme(Scheme):
    """A block format whose codes are kept; the stored parameter is uint8 [rows, bytes].

    Args:
        weight: which.
        stored: its parameter.
        block_format: ggml's name of it.
        canonical: the `LinearWeight.format` to yield.
    """

    def __init__(
        self,
        weight: WeightSpec,
        stored: tuple[StoredParameter, ...],
        block_format: str,
        canonical: str,
    ) -> None:
        self._weight = weight
        self._stored = stored
        self._block_format = block_format
        self._format = canonical

    @property
    def format(self) -> str:
        return self._format

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return self._stored

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        blocks = parameters["weight"]
        _check_shape(self._weight, blocks, _stored_shape(self._weight, self._block_format))
        unpacked = unpack(blocks.numpy(), self._block_format, self._weight.shape[1])
        scales = torch.from_numpy(unpacked.scales)
        minima = None if unpacked.minima is None else torch.from_numpy(unpacked.minima)
        for numbers in (scales, minima):
            if numbers is not None:
                check_finite(numbers, f"tensor '{self._weight.name}.weight'")
        has_zeros = PACKED_FORMS[self._block_format].offset == "zeros"
        return LinearWeight(
            self._format,
            self._weight.shape,
            codes=torch.from_numpy(unpacked.codes),
            scales=scales,
            zeros=torch.full_like(scales, MIDDLE_CODE) if has_zeros else None,
            minima=minima,
            activations="grouped" if self._format.endswith(":grouped") else "float",
        )

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize(parameters["weight"], self._block_format)


class _FloatScheme(Scheme):
    """The common part of schemes that yield plain floats."""

    def __init__(
        self, weight: WeightSpec, stored: tuple[StoredParameter, ...], dtype: torch.dtype
    ) -> None:
        self._weight = weight
        self._stored = stored
        self._dtype = dtype

    @property
    def format(self) -> str:
        return "float"

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return self._stored


class PlainScheme(_FloatScheme):
    """Floats as they are."""

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        values = parameters["weight"]
        _check_shape(self._weight, values, self._weight.shape)
        return LinearWeight("float", self._weight.shape, values=values.to(self._dtype))

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parameters["weight"].float()


class BlockScheme(_FloatScheme):
    """One of GGUF's block formats; the stored parameter is uint8 [rows, bytes].

    Args:
        weight, stored, dtype: as every scheme.
        block_format: ggml's name of it.
        weights: the file's dequantized weights, as far as they are cached; None: not used.
    """

    def __init__(
        self,
        weight: WeightSpec,
        stored: tuple[StoredParameter, ...],
        dtype: torch.dtype,
        *,
        block_format: str,
        weights: DequantizedWeights | None,
    ) -> None:
        super().__init__(weight, stored, dtype)
        self._block_format = block_format
        self._weights = weights

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        stored = _stored_shape(self._weight, self._block_format)
        _check_shape(self._weight, parameters["weight"], stored)
        name = f"{self._weight.name}.weight"
        values = None if self._weights is None else self._weights.get(name)
        if values is None:
            values = self.dequantize(parameters)
            check_finite(values, f"tensor '{name}'")
            values = values.to(self._dtype)
        return LinearWeight("float", self._weight.shape, values=values)

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize(parameters["weight"], self._block_format)


def _stored_shape(weight: WeightSpec, block_format: str) -> tuple[int, int]:
    rows, columns = weight.shape
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[block_format]]
    return rows, columns // block_size * block_bytes


def _check_shape(weight: WeightSpec, stored: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(stored.shape) != shape:
        raise CheckpointError(
            f"tensor '{weight.name}.weight'", f"is {list(stored.shape)}", allowed=f"{list(shape)}"
        )
