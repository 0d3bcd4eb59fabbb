"""The `gguf` quantizer: every weight as plain floats in the activation dtype."""

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
from pegboard_gguf.cache import Cache
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.plan import parameters
from pegboard_gguf.source import GGUFSource
from pegboard_gguf.weights import DequantizedWeights, check_finite, dequantize


class GGUFQuantizer(Quantizer):
    """Reads GGUF's block formats. Weights are dequantized while it is built, unless cached.

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
        self._weights = DequantizedWeights(
            context.facts, context.dtype, Cache.from_environment(), GGUFSource
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
        return BlockScheme(
            weight, stored, self._dtype, block_format=fact.format, weights=self._weights
        )


class _FloatScheme(Scheme):
    """What all of this package's schemes share: they yield plain floats."""

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
        weights: the file's dequantized weights, as far as they are cached.
    """

    def __init__(
        self,
        weight: WeightSpec,
        stored: tuple[StoredParameter, ...],
        dtype: torch.dtype,
        *,
        block_format: str,
        weights: DequantizedWeights,
    ) -> None:
        super().__init__(weight, stored, dtype)
        self._block_format = block_format
        self._weights = weights

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        rows, columns = self._weight.shape
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self._block_format]]
        stored = (rows, columns // block_size * block_bytes)
        _check_shape(self._weight, parameters["weight"], stored)
        values = self._weights.get(f"{self._weight.name}.weight")
        if values is None:
            values = self.dequantize(parameters)
            check_finite(values, f"tensor '{self._weight.name}.weight'")
            values = values.to(self._dtype)
        return LinearWeight("float", self._weight.shape, values=values)

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize(parameters["weight"], self._block_format)


def _check_shape(weight: WeightSpec, stored: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(stored.shape) != shape:
        raise CheckpointError(
            f"tensor '{weight.name}.weight'", f"is {list(stored.shape)}", allowed=f"{list(shape)}"
        )
